//! Starting, steering and ending a migration.

use serde::Serialize;

use super::{Empty, command};

/// `migrate`: starts to send the guest, or resumes after `postcopy-paused`.
#[derive(Clone, Debug, Serialize)]
pub struct Migrate {
    /// Address of the destination: `tcp:HOST:PORT`, `unix:PATH`, `fd:NAME`, `exec:COMMAND`,
    /// `file:PATH,offset=N` (file: QEMU 8.2).
    pub uri: String,
    /// Resume an interrupted postcopy migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<bool>,
}
command!(Migrate, "migrate", Empty);

impl Migrate {
    /// Sends to a URI.
    pub fn to_uri(uri: impl Into<String>) -> Self {
        Self { uri: uri.into(), resume: None }
    }
}

/// `migrate-incoming`: a QEMU started with `-incoming defer` starts to listen. `tcp:ADDRESS:0` chooses a
/// port, which is then in [`MigrationInfo::socket_address`](super::MigrationInfo::socket_address).
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrateIncoming {
    /// Address, as of [`Migrate`].
    pub uri: String,
    /// True (QEMU's default): QEMU exits if the migration fails. QEMU 9.1 and later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_on_error: Option<bool>,
}
command!(MigrateIncoming, "migrate-incoming", Empty);

impl MigrateIncoming {
    /// Listens on a URI.
    pub fn on_uri(uri: impl Into<String>) -> Self {
        Self { uri: uri.into(), exit_on_error: None }
    }
}

/// `migrate_cancel`: cancels the migration; the guest continues at the source. Succeeds without a migration
/// too.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateCancel;
command!(MigrateCancel, "migrate_cancel", Empty);

/// `migrate-start-postcopy`: switches to postcopy. The destination runs, and the remaining pages follow.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MigrateStartPostcopy;
command!(MigrateStartPostcopy, "migrate-start-postcopy", Empty);

/// `migrate-pause`: interrupts a postcopy migration, so it can be recovered over another connection.
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

/// `yank`: closes connections without waiting for the peer.
#[derive(Clone, Debug, Serialize)]
pub struct Yank {
    /// Whose connections.
    pub instances: Vec<YankInstance>,
}
command!(Yank, "yank", Empty);

/// QEMU's `YankInstance`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum YankInstance {
    /// The migration, incoming or outgoing.
    Migration,
}
