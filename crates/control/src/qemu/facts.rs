//! Facts about a QEMU: version, machine, memory and migration settings, as of the last query; and the
//! queries of its hardware.

use std::collections::BTreeMap;

use serde_json::Value;
use towline_compat::facts::{IncomingState, MemoryBackend, Netdev, QemuFacts};
use towline_qmp::commands::{
    Capability, CapabilityState, HumanMonitorCommand, MigrationInfo, MigrationParameters, MigrationStatus,
    QomGet, QueryMigrate, QueryMigrateCapabilities, QueryMigrateParameters, QueryStatus, QueryUuid,
    QueryVersion, RunState, Status, Version,
};
use towline_qmp::{self as qmp, Client, Command, CommandReply, CommandRequest, PeerCredentials};

use super::device_tree::if_known;
use super::error::Error;
use super::ram_block::{self, RamBlockInfo};
use super::{device_tree, open_files};

/// Suffix that QEMU appends to a machine type's name for its QOM type.
const MACHINE_SUFFIX: &str = "-machine";

/// Facts about a QEMU as of the last query.
#[derive(Clone, Debug, PartialEq)]
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
    pub fn blocked_reasons(&self) -> &[String] {
        &self.migration.blocked_reasons
    }

    /// Returns true if this QEMU waits for `migrate-incoming`.
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

/// State of an incoming migration. A 7.2 with `-incoming exec:` or `fd:` reports the same as with `defer`, and refuses
/// `migrate-incoming`.
fn incoming(status: &Status, migration: &MigrationInfo) -> IncomingState {
    if status.status != RunState::INMIGRATE {
        return IncomingState::No;
    }
    match &migration.status {
        Some(status) if *status == MigrationStatus::SETUP => IncomingState::Listening,
        Some(status) if *status != MigrationStatus::NONE => IncomingState::Loading,
        // 7.2 reports no status before the first connection, only the address.
        _ if !migration.socket_address.is_empty() => IncomingState::Listening,
        _ => IncomingState::Deferred,
    }
}

/// Number of [`requests`].
const REQUESTS: usize = 8;

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
        incoming: incoming(&status, &migration),
        peer: client.peer_credentials().ok(),
        version,
        status,
        migration,
    })
}

fn machine(found: Value, socket: &str) -> Result<String, Error> {
    let name = found.as_str().and_then(|text| text.strip_suffix(MACHINE_SUFFIX)).map(str::to_owned);
    name.ok_or_else(|| Error::Machine { socket: socket.to_owned(), found })
}

fn ram_blocks(text: &str, version: &Version, socket: &str) -> Result<Vec<RamBlockInfo>, Error> {
    ram_block::parse(text).map_err(|source| Error::RamBlocks {
        socket: socket.to_owned(),
        version: version_text(version),
        source,
    })
}

/// Executes two commands with one round trip.
pub(super) fn execute_both<A: Command, B: Command>(
    client: &mut Client,
    first: &A,
    second: &B,
) -> Result<(A::Return, B::Return), qmp::Error> {
    let requests = [CommandRequest::new(first)?, CommandRequest::new(second)?];
    let mut replies = client.execute_all(&requests)?.into_iter();
    let mut next = || replies.next().expect("one reply for each request");
    Ok((next().of::<A>()?, next().of::<B>()?))
}

pub(super) fn by_name(states: Vec<CapabilityState>) -> BTreeMap<Capability, bool> {
    states.into_iter().map(|state| (state.capability, state.state)).collect()
}

pub(super) fn version_text(version: &Version) -> String {
    match version.package.as_str() {
        "" => version.qemu.to_string(),
        package => format!("{} ({package})", version.qemu),
    }
}

// The queries whose replies the rules compare with an image. They may be sent before the QEMU's greeting.

/// The network backends that processes serve by a chardev.
pub(super) const VHOST_USER: &str = "vhost-user";
/// Number of [`image_requests`].
pub(super) const IMAGE_REQUESTS: usize = 4;

/// The queries of facts that rules compare with an image, beyond the [`QemuState`] of a QEMU.
pub(super) fn image_requests() -> Result<[CommandRequest; IMAGE_REQUESTS], qmp::Error> {
    Ok([
        CommandRequest::new(&HumanMonitorCommand { command_line: "info qtree".into() })?,
        CommandRequest::new(&HumanMonitorCommand { command_line: "info network".into() })?,
        CommandRequest::raw("query-memdev", None),
        CommandRequest::raw("query-block", None),
    ])
}

