//! Virtio features of the card, and the offload of the tap that belongs to each.
//!
//! The control queue stays in QEMU, with everything that needs it: filters, MAC, RSS, `CTRL_GUEST_OFFLOADS`.

use virtio_bindings::virtio_config::VIRTIO_F_ANY_LAYOUT;
use virtio_bindings::virtio_net as virtio;

use towline_vhost_user::features::{EVENT_IDX, INDIRECT_DESC, VERSION_1};

bitflags::bitflags! {
    /// Offloads that the receiver of a tap's frames supports (`TUN_F_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct Offloads: u32 {
        const CSUM = libc::TUN_F_CSUM;
        const TSO4 = libc::TUN_F_TSO4;
        const TSO6 = libc::TUN_F_TSO6;
        const ECN = libc::TUN_F_TSO_ECN;
        const UFO = libc::TUN_F_UFO;
        const USO = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    }
}

const fn bit(number: u32) -> u64 {
    1 << number
}

pub(crate) const MRG_RXBUF: u64 = bit(virtio::VIRTIO_NET_F_MRG_RXBUF);
/// All offloads of frames that the guest sends depend on it.
#[cfg(feature = "af-xdp")]
pub(crate) const CSUM: u64 = bit(virtio::VIRTIO_NET_F_CSUM);
pub(crate) const MQ: u64 = bit(virtio::VIRTIO_NET_F_MQ);

/// Features that do not depend on the tap, and their names. Some are implemented by QEMU and need only be
/// offered.
const ALWAYS: [(u64, &str); 8] = [
    (MRG_RXBUF, "VIRTIO_NET_F_MRG_RXBUF"),
    (bit(virtio::VIRTIO_NET_F_MTU), "VIRTIO_NET_F_MTU"),
    (bit(virtio::VIRTIO_NET_F_STATUS), "VIRTIO_NET_F_STATUS"),
    (bit(virtio::VIRTIO_NET_F_CTRL_VQ), "VIRTIO_NET_F_CTRL_VQ"),
    (bit(virtio::VIRTIO_NET_F_CTRL_RX), "VIRTIO_NET_F_CTRL_RX"),
    (bit(virtio::VIRTIO_NET_F_CTRL_MAC_ADDR), "VIRTIO_NET_F_CTRL_MAC_ADDR"),
    (bit(virtio::VIRTIO_NET_F_GUEST_ANNOUNCE), "VIRTIO_NET_F_GUEST_ANNOUNCE"),
    (bit(VIRTIO_F_ANY_LAYOUT), "VIRTIO_F_ANY_LAYOUT"),
];

/// Features with which the guest receives frames with offloads of the tap, and their names.
const FROM_TAP: [(u64, Offloads, &str); 7] = [
    (bit(virtio::VIRTIO_NET_F_GUEST_CSUM), Offloads::CSUM, "VIRTIO_NET_F_GUEST_CSUM"),
    (bit(virtio::VIRTIO_NET_F_GUEST_TSO4), Offloads::TSO4, "VIRTIO_NET_F_GUEST_TSO4"),
    (bit(virtio::VIRTIO_NET_F_GUEST_TSO6), Offloads::TSO6, "VIRTIO_NET_F_GUEST_TSO6"),
    (bit(virtio::VIRTIO_NET_F_GUEST_ECN), Offloads::ECN, "VIRTIO_NET_F_GUEST_ECN"),
    (bit(virtio::VIRTIO_NET_F_GUEST_UFO), Offloads::UFO, "VIRTIO_NET_F_GUEST_UFO"),
    (bit(virtio::VIRTIO_NET_F_GUEST_USO4), Offloads::USO, "VIRTIO_NET_F_GUEST_USO4"),
    (bit(virtio::VIRTIO_NET_F_GUEST_USO6), Offloads::USO, "VIRTIO_NET_F_GUEST_USO6"),
];

/// Features with which the guest sends frames with offloads that the tap supports, and their names.
const TO_TAP: [(u64, Offloads, &str); 6] = [
    (bit(virtio::VIRTIO_NET_F_CSUM), Offloads::CSUM, "VIRTIO_NET_F_CSUM"),
    (bit(virtio::VIRTIO_NET_F_HOST_TSO4), Offloads::TSO4, "VIRTIO_NET_F_HOST_TSO4"),
    (bit(virtio::VIRTIO_NET_F_HOST_TSO6), Offloads::TSO6, "VIRTIO_NET_F_HOST_TSO6"),
    (bit(virtio::VIRTIO_NET_F_HOST_ECN), Offloads::ECN, "VIRTIO_NET_F_HOST_ECN"),
    (bit(virtio::VIRTIO_NET_F_HOST_UFO), Offloads::UFO, "VIRTIO_NET_F_HOST_UFO"),
    (bit(virtio::VIRTIO_NET_F_HOST_USO), Offloads::USO, "VIRTIO_NET_F_HOST_USO"),
];

