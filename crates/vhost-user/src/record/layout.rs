//! Layout of a record that its parts share.

/// Version of the format.
pub(super) const VERSION: u32 = 1;
/// Bytes of a page, to which each queue is aligned.
pub(super) const PAGE: usize = 4096;
