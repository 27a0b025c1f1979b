//! Sizes of a device's virtqueues, by queries that do not disturb it.
//!
//! ```text
//!   x-query-virtio-vhost-queue-status   a queue that a vhost backend processes: its size, known to QEMU
//!   x-query-virtio-queue-status         any other: size and maximum. Of one that a vhost backend processes, QEMU gets the
//!                                       index with GET_VRING_BASE, at which a vhost-user backend stops the queue
//! ```

use serde_json::{Value, json};
use towline_compat::facts::{Netdev, QemuDevice, Virtqueue};
use towline_compat::limits::VIRTQUEUES_MAX;

use super::connection::Qemu;
use super::error::Error;
use super::image_facts::VHOST_USER;

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
    use super::*;

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
