//! Queries about virtio devices: the devices for which they are safe, the names of features in
//! `x-query-virtio-status`, and the sizes of virtqueues.
//!
//! QEMU names the features that it knows and reports the others as numbers, so a new QEMU reports a name
//! where an old one reports a bit. Bits of any device are named here; device-specific bits of an old QEMU are
//! ambiguous and stay `bit N`.
//!
//! ```text
//!   x-query-virtio-vhost-queue-status   a queue that a vhost backend processes: its size, known to QEMU
//!   x-query-virtio-queue-status         any other: size and maximum. Of one that a vhost backend processes, QEMU gets the
//!                                       index with GET_VRING_BASE, at which a vhost-user backend stops the queue
//! ```

use std::collections::BTreeSet;

use serde_json::{Value, json};
use towline_compat::facts::{Netdev, QemuDevice, Virtqueue};
use towline_compat::limits::VIRTQUEUES_MAX;

use super::connection::Qemu;
use super::error::Error;
use super::facts::VHOST_USER;

/// virtio 1.3, "Reserved Feature Bits".
const TRANSPORT: [(u32, &str); 15] = [
    (24, "VIRTIO_F_NOTIFY_ON_EMPTY"),
    (27, "VIRTIO_F_ANY_LAYOUT"),
    (28, "VIRTIO_RING_F_INDIRECT_DESC"),
    (29, "VIRTIO_RING_F_EVENT_IDX"),
    (32, "VIRTIO_F_VERSION_1"),
    (33, "VIRTIO_F_IOMMU_PLATFORM"),
    (34, "VIRTIO_F_RING_PACKED"),
    (35, "VIRTIO_F_IN_ORDER"),
    (36, "VIRTIO_F_ORDER_PLATFORM"),
    (37, "VIRTIO_F_SR_IOV"),
    (38, "VIRTIO_F_NOTIFICATION_DATA"),
    (39, "VIRTIO_F_NOTIF_CONFIG_DATA"),
    (40, "VIRTIO_F_RING_RESET"),
    (41, "VIRTIO_F_ADMIN_VQ"),
    (30, "VHOST_USER_F_PROTOCOL_FEATURES"),
];

/// vhost devices that QEMU can be queried for while they run. In QEMU 10.0 others (`vhost-user-rng`, `-gpio`,
/// `-snd`, …) have no method that the queries call (`get_vhost`): QEMU crashes, and its guest with it.
const QUERIED_VHOST: [&str; 7] = [
    "vhost-scsi",
    "vhost-user-blk",
    "vhost-user-fs-device",
    "vhost-user-gpu",
    "vhost-user-scsi",
    "vhost-user-vsock-device",
    "vhost-vsock-device",
];

/// Returns true if QEMU survives a query about a device of this type.
pub(super) fn may_be_queried(kind: &str) -> bool {
    !kind.starts_with("vhost-") || QUERIED_VHOST.contains(&kind)
}

/// Features of one set of the status.
pub(super) fn names(set: &Value) -> BTreeSet<String> {
    let named =
        ["transports", "dev-features"].into_iter().flat_map(|key| set[key].as_array().into_iter().flatten());
    let named = named.filter_map(Value::as_str).map(|text| text.split(':').next().unwrap_or(text).to_owned());
    let unknown = ["unknown-transports", "unknown-dev-features"].into_iter();
    let unknown = unknown
        .filter_map(|key| set[key].as_u64())
        .flat_map(|bits| (0..u64::BITS).filter(move |bit| bits >> bit & 1 == 1).map(name));
    named.chain(unknown).collect()
}

fn name(bit: u32) -> String {
    let known = TRANSPORT.iter().find(|(known, _)| *known == bit);
    known.map_or_else(|| format!("bit {bit}"), |(_, name)| (*name).to_owned())
}

/// Network backends that run as vhost-user.
const VHOST_USER_NETDEVS: [&str; 2] = [VHOST_USER, "passt"];

