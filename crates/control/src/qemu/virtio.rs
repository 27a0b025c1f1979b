//! Queries about virtio devices: the devices for which they are safe, and the names of features in
//! `x-query-virtio-status`.
//!
//! QEMU names the features that it knows and reports the others as numbers, so a new QEMU reports a name
//! where an old one reports a bit. Bits of any device are named here; device-specific bits of an old QEMU are
//! ambiguous and stay `bit N`.

use std::collections::BTreeSet;

use serde_json::Value;

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
}
