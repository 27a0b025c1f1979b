//! Feature bits: those of virtio, for the rings, and those of the vhost-user protocol.

use virtio_bindings::{virtio_config, virtio_ring};

/// `VHOST_F_LOG_ALL`: writes of the device are logged. QEMU sets and clears it on live rings.
pub const LOG_ALL: u64 = 1 << 26;
/// `VHOST_USER_F_PROTOCOL_FEATURES`: protocol features are negotiated, and rings start disabled.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VIRTIO_F_VERSION_1`.
pub const VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
/// `VIRTIO_RING_F_INDIRECT_DESC`.
pub const INDIRECT_DESC: u64 = 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
/// `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_IDX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
/// Features of session and rings, offered with every device.
pub const COMMON: u64 = VERSION_1 | INDIRECT_DESC | EVENT_IDX | LOG_ALL | PROTOCOL_FEATURES;
/// Features that the frontend negotiates itself, without the guest's driver.
pub(crate) const NOT_OF_THE_DRIVER: u64 = LOG_ALL | PROTOCOL_FEATURES;

bitflags::bitflags! {
    /// Protocol features (`VHOST_USER_PROTOCOL_F_*`) that this crate supports.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct ProtocolFeatures: u64 {
        /// More than one queue (pair).
        const MQ = 1 << 0;
        /// The dirty log is shared memory; without it QEMU refuses to migrate.
        const LOG_SHMFD = 1 << 1;
        /// The device announces the guest itself (`SEND_RARP`).
        const RARP = 1 << 2;
        /// Acknowledgements of all requests (`VHOST_USER_NEED_REPLY`).
        const REPLY_ACK = 1 << 3;
        /// The frontend sets the MTU (`NET_SET_MTU`).
        const NET_MTU = 1 << 4;
        /// A guest may run here before its memory has arrived (postcopy).
        const PAGEFAULT = 1 << 8;
        /// The backend has the device's configuration space.
        const CONFIG = 1 << 9;
        /// `RESET_DEVICE` is supported.
        const RESET_DEVICE = 1 << 13;
        /// Memory regions are added and removed one by one.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// The frontend sends the virtio status byte.
        const STATUS = 1 << 16;
        /// The device's own state travels through the frontend.
        const DEVICE_STATE = 1 << 19;
    }
}

impl ProtocolFeatures {
    /// Offered with every device.
    pub const ALWAYS: Self = Self::MQ
        .union(Self::LOG_SHMFD)
        .union(Self::REPLY_ACK)
        .union(Self::RESET_DEVICE)
        .union(Self::CONFIGURE_MEM_SLOTS)
        .union(Self::STATUS);
    /// Offered if the device supports them.
    pub const BY_DEVICE: Self = Self::RARP.union(Self::NET_MTU).union(Self::CONFIG).union(Self::DEVICE_STATE);
}
