//! The bits that are negotiated: virtio's for the rings, and vhost-user's own for the protocol.

use virtio_bindings::{virtio_config, virtio_ring};

/// `VHOST_F_LOG_ALL`: what the device writes is logged. QEMU sets and clears it on live rings.
pub const LOG_ALL: u64 = 1 << 26;
/// `VHOST_USER_F_PROTOCOL_FEATURES`: there are protocol features, and rings start disabled.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VIRTIO_F_VERSION_1`.
pub const VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
/// `VIRTIO_RING_F_INDIRECT_DESC`.
pub const INDIRECT_DESC: u64 = 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
/// `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_IDX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
/// What the session and the rings bring along with every device.
pub const OURS: u64 = VERSION_1 | INDIRECT_DESC | EVENT_IDX | LOG_ALL | PROTOCOL_FEATURES;
/// What a frontend may leave out without the guest having said so; the rest it must have been offered.
pub(crate) const NOT_THE_GUESTS: u64 = LOG_ALL | PROTOCOL_FEATURES;

bitflags::bitflags! {
    /// What the two ends of the socket agree upon (`VHOST_USER_PROTOCOL_F_*`), as far as this crate knows it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct ProtocolFeatures: u64 {
        /// More than one queue (pair).
        const MQ = 1 << 0;
        /// The dirty log is shared memory; without it QEMU refuses to migrate.
        const LOG_SHMFD = 1 << 1;
        /// The device announces the guest itself (`SEND_RARP`).
        const RARP = 1 << 2;
        /// Every request can be answered.
        const REPLY_ACK = 1 << 3;
        /// The MTU is told (`NET_SET_MTU`).
        const NET_MTU = 1 << 4;
        /// A guest may run here before its memory has come (postcopy).
        const PAGEFAULT = 1 << 8;
        /// The device's configuration space is the backend's.
        const CONFIG = 1 << 9;
        /// `RESET_DEVICE` is understood.
        const RESET_DEVICE = 1 << 13;
        /// Memory comes and goes region by region.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// The virtio status byte is told.
        const STATUS = 1 << 16;
        /// The device's own state travels through the frontend.
        const DEVICE_STATE = 1 << 19;
    }
}

impl ProtocolFeatures {
    /// What the session offers with every device.
    pub const ALWAYS: Self = Self::MQ
        .union(Self::LOG_SHMFD)
        .union(Self::REPLY_ACK)
        .union(Self::RESET_DEVICE)
        .union(Self::CONFIGURE_MEM_SLOTS)
        .union(Self::STATUS);
    /// What a device may add, because only it can do it.
    pub const BY_DEVICE: Self = Self::RARP.union(Self::NET_MTU).union(Self::CONFIG).union(Self::DEVICE_STATE);
}
