//! Every bound on what a peer may send, with the reason for its value.

/// Longest idstr, block name or machine type name: a counted string has one length byte.
pub const NAME_BYTES_MAX: usize = 255;

/// Longest machine type name in the configuration section, which has a 32-bit length there.
pub const MACHINE_NAME_BYTES_MAX: usize = 256;

/// Maximum number of capabilities a configuration section may list; QEMU 10.0 knows 25 and sends two of them
/// at most.
pub const CAPABILITIES_MAX: usize = 64;

/// Maximum number of RAM blocks of one guest. A large guest with hot-plugged memory and many PCI ROMs has a
/// few hundred.
pub const BLOCKS_MAX: usize = 4096;

/// Largest RAM of one guest: x86 has 52 bits of guest-physical address.
pub const RAM_BYTES_MAX: u64 = 1 << 52;

/// Largest data of a command, whose length field has 16 bits.
pub const COMMAND_BYTES_MAX: usize = u16::MAX as usize;

/// Largest data of a return-path message that a QEMU source takes (`migration.c`).
pub const RETURN_PATH_BYTES_MAX: usize = 512;

/// Maximum size of the device state with its description. A guest with many virtio queues has 1–2 MiB; the
/// state of VFIO devices may be larger, and is sent on lanes or refused here.
pub const DEVICE_STATE_BYTES_MAX: usize = 64 << 20;

/// Most device sections of one guest.
pub const DEVICES_MAX: usize = 65_536;

/// Maximum number of descriptions that do not fit the device state before them. A real one fits; others are a
/// guest's work, and each costs a search through all of it.
pub const DESCRIPTIONS_MAX: usize = 64;

/// Maximum number of configuration subsections: QEMU has three.
pub const SUBSECTIONS_MAX: usize = 3;

/// Largest file: offsets are signed.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// Maximum number of lanes: the channel id has 8 bits, and QEMU's parameter `multifd-channels` ends at 255.
pub const LANES_MAX: usize = 255;

/// Bytes of pages that one multifd packet may carry (`MULTIFD_PACKET_SIZE`).
pub const PACKET_DATA_BYTES_MAX: usize = 512 << 10;

/// Largest compressed form of a packet: deflate and zstd expand incompressible data by less than 1/16.
pub const PACKET_COMPRESSED_BYTES_MAX: usize = PACKET_DATA_BYTES_MAX + (PACKET_DATA_BYTES_MAX >> 4) + 4096;

/// Maximum window of a zstd stream, as a power of two: that of level 20, the highest of QEMU's
/// `multifd-zstd-level`.
pub const ZSTD_WINDOW_LOG_MAX: u32 = 25;

const _: () = assert!(NAME_BYTES_MAX == u8::MAX as usize);
const _: () = assert!(PACKET_COMPRESSED_BYTES_MAX < u32::MAX as usize);