/// Names of the other features, with those of the rings.
const OTHER_NAMES: [(u64, &str); 4] = [
    (MQ, "VIRTIO_NET_F_MQ"),
    (VERSION_1, "VIRTIO_F_VERSION_1"),
    (INDIRECT_DESC, "VIRTIO_RING_F_INDIRECT_DESC"),
    (EVENT_IDX, "VIRTIO_RING_F_EVENT_IDX"),
];

/// Returns the names of these features, or their numbers if they have none.
pub fn feature_names(features: u64) -> impl Iterator<Item = String> {
    let set = (0..u64::BITS).filter(move |number| features & 1 << number != 0);
    set.map(|number| {
        let of_tap = FROM_TAP.iter().chain(&TO_TAP).map(|(feature, _, name)| (feature, name));
        let mut names =
            of_tap.chain(ALWAYS.iter().chain(&OTHER_NAMES).map(|(feature, name)| (feature, name)));
        let known = names.find(|(feature, _)| **feature == 1 << number);
        known.map_or_else(|| format!("feature {number}"), |(_, name)| (*name).to_owned())
    })
}

/// Features of a card on a tap with these offloads.
pub(crate) fn offered(offloads: Offloads, pairs: usize) -> u64 {
    let of_tap = FROM_TAP.iter().chain(&TO_TAP).filter(|(_, offload, _)| offloads.contains(*offload));
    let features = ALWAYS.iter().map(|(feature, _)| feature).chain(of_tap.map(|(feature, ..)| feature));
    let multiqueue = if pairs > 1 { MQ } else { 0 };
    features.fold(multiqueue, |features, feature| features | feature)
}

/// Offloads of frames for a guest that negotiated these features. The tap has one switch for both kinds of
/// USO, so the guest must have both.
pub(crate) fn offloads(features: u64) -> Offloads {
    let offloads_of = |negotiated: bool| {
        let features = FROM_TAP.iter().filter(|(feature, ..)| (features & feature != 0) == negotiated);
        features.fold(Offloads::empty(), |all, (_, offload, _)| all | *offload)
    };
    let supported = offloads_of(true) - offloads_of(false);
    // The other offloads imply a checksum that is not computed yet.
    if supported.contains(Offloads::CSUM) { supported } else { Offloads::empty() }
}

/// The features that the format of a received frame follows.
pub(crate) fn of_received_frames(features: u64) -> u64 {
    features & FROM_TAP.iter().fold(VERSION_1 | MRG_RXBUF, |all, (feature, ..)| all | feature)
}

/// Length of the virtio header: that of a legacy driver without mergeable buffers has no `num_buffers`.
pub(crate) fn header_bytes(features: u64) -> usize {
    if features & (VERSION_1 | MRG_RXBUF) == 0 { 10 } else { 12 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offloads_follow_the_negotiated_features() {
        assert_eq!(offloads(offered(Offloads::all(), 1)), Offloads::all());
        let csum = bit(virtio::VIRTIO_NET_F_GUEST_CSUM);
        let tso = bit(virtio::VIRTIO_NET_F_GUEST_TSO4);
        assert_eq!(offloads(csum | tso | VERSION_1), Offloads::CSUM | Offloads::TSO4);
        assert_eq!(offloads(tso), Offloads::empty(), "segmentation needs checksums");
        let uso = bit(virtio::VIRTIO_NET_F_GUEST_USO4);
        assert_eq!(offloads(csum | uso), Offloads::CSUM, "USO needs both kinds");
    }

    #[test]
    fn features_without_an_offload_of_the_tap_are_not_offered() {
        let features = offered(Offloads::all() - Offloads::USO, 2);
        assert_eq!(features & bit(virtio::VIRTIO_NET_F_HOST_USO), 0);
        assert_eq!(features & bit(virtio::VIRTIO_NET_F_GUEST_USO4), 0);
        assert_ne!(features & MQ, 0);
        assert_eq!(offered(Offloads::all(), 1) & MQ, 0);
    }

    #[test]
    fn features_are_named_as_in_the_specification() {
        let names: Vec<String> = feature_names(MRG_RXBUF | EVENT_IDX | 1 << 63).collect();
        assert_eq!(names, ["VIRTIO_NET_F_MRG_RXBUF", "VIRTIO_RING_F_EVENT_IDX", "feature 63"]);
    }

    #[test]
    fn the_header_length_follows_the_driver() {
        assert_eq!((header_bytes(0), header_bytes(MRG_RXBUF), header_bytes(VERSION_1)), (10, 12, 12));
    }
}
