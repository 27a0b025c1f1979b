//! Faults of earlier versions, which the simulation puts back to show that it finds them.

/// A rule of the leases that is broken on purpose. Outside of tests none ever is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// All collectors share one lease, do not look for each other, and the first that ends removes it.
    SharedCollection,
    /// A renewal after a gap of any length is a renewal, and creates a lease that is gone.
    GapHeals,
    /// The clock of leases stands while its host is suspended.
    #[cfg(test)]
    SuspendedTimeIgnored,
    /// An index is put without a look at the upload's lease.
    IndexUnchecked,
    /// A collector removes without a look at its own lease.
    RemovalUnchecked,
    /// An upload looks for collectors before its own lease is there.
    UploadLooksFirst,
    /// A collector does not look at the leases of readers.
    ReadersIgnored,
    /// A collector lists readers before it reads the indexes.
    ReadersFirst,
    /// A reader does not look whether its index is still there once its lease is.
    ReaderUnconfirmed,
    /// A collector takes a reader's index that it does not find for one that names nothing.
    UnknownIndexIgnored,
    /// An upload removes its lease though its index may still arrive.
    LateIndexIgnored,
    /// A collector removes its lease though a removal may still arrive.
    LateRemovalIgnored,
}
