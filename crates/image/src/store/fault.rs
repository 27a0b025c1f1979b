//! Bugs of earlier versions, which the simulation enables to prove that it detects them.

/// A rule of the lease protocol that is deliberately broken. Never enabled outside of tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreBug {
    /// Collectors share one lease and do not check for each other; the first one to end removes it.
    SharedCollection,
    /// A renewal succeeds after a gap of any length, and recreates a removed lease.
    GapHeals,
    /// The clock of leases does not count suspended time.
    #[cfg(test)]
    SuspendedTimeIgnored,
    /// An index is put without checking the upload's lease.
    IndexUnchecked,
    /// A collector removes objects without checking its own lease.
    RemovalUnchecked,
    /// An upload checks for collectors before its own lease exists.
    UploadChecksFirst,
    /// A collector ignores the leases of readers.
    ReadersIgnored,
    /// A collector lists readers before it reads the indexes.
    ReadersFirst,
    /// A reader does not check its index again after creating its lease.
    ReaderUnconfirmed,
    /// A collector assumes that a missing index of a reader references no chunks.
    UnknownIndexIgnored,
    /// An upload removes its lease although its index may still arrive.
    LateIndexIgnored,
    /// A collector removes its lease although a removal may still arrive.
    LateRemovalIgnored,
}
