//! Faults that the machine once had. The model injects them to prove that it would find them; none exists
//! outside of tests.

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests inject one"))]
pub(super) enum SwitchoverBug {
    /// A cancellation is carried out after a destination that runs the guest by itself was sent the last
    /// bytes.
    CancelAfterCommit,
    /// A stream that fails then gives the source its guest back.
    UndoesCommitted,
    /// The connection to a source that another party drives is not probed.
    IgnoresLink,
    /// A monitor that does not reply counts as a process that has exited.
    TimeoutIsExit,
    /// A source that was cancelled counts as complete because the destination has everything.
    CompletesCancelledSource,
    /// A destination starts the guest when the towline at its source is lost.
    RunsWhenCut,
    /// A destination that has everything is abandoned together with its source.
    AbandonsCompleteDestination,
    /// A decision is acted on before it is recorded.
    ActsBeforeRecord,
    /// A move is finished by its record at one end without evidence of the other.
    ResumesWithoutEvidence,
    /// A source gets its guest back although the guest may have run in the memory that it shares with its
    /// destination.
    RevivesSharedSource,
    /// The destination in shared memory is ended before the decision that it runs the guest is withdrawn.
    EndsBeforeRetract,
    /// A later towline that fails to start the guest withdraws the decision, although the guest may have run.
    ResumeTakesRunBack,
    /// The source's towline is sent that the guest does not run, although that was not seen.
    ReportsNotRunUnseen,
    /// A guest is reported to be paused at both ends although the record still has it running at its
    /// destination.
    ReportsPausedUnretracted,
    /// The guest counts as its source's without a query of the destination, where another party may run it.
    OverlooksRunningDestination,
    /// A destination takes the locks of its drives when it has loaded the guest.
    LocksWhenLoaded,
    /// A destination that gets `cont` from another party while it loads runs the guest by itself.
    RunsAfterLoading,
    /// Two QEMUs are connected to each other without a record, and may complete by themselves.
    ConnectsUnrecorded,
    /// A source that has completed gets its guest back, although the operator of its destination may know that it is done.
    RegainsCompleted,
    /// A lost reply to `migrate-start-postcopy` counts as its refusal.
    LostReplyIsRefusal,
    /// A cancellation is carried out after the source was asked to switch to postcopy.
    CancelAfterSwitch,
    /// The destination is started when the source has accepted to switch, and has not done it.
    RunsBeforeSwitch,
    /// A postcopy that lost its connection counts as a migration that failed.
    PausedIsFailed,
    /// A source that cannot be queried after the request to switch counts as one that has its guest.
    UnseenSourceHasGuest,
    /// A guest whose memory ended with its source counts as complete.
    CompletesWithoutMemory,
    /// A destination is to run a guest whose source has exited, and may not have sent all memory.
    RunsWithoutMemory,
    /// The decision to run the guest is taken again when all memory was sent.
    DecidesAgain,
    /// A later towline starts a guest whose memory ended with its source.
    ResumesWithoutMemory,
    /// `resume` takes a destination whose host is off for one that never ran the guest.
    FencedHasNotRun,
    /// A destination that has not reported that it loaded a stored guest's devices counts as one that does not run it.
    UnloadedIsSafe,
    /// A destination whose monitor is lost while memory is sent counts as one that has exited.
    LostMonitorIsExit,
    /// A later towline takes any completed migration of the source for that of this move.
    TakesAnyCompletion,
    /// A destination runs a guest without its next generation, which the source may have taken to run it again.
    RunsWithoutGeneration,
    /// A source that is not connected again to the other host gets its guest back.
    RegainsDisconnected,
    /// A guest that was left paused at its source counts as one that has not run at its destination.
    LeftHasNotRun,
}

/// The injected fault, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct FaultSwitch(Option<SwitchoverBug>);

impl FaultSwitch {
    /// Returns true if the model has injected this fault; never outside of tests.
    pub(super) fn has(self, fault: SwitchoverBug) -> bool {
        self.0 == Some(fault)
    }

    /// A switch with this fault injected.
    #[cfg(test)]
    pub(super) fn with(fault: SwitchoverBug) -> Self {
        Self(Some(fault))
    }
}
