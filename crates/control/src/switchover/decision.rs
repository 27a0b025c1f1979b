//! Decisions of the switchover, and its progress in postcopy.

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

/// Progress of the switch to postcopy, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SwitchProgress {
    /// The source was not asked to switch.
    Unasked,
    /// It was asked, and its reply is lost.
    Unanswered,
    /// It will switch, or has; the devices of a stored guest were sent.
    Accepted,
    /// The source has stopped its guest for good; the destination has loaded the devices of a stored one.
    Switched,
    /// The destination got `cont`, and its reply is lost.
    MayRun,
    /// The guest was seen to run at its destination.
    Runs,
}
