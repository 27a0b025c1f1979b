//! What a QEMU is: its version, machine, memory and migration settings, as it was last asked.

use std::collections::BTreeMap;

use towline_qmp::commands::{
    Capability, HumanMonitorCommand, MigrationInfo, MigrationParameters, MigrationStatus, QomGet,
    QueryMigrate, QueryMigrateCapabilities, QueryMigrateParameters, QueryStatus, QueryUuid, QueryVersion,
    RunState, Status, Version,
};
use towline_qmp::{Client, PeerCredentials};

use super::error::Error;
use super::ram_block::{self, RamBlock};

/// What QEMU appends to a machine type's name to name its QOM type.
const MACHINE_SUFFIX: &str = "-machine";

/// What was known of a QEMU when it was last asked.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Facts {
    /// Its version.
    pub version: Version,
    /// Its machine type as the stream carries it, for example `pc-q35-10.0`.
    pub machine: String,
    /// What its guest does.
    pub status: Status,
    /// The guest's memory, also blocks that are not migrated.
    pub ram_blocks: Vec<RamBlock>,
    /// The guest's UUID; all zeroes if it has none.
    pub uuid: String,
    /// The migration capabilities that this QEMU knows, on or off.
    pub capabilities: BTreeMap<Capability, bool>,
    /// The migration parameters.
    pub parameters: MigrationParameters,
    /// The migration under way or the last one.
    pub migration: MigrationInfo,
    /// Whether it waits for a guest.
    pub incoming: Incoming,
    /// The process that listens on the monitor's socket, as the kernel says: QEMU or a proxy.
    pub peer: Option<PeerCredentials>,
}

impl Facts {
    /// Why QEMU refuses to migrate this guest; empty where it does not.
    #[must_use]
    pub fn blocked_reasons(&self) -> &[String] {
        &self.migration.blocked_reasons
    }

    /// Whether `migrate-incoming` is what this QEMU waits for.
    #[must_use]
    pub fn waits_for_migrate_incoming(&self) -> bool {
        self.incoming == Incoming::Deferred
    }

    /// The blocks that the stream carries.
    pub fn migrated_blocks(&self) -> impl Iterator<Item = &RamBlock> {
        self.ram_blocks.iter().filter(|block| block.is_migrated())
    }
}

/// Whether a QEMU waits for a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// It has a guest of its own.
    No,
    /// Started with `-incoming defer`, and not told yet where to listen. A 7.2 that was started with `-incoming exec:`
    /// or `fd:` looks the same, and refuses `migrate-incoming`.
    Deferred,
    /// It listens, and nobody came yet.
    Listening,
    /// A guest is coming in, or it failed to and QEMU stayed.
    Loading(MigrationStatus),
}

impl Incoming {
    fn of(status: &Status, migration: &MigrationInfo) -> Self {
        if status.status != RunState::INMIGRATE {
            return Self::No;
        }
        match &migration.status {
            Some(status) if *status == MigrationStatus::SETUP => Self::Listening,
            Some(status) if *status != MigrationStatus::NONE => Self::Loading(status.clone()),
            // 7.2 gives no status before the first connection, only the address.
            _ if !migration.socket_address.is_empty() => Self::Listening,
            _ => Self::Deferred,
        }
    }
}

pub(super) fn facts(client: &mut Client) -> Result<Facts, Error> {
    let version = client.execute(&QueryVersion)?;
    let status = client.execute(&QueryStatus)?;
    let migration = client.execute(&QueryMigrate)?;
    Ok(Facts {
        machine: machine(client)?,
        ram_blocks: ram_blocks(client, &version)?,
        uuid: client.execute(&QueryUuid)?.uuid,
        capabilities: capabilities(client)?,
        parameters: client.execute(&QueryMigrateParameters)?,
        incoming: Incoming::of(&status, &migration),
        peer: client.peer_credentials().ok(),
        version,
        status,
        migration,
    })
}

fn machine(client: &mut Client) -> Result<String, Error> {
    let found = client.execute(&QomGet { path: "/machine".into(), property: "type".into() })?;
    match found.as_str().and_then(|text| text.strip_suffix(MACHINE_SUFFIX)) {
        Some(name) => Ok(name.to_owned()),
        None => Err(Error::Machine { socket: client.socket().to_owned(), found }),
    }
}

fn ram_blocks(client: &mut Client, version: &Version) -> Result<Vec<RamBlock>, Error> {
    let text = client.execute(&HumanMonitorCommand { command_line: "info ramblock".into() })?;
    ram_block::parse(&text).map_err(|source| Error::RamBlocks {
        socket: client.socket().to_owned(),
        version: version_text(version),
        source,
    })
}

pub(super) fn capabilities(client: &mut Client) -> Result<BTreeMap<Capability, bool>, Error> {
    let states = client.execute(&QueryMigrateCapabilities)?;
    Ok(states.into_iter().map(|state| (state.capability, state.state)).collect())
}

pub(super) fn version_text(version: &Version) -> String {
    match version.package.as_str() {
        "" => version.qemu.to_string(),
        package => format!("{} ({package})", version.qemu),
    }
}
