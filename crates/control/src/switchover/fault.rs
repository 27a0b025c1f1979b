//! Faults that the machine once had, to be put back by its model: each has to be found there. None exists outside of tests.

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests put one back"))]
pub(super) enum Fault {
    /// A cancellation is carried out after a destination that runs by itself was given the last bytes.
    CancelAfterCommit,
    /// A stream that breaks then gives the source its guest back.
    UndoesCommitted,
    /// Whether a source that somebody else drives is still there is not looked at.
    IgnoresLink,
    /// A monitor without an answer counts as a process that has exited.
    TimeoutIsExit,
    /// A source that was cancelled counts as complete, for the destination has everything.
    CompletesCancelledSource,
    /// A destination runs the guest when the towline at its source is lost.
    RunsWhenCut,
    /// A destination that has everything is given up with its source.
    AbandonsCompleteDestination,
    /// A decision is acted on and not recorded first.
    ActsBeforeRecord,
    /// A move is finished by its record at one end, and by no evidence of the other.
    ResumesWithoutEvidence,
    /// The towline at the source gets the message that the guest does not run though that was not seen.
    ReportsNotRunUnseen,
}

/// Which one is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct FaultSwitch {
    #[cfg(test)]
    fault: Option<Fault>,
}

impl FaultSwitch {
    #[cfg(not(test))]
    pub(super) fn has(self, _fault: Fault) -> bool {
        false
    }

    #[cfg(test)]
    pub(super) fn has(self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// With this fault.
    #[cfg(test)]
    pub(super) fn with(fault: Fault) -> Self {
        Self { fault: Some(fault) }
    }
}