impl Qemu {
    /// Virtqueues of the virtio device at a QOM path; none if a query might stop one.
    pub(super) fn virtqueues(
        &mut self,
        path: &str,
        device: &QemuDevice,
        netdevs: &[Netdev],
    ) -> Result<Vec<Virtqueue>, Error> {
        let is_vhost = self.vhost_queue(path, 0)?.is_some();
        // A backend begins to process queues when the guest's driver is ready, which may be before the next
        // query. A QEMU that waits for `migrate-incoming` has no driver.
        if !is_vhost && may_be_vhost_user(device, netdevs) && !self.facts().waits_for_migrate_incoming() {
            return Ok(Vec::new());
        }
        let mut virtqueues = Vec::new();
        while virtqueues.len() < VIRTQUEUES_MAX {
            let index = virtqueues.len();
            let mut queue = if is_vhost { self.vhost_queue(path, index)? } else { None };
            if queue.is_none() {
                // The backend does not process this one, as the control queue of a NIC.
                queue = self.virtio_queue(path, index)?;
            }
            let Some(queue) = queue else { break };
            virtqueues.push(queue);
        }
        Ok(virtqueues)
    }

    /// `None` if no vhost backend processes it, or if QEMU does not know the query.
    fn vhost_queue(&mut self, path: &str, index: usize) -> Result<Option<Virtqueue>, Error> {
        let status = self.queue_status("x-query-virtio-vhost-queue-status", path, index)?;
        Ok(status.and_then(|status| size(&status["num"])).map(|size| Virtqueue { size, size_max: None }))
    }

    /// `None` if there is no such queue.
    fn virtio_queue(&mut self, path: &str, index: usize) -> Result<Option<Virtqueue>, Error> {
        let status = self.queue_status("x-query-virtio-queue-status", path, index)?;
        Ok(status.and_then(|status| {
            let size_max = size(&status["vring-num-default"]);
            size(&status["vring-num"]).map(|size| Virtqueue { size, size_max })
        }))
    }

    fn queue_status(&mut self, command: &str, path: &str, index: usize) -> Result<Option<Value>, Error> {
        let Value::Object(arguments) = json!({ "path": path, "queue": index }) else { return Ok(None) };
        self.query_raw(command, Some(arguments))
    }
}

fn size(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|size| u32::try_from(size).ok())
}

fn may_be_vhost_user(device: &QemuDevice, netdevs: &[Netdev]) -> bool {
    match device.kind.as_str() {
        "virtio-net-device" => {
            let id = device.properties.get("netdev").map(String::as_str).unwrap_or_default();
            let netdev = netdevs.iter().find(|netdev| netdev.id == id);
            // A backend that is not listed may be of any kind.
            netdev.map_or(!id.is_empty(), |netdev| VHOST_USER_NETDEVS.contains(&netdev.kind.as_str()))
        }
        "virtio-crypto-device" => true,
        kind => kind.starts_with("vhost-user-"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn vhost_devices_are_queried_if_they_are_known() {
        let kinds = ["virtio-rng-device", "vhost-user-vsock-device", "vhost-user-rng", "vhost-vdpa-device"];
        assert_eq!(kinds.map(may_be_queried), [true, true, false, false]);
    }

    #[test]
    fn feature_bit_of_an_old_qemu_gets_the_name_of_a_new_one() {
        let old = json!({ "transports": [], "dev-features": [], "unknown-dev-features": 1_u64 << 40 });
        let new =
            json!({ "transports": ["VIRTIO_F_RING_RESET: Driver can reset a queue"], "dev-features": [] });
        assert_eq!(names(&old), names(&new));
        assert_eq!(names(&json!({ "unknown-dev-features": 2 })), ["bit 1".to_owned()].into());
        assert_eq!(names(&Value::Null), BTreeSet::new());
    }

    #[test]
    fn vhost_user_is_recognised_by_its_type_or_its_backend() {
        let device = |kind: &str, netdev: &str| QemuDevice {
            kind: kind.into(),
            properties: [("netdev".to_owned(), netdev.to_owned())].into(),
            ..QemuDevice::default()
        };
        let netdevs = [("a", "tap"), ("b", "vhost-user"), ("c", "passt")].map(|(id, kind)| Netdev {
            id: id.into(),
            kind: kind.into(),
            ..Netdev::default()
        });
        let nic = |netdev| may_be_vhost_user(&device("virtio-net-device", netdev), &netdevs);
        assert_eq!(["a", "b", "c", "unlisted", ""].map(nic), [false, true, true, true, false]);
        let others = ["vhost-user-fs-device", "vhost-user-blk", "virtio-rng-device", "virtio-crypto-device"]
            .map(|kind| may_be_vhost_user(&device(kind, ""), &netdevs));
        assert_eq!(others, [true, true, false, true]);
    }
}
