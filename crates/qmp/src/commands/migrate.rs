//! Starting, steering and ending a migration.

use serde::{Deserialize, Serialize};

use super::{Empty, MigrationStatus, command};

/// Where a migration goes to or comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationEndpoint {
    /// `tcp:HOST:PORT`, `unix:PATH`, `fd:NAME`, `exec:COMMAND`, `file:PATH,offset=N` (file: QEMU 8.2).
    Uri(String),
    /// The same in structure, of QEMU 8.2 and later: no quoting, but a 7.2 refuses it.
    Channels(Vec<MigrationChannel>),
}

/// One entry of [`MigrationEndpoint::Channels`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationChannel {
    /// `main`, or `cpr` of QEMU 10.0.
    pub channel_type: String,
    /// Where.
    pub addr: Address,
}

/// QEMU's `MigrationAddress`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "transport", rename_all = "kebab-case")]
pub enum Address {
    /// A socket.
    Socket(SocketAddress),
    /// A command, its stdin or stdout.
    Exec {
        /// The program and its arguments.
        args: Vec<String>,
    },
    /// A file.
    File {
        /// Its path; `/dev/fdset/ID` for one of `add-fd`.
        filename: String,
        /// Where in it the stream begins, in bytes.
        offset: u64,
    },
}

/// QEMU's `SocketAddress`, as far as we use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum SocketAddress {
    /// TCP.
    Inet {
        /// A name or an address.
        host: String,
        /// A port in digits; `0` in `migrate-incoming` chooses one.
        port: String,
    },
    /// A Unix socket.
    Unix {
        /// Its path.
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
        /// Its name.
        str: String,
    },
}

/// `migrate`: starts to send the guest, or resumes after `postcopy-paused`.
#[derive(Clone, Debug, Serialize)]
pub struct Migrate {
    /// To where.
    #[serde(flatten)]
    pub target: MigrationEndpoint,
    /// Go on with a postcopy migration that was interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<bool>,
}
command!(Migrate, "migrate", Empty);

impl Migrate {
    /// Begins to send to a URI.
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
    /// Where.
    #[serde(flatten)]
    pub target: MigrationEndpoint,
    /// True if QEMU exits when the migration fails; QEMU's default is yes. Of QEMU 9.1 and later.
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

/// `migrate_cancel`: ends it; the source runs on. No error where nothing is under way.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateCancel;
command!(MigrateCancel, "migrate_cancel", Empty);

/// `migrate-start-postcopy`: the destination runs as soon as it can, pages follow.
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
    /// Where.
    pub uri: String,
}
command!(MigrateRecover, "migrate-recover", Empty);

/// `migrate-continue`: continues from a state that waits for it.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateContinue {
    /// The state that it is in: [`MigrationStatus::PRE_SWITCHOVER`].
    pub state: MigrationStatus,
}
command!(MigrateContinue, "migrate-continue", Empty);
