//! Facts about a QEMU: version, machine, memory and migration settings, as of the last query.

use std::collections::BTreeMap;

use serde_json::Value;
use towline_qmp::commands::{
    Capability, CapabilityState, HumanMonitorCommand, MigrationInfo, MigrationParameters, MigrationStatus,
    QomGet, QueryMigrate, QueryMigrateCapabilities, QueryMigrateParameters, QueryStatus, QueryUuid,
    QueryVersion, RunState, Status, Version,
};
use towline_qmp::{self as qmp, Client, CommandReply, CommandRequest, PeerCredentials};

use super::error::Error;
use super::ram_block::{self, RamBlockInfo};

/// Suffix that QEMU appends to a machine type's name for its QOM type.
const MACHINE_SUFFIX: &str = "-machine";

/// Facts about a QEMU as of the last query.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct QemuState {
    /// Version of the QEMU.
    pub version: Version,
    /// Machine type in the stream, for example `pc-q35-10.0`.
    pub machine: String,
    /// Run state of its guest.
    pub status: Status,
    /// RAM blocks of the guest, including those that are not migrated.
    pub ram_blocks: Vec<RamBlockInfo>,
    /// The guest's UUID; all zeroes if it has none.
    pub uuid: String,
    /// The migration capabilities that this QEMU knows, on or off.
    pub capabilities: BTreeMap<Capability, bool>,
    /// The migration parameters.
    pub parameters: MigrationParameters,
    /// The current or last migration.
    pub migration: MigrationInfo,
    /// State of an incoming migration.
    pub incoming: IncomingState,
    /// The process that listens on the monitor's socket, from the kernel: QEMU or a proxy.
    pub peer: Option<PeerCredentials>,
}

impl QemuState {
    /// Reasons for which QEMU refuses to migrate this guest, if any.
    #[must_use]
    pub fn blocked_reasons(&self) -> &[String] {
        &self.migration.blocked_reasons
    }

    /// Returns true if this QEMU waits for `migrate-incoming`.
    #[must_use]
    pub fn waits_for_migrate_incoming(&self) -> bool {
        self.incoming == IncomingState::Deferred
    }

    /// Value of the parameter `mode` for a plain migration, where QEMU has it: with another one, such as
    /// `cpr-reboot`, the guest is stopped from the beginning.
    pub(crate) fn normal_mode(&self) -> Option<String> {
        self.parameters.mode.as_ref().map(|_| "normal".to_owned())
    }

    /// Address of a block in QEMU's process, where QEMU reports it (8.2 and later).
    pub(crate) fn address_of(&self, block: &str) -> Option<u64> {
        self.ram_blocks.iter().find(|found| found.name == block)?.address
    }

    /// The blocks that the stream carries.
    pub fn migrated_blocks(&self) -> impl Iterator<Item = &RamBlockInfo> {
        self.ram_blocks.iter().filter(|block| block.is_migrated())
    }
}

/// State of an incoming migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IncomingState {
    /// None: it has a guest.
    No,
    /// Started with `-incoming defer`, and no `migrate-incoming` received yet. A 7.2 with `-incoming exec:`
    /// or `fd:` reports the same, and refuses `migrate-incoming`.
    Deferred,
    /// Listening for its first connection.
    Listening,
    /// A guest is being received, or failed to load and QEMU did not exit.
    Loading(MigrationStatus),
}

impl IncomingState {
    fn of(status: &Status, migration: &MigrationInfo) -> Self {
        if status.status != RunState::INMIGRATE {
            return Self::No;
        }
        match &migration.status {
            Some(status) if *status == MigrationStatus::SETUP => Self::Listening,
            Some(status) if *status != MigrationStatus::NONE => Self::Loading(status.clone()),
            // 7.2 reports no status before the first connection, only the address.
            _ if !migration.socket_address.is_empty() => Self::Listening,
            _ => Self::Deferred,
        }
    }
}

/// Number of [`requests`].
pub(super) const REQUESTS: usize = 8;

/// The queries for the facts. The longest come first: a QEMU that is being started reads them while it
/// creates its machine.
pub(super) fn requests() -> Result<[CommandRequest; REQUESTS], qmp::Error> {
    Ok([
        CommandRequest::new(&HumanMonitorCommand { command_line: "info ramblock".into() })?,
        CommandRequest::new(&QomGet { path: "/machine".into(), property: "type".into() })?,
        CommandRequest::new(&QueryMigrateCapabilities)?,
        CommandRequest::new(&QueryMigrateParameters)?,
        CommandRequest::new(&QueryVersion)?,
        CommandRequest::new(&QueryStatus)?,
        CommandRequest::new(&QueryMigrate)?,
        CommandRequest::new(&QueryUuid)?,
    ])
}

/// Queries the facts with one round trip.
pub(super) fn facts(client: &mut Client) -> Result<QemuState, Error> {
    let replies = client.execute_all(&requests()?)?;
    of_replies(client, replies)
}

/// The facts in the replies to [`requests`].
pub(super) fn of_replies(
    client: &Client,
    replies: impl IntoIterator<Item = CommandReply>,
) -> Result<QemuState, Error> {
    let mut replies = replies.into_iter();
    let mut next = || replies.next().expect("one reply for each request");
    let blocks = next().of::<HumanMonitorCommand>()?;
    let machine = machine(next().of::<QomGet>()?, client.socket())?;
    let capabilities = by_name(next().of::<QueryMigrateCapabilities>()?);
    let parameters = next().of::<QueryMigrateParameters>()?;
    let version = next().of::<QueryVersion>()?;
    let status = next().of::<QueryStatus>()?;
    let migration = next().of::<QueryMigrate>()?;
    Ok(QemuState {
        machine,
        ram_blocks: ram_blocks(&blocks, &version, client.socket())?,
        uuid: next().of::<QueryUuid>()?.uuid,
        capabilities,
        parameters,
        incoming: IncomingState::of(&status, &migration),
        peer: client.peer_credentials().ok(),
        version,
        status,
        migration,
    })
}

fn machine(found: Value, socket: &str) -> Result<String, Error> {
    match found.as_str().and_then(|text| text.strip_suffix(MACHINE_SUFFIX)) {
        Some(name) => Ok(name.to_owned()),
        None => Err(Error::Machine { socket: socket.to_owned(), found }),
    }
}

fn ram_blocks(text: &str, version: &Version, socket: &str) -> Result<Vec<RamBlockInfo>, Error> {
    ram_block::parse(text).map_err(|source| Error::RamBlocks {
        socket: socket.to_owned(),
        version: version_text(version),
        source,
    })
}

/// Queries capabilities and parameters with one round trip.
pub(super) fn settings(
    client: &mut Client,
) -> Result<(BTreeMap<Capability, bool>, MigrationParameters), Error> {
    let requests =
        [CommandRequest::new(&QueryMigrateCapabilities)?, CommandRequest::new(&QueryMigrateParameters)?];
    let mut replies = client.execute_all(&requests)?.into_iter();
    let mut next = || replies.next().expect("one reply for each request");
    Ok((by_name(next().of::<QueryMigrateCapabilities>()?), next().of::<QueryMigrateParameters>()?))
}

fn by_name(states: Vec<CapabilityState>) -> BTreeMap<Capability, bool> {
    states.into_iter().map(|state| (state.capability, state.state)).collect()
}

pub(super) fn version_text(version: &Version) -> String {
    match version.package.as_str() {
        "" => version.qemu.to_string(),
        package => format!("{} ({package})", version.qemu),
    }
}
