//! Starting, steering and ending a migration.

use serde::{Deserialize, Serialize};

use super::{Empty, MigrationStatus, command};

/// Address of the other end of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationEndpoint {
    /// `tcp:HOST:PORT`, `unix:PATH`, `fd:NAME`, `exec:COMMAND`, `file:PATH,offset=N` (file: QEMU 8.2).
    Uri(String),
    /// The same as structured values, without quoting. QEMU 8.2 and later.
    Channels(Vec<MigrationChannel>),
}

/// One entry of [`MigrationEndpoint::Channels`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationChannel {
    /// `main`, or `cpr` of QEMU 10.0.
    pub channel_type: String,
    /// Address.
    pub addr: Address,
}

/// QEMU's `MigrationAddress`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "transport", rename_all = "kebab-case")]
pub enum Address {
    /// A socket.
    Socket(SocketAddress),
    /// Standard input or output of a command.
    Exec {
        /// The program and its arguments.
        args: Vec<String>,
    },
    /// A file.
    File {
        /// Path; `/dev/fdset/ID` for a set of `add-fd`.
        filename: String,
        /// Offset of the stream in the file, in bytes.
        offset: u64,
    },
}

/// QEMU's `SocketAddress`, in the kinds that are used here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum SocketAddress {
    /// TCP.
    Inet {
        /// Host name or address.
        host: String,
        /// A port in digits; `0` in `migrate-incoming` chooses one.
        port: String,
    },
    /// A Unix socket.
    Unix {
        /// Path.
        path: String,
    },
    /// vsock.
    Vsock {
        /// The context id in digits.
        cid: String,
        /// The port in digits.
        port: String,
    },
    /// A descriptor given by `getfd`.
    Fd {
        /// Name of the descriptor.
        str: String,
    },
}

/// `migrate`: starts to send the guest, or resumes after `postcopy-paused`.
#[derive(Clone, Debug, Serialize)]
pub struct Migrate {
    /// Address of the destination.
    #[serde(flatten)]
    pub target: MigrationEndpoint,
    /// Resume an interrupted postcopy migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<bool>,
}
command!(Migrate, "migrate", Empty);

impl Migrate {
    /// Sends to a URI.
    #[must_use]
    pub fn to_uri(uri: impl Into<String>) -> Self {
        Self { target: MigrationEndpoint::Uri(uri.into()), resume: None }
    }
}

/// `migrate-incoming`: a QEMU started with `-incoming defer` starts to listen. `tcp:ADDRESS:0` chooses a port, which
/// [`MigrationInfo::listening`](super::MigrationInfo::listening) then returns.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrateIncoming {
    /// Address.
    #[serde(flatten)]
    pub target: MigrationEndpoint,
    /// True (QEMU's default): QEMU exits if the migration fails. QEMU 9.1 and later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_on_error: Option<bool>,
}
command!(MigrateIncoming, "migrate-incoming", Empty);

impl MigrateIncoming {
    /// Listens on a URI.
    #[must_use]
    pub fn on_uri(uri: impl Into<String>) -> Self {
        Self { target: MigrationEndpoint::Uri(uri.into()), exit_on_error: None }
    }
}

/// `migrate_cancel`: cancels the migration; the guest continues at the source. Succeeds without a migration too.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateCancel;
command!(MigrateCancel, "migrate_cancel", Empty);

/// `migrate-start-postcopy`: switches to postcopy. The destination runs, and the remaining pages follow.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateStartPostcopy;
command!(MigrateStartPostcopy, "migrate-start-postcopy", Empty);

/// `migrate-pause`: interrupts a postcopy migration, so that it can be recovered over another connection.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigratePause;
command!(MigratePause, "migrate-pause", Empty);

/// `migrate-recover`: the destination of an interrupted postcopy migration listens again.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateRecover {
    /// Address.
    pub uri: String,
}
command!(MigrateRecover, "migrate-recover", Empty);

/// `migrate-continue`: continues a migration that pauses in a state.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateContinue {
    /// The migration's current state: [`MigrationStatus::PRE_SWITCHOVER`].
    pub state: MigrationStatus,
}
command!(MigrateContinue, "migrate-continue", Empty);
