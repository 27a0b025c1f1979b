//! Limits of facts that are read.

/// Bytes of a facts file, or of what a QEMU binary dumps (1 to 2 MiB for x86).
pub const FACTS_BYTES_MAX: usize = 32 << 20;
/// Devices of a QEMU, RAM blocks, processors, drives: each list. Rules compare each with each.
pub const ENTRIES_MAX: usize = 4 << 10;
/// Sections of a stream: several of each processor.
pub const SECTIONS_MAX: usize = 32 << 10;
/// Properties of one device.
pub const PROPERTIES_MAX: usize = 4096;
/// Virtqueues of one device, as many as QEMU has (`VIRTIO_QUEUE_MAX`).
pub const VIRTQUEUES_MAX: usize = 1024;
/// Maximum nesting of subsections.
pub const DEPTH_MAX: usize = 16;
/// Maximum number of findings reported.
pub const FINDINGS_MAX: usize = 256;
/// A `migration_version` string, as a page of sysfs.
pub const MIGRATION_VERSION_BYTES_MAX: usize = 4096;