/// The facts in the replies to [`image_requests`] of the QEMU of this process, and no others.
pub(super) fn image_facts(
    replies: impl IntoIterator<Item = CommandReply>,
    pid: Option<i32>,
) -> Result<QemuFacts, Error> {
    let mut replies = replies.into_iter();
    let mut next = || replies.next().expect("one reply for each request");
    let devices = if_known(next().of::<HumanMonitorCommand>())?.map(|text| device_tree::parse(&text));
    let netdevs = if_known(next().of::<HumanMonitorCommand>())?.map(|text| netdevs(&text));
    let memory_backends = if_known(next().value())?.map(|reply| memory_backends(&reply));
    let drives = if_known(next().value())?.map(|reply| open_files::drives(&reply, pid));
    Ok(QemuFacts { devices, netdevs, memory_backends, drives, ..QemuFacts::default() })
}

/// Backends in the reply to `query-memdev`.
fn memory_backends(reply: &Value) -> Vec<MemoryBackend> {
    let is_on = |value: &Value| value.as_bool().unwrap_or_default();
    let backend = |entry: &Value| MemoryBackend {
        id: entry["id"].as_str().unwrap_or_default().to_owned(),
        bytes: entry["size"].as_u64().unwrap_or_default(),
        prealloc: is_on(&entry["prealloc"]),
        share: is_on(&entry["share"]),
    };
    reply.as_array().into_iter().flatten().map(backend).collect()
}

/// ` \ n0: index=0,type=user,net=10.0.2.0` in `info network`; NICs are devices, and not listed here.
fn netdevs(text: &str) -> Vec<Netdev> {
    let netdev = |line: &str| {
        let (id, rest) = line.trim_start_matches([' ', '\\']).split_once(": ")?;
        let kind = rest.split(',').find_map(|part| part.strip_prefix("type="))?;
        (kind != "nic").then(|| Netdev { id: id.into(), kind: kind.trim().into(), ..Netdev::default() })
    };
    text.lines().filter_map(netdev).collect()
}

/// Returns true if the guest runs, or is suspended and wakes up by itself.
pub(crate) fn is_live(status: &Status) -> bool {
    status.running || status.status == RunState::SUSPENDED
}

/// Returns true if the chardev with this label is not connected, by the reply to `query-chardev`.
pub(crate) fn is_disconnected(chardevs: &Value, label: &str) -> bool {
    chardevs.as_array().into_iter().flatten().any(|chardev| {
        let name = chardev["filename"].as_str().unwrap_or_default();
        chardev["label"] == label && name.starts_with("disconnected:")
    })
}

/// Marks the backends to whose process QEMU is not connected, by `info network` and the reply to
/// `query-chardev`.
pub(super) fn mark_disconnected(netdevs: &mut [Netdev], text: &str, chardevs: &Value) {
    // ` \ n0: index=0,type=vhost-user,vhost-user0 to net0`
    let label = |netdev: &Netdev| {
        let mut lines = text.lines().map(|line| line.trim_start_matches([' ', '\\']));
        let own = lines.find_map(|line| line.strip_prefix(netdev.id.as_str())?.strip_prefix(": "))?;
        Some(own.rsplit_once(" to ")?.1.trim())
    };
    for netdev in netdevs.iter_mut().filter(|netdev| netdev.kind == VHOST_USER) {
        netdev.is_disconnected = label(netdev).is_some_and(|label| is_disconnected(chardevs, label));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn netdevs_are_parsed_and_nics_skipped() {
        let text = "net0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\n \\ n0: index=0,type=user,net=10.0.2.0\n\
             alone: index=0,type=tap,ifname=t0\n";
        let found: Vec<_> = netdevs(text).into_iter().map(|netdev| (netdev.id, netdev.kind)).collect();
        assert_eq!(found, [("n0".into(), "user".into()), ("alone".into(), "tap".into())]);
    }

    #[test]
    fn a_backend_without_its_process_is_marked() {
        let text = "card: index=0,type=nic,model=virtio-net-pci\n \\ n0: index=0,type=vhost-user,vhost-user0 to net0\n \
            n00: index=0,type=vhost-user,vhost-user0 to net1\n";
        let chardevs = json!([
            { "label": "net0", "filename": "disconnected:unix:/run/a" },
            { "label": "net1", "filename": "unix:/run/b" },
        ]);
        let mut found = netdevs(text);
        mark_disconnected(&mut found, text, &chardevs);
        let found: Vec<_> = found.iter().map(|netdev| (netdev.id.as_str(), netdev.is_disconnected)).collect();
        assert_eq!(found, [("n0", true), ("n00", false)]);
    }
}
