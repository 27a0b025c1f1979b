//! Decisions of the switchover.

/// A decision, in the order in which they are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Decision {
    /// A destination that runs the guest by itself is sent the last bytes.
    Commit,
    /// The destination holds the guest; its source is acknowledged and may complete.
    Acknowledge,
    /// The source is done with the guest; the towline at its destination is sent the outcome.
    Complete,
    /// The source is done with the guest; the guest is started at its destination.
    Run,
    /// The move is over, and its source stays with an older state of the guest. Only a record has this one:
    /// nothing is decided.
    Left,
}
