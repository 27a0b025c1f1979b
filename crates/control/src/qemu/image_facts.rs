//! The queries of a QEMU whose replies the rules compare with an image, which may be sent before its
//! greeting.

use serde_json::Value;
use towline_compat::facts::{self, MemoryBackend, Netdev, QemuDevice};
use towline_qmp::commands::HumanMonitorCommand;
use towline_qmp::{self as qmp, CommandReply, CommandRequest};

use super::error::Error;
use super::qom::if_known;
use super::{device_tree, drives};

/// The network backends that processes serve by a chardev.
pub(super) const VHOST_USER: &str = "vhost-user";
/// Number of [`image_requests`].
pub(super) const IMAGE_REQUESTS: usize = 4;

/// Facts that rules compare with an image, beyond the [`QemuState`](super::facts::QemuState) of a QEMU.
/// `None`: QEMU does not report it.
#[derive(Debug)]
pub(super) struct QemuHardware {
    pub(super) devices: Option<Vec<QemuDevice>>,
    pub(super) netdevs: Option<Vec<Netdev>>,
    pub(super) memory_backends: Option<Vec<MemoryBackend>>,
    pub(super) drives: Option<Vec<facts::Drive>>,
}

/// The queries of [`QemuHardware`].
pub(super) fn image_requests() -> Result<[CommandRequest; IMAGE_REQUESTS], qmp::Error> {
    Ok([
        CommandRequest::new(&HumanMonitorCommand { command_line: "info qtree".into() })?,
        CommandRequest::new(&HumanMonitorCommand { command_line: "info network".into() })?,
        CommandRequest::raw("query-memdev", None),
        CommandRequest::raw("query-block", None),
    ])
}

/// The facts in the replies to [`image_requests`] of the QEMU of this process.
pub(super) fn image_facts(
    replies: impl IntoIterator<Item = CommandReply>,
    pid: Option<i32>,
) -> Result<QemuHardware, Error> {
    let mut replies = replies.into_iter();
    let mut next = || replies.next().expect("one reply for each request");
    let devices = if_known(next().of::<HumanMonitorCommand>())?.map(|text| device_tree::parse(&text));
    let netdevs = if_known(next().of::<HumanMonitorCommand>())?.map(|text| netdevs(&text));
    let memory_backends = if_known(next().value())?.map(|reply| memory_backends(&reply));
    let drives = if_known(next().value())?.map(|reply| drives::drives(&reply, pid));
    Ok(QemuHardware { devices, netdevs, memory_backends, drives })
}

/// Backends in the reply to `query-memdev`.
pub(super) fn memory_backends(reply: &Value) -> Vec<MemoryBackend> {
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
pub(super) fn netdevs(text: &str) -> Vec<Netdev> {
    let netdev = |line: &str| {
        let (id, rest) = line.trim_start_matches([' ', '\\']).split_once(": ")?;
        let kind = rest.split(',').find_map(|part| part.strip_prefix("type="))?;
        (kind != "nic").then(|| Netdev { id: id.into(), kind: kind.trim().into(), ..Netdev::default() })
    };
    text.lines().filter_map(netdev).collect()
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
