//! Limits of a ring, and sizes of its parts.

/// Maximum number of entries of a ring.
pub const RING_SIZE_MAX: u16 = 32768;
/// Maximum number of descriptors in one chain, as in QEMU's own devices (`VIRTQUEUE_MAX_SIZE`).
pub const CHAIN_DESCRIPTORS_MAX: usize = 1024;
/// Maximum number of memory segments in one chain, which is that of one system call.
pub const CHAIN_SEGMENTS_MAX: usize = towline_channel::IOV_MAX;
/// Number of memory segments from which on a batch takes no further chain. It bounds the memory that a driver
/// makes the device allocate.
pub const BATCH_SEGMENTS_MAX: usize = 16 << 10;
/// Maximum number of bytes in one chain.
pub const CHAIN_BYTES_MAX: u32 = 1 << 30;

pub(super) const DESCRIPTOR_BYTES: usize = 16;
pub(super) const USED_BYTES: usize = 8;
/// Layout of available and used ring: flags, index, entries, event index of the other side.
pub(super) const INDEX: usize = 2;
pub(super) const ENTRIES: usize = 4;
