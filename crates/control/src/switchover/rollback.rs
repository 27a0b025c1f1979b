//! From a failed stream to a source that has its guest back, or a destination that is the only one to hold it.

use super::events::{DestinationKind, DestinationStatus, Directive, Input, SourceKind, SourceStatus};
use super::fault::SwitchoverBug;
use super::machine::{Switchover, SwitchoverState};
use super::outcome::{SwitchoverOutcome, Unresolved};

impl Switchover {
    /// The stream failed before the source was acknowledged: the source has its guest or gets it back.
    pub(super) fn undo(&mut self) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return Directive::End(SwitchoverOutcome::Safe);
        }
        self.stage = SwitchoverState::Undoing { cancelled: false };
        Directive::QuerySource
    }

    pub(super) fn undoing(&mut self, input: Input, cancelled: bool) -> Directive {
        match input {
            Input::Source(SourceStatus::HasGuest) => self.restore(false),
            // It completed all the same: the destination acknowledged it directly.
            Input::Source(SourceStatus::Completed) => self.restore(true),
            Input::Source(SourceStatus::CompletedThenResumed) => self.restore(false),
            Input::Source(SourceStatus::Exited) => self.take_over(),
            Input::Source(SourceStatus::Migrating | SourceStatus::Unknown) | Input::Done => {
                Directive::QuerySource
            }
            Input::TimedOut if !cancelled => {
                self.stage = SwitchoverState::Undoing { cancelled: true };
                Directive::CancelMigration
            }
            _ => Directive::End(SwitchoverOutcome::Unresolved(Unresolved::SourceUnknown)),
        }
    }

    /// The source's process has exited. Only a destination that was sent everything can run the guest.
    pub(super) fn take_over(&mut self) -> Directive {
        self.source_exited = true;
        match self.request.destination {
            DestinationKind::Qemu
                if self.sent && !self.has_fault(SwitchoverBug::AbandonsCompleteDestination) =>
            {
                self.stage = SwitchoverState::TakingOver;
                Directive::QueryDestination
            }
            DestinationKind::Stream | DestinationKind::Relayed | DestinationKind::Towline if self.sent => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::DestinationMayRun))
            }
            _ => Directive::End(SwitchoverOutcome::Unresolved(Unresolved::SourceExited)),
        }
    }

    pub(super) fn taking_over(&mut self, input: Input) -> Directive {
        match input {
            Input::Destination(DestinationStatus::Loaded | DestinationStatus::Running) => self.complete(),
            Input::Destination(DestinationStatus::Loading | DestinationStatus::Unknown) => {
                Directive::QueryDestination
            }
            Input::Destination(DestinationStatus::Exited) => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::BothExited))
            }
            Input::Destination(DestinationStatus::Failed) => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::SourceExited))
            }
            _ => Directive::End(SwitchoverOutcome::Unresolved(Unresolved::DestinationUnknown)),
        }
    }

    /// The source keeps its guest. `stopped`: this migration stopped it.
    pub(super) fn restore(&mut self, stopped: bool) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return Directive::End(SwitchoverOutcome::Safe);
        }
        let resumes = stopped && self.guest.is_live();
        self.stage = SwitchoverState::Restoring { resumes };
        if resumes { Directive::ResumeSource } else { Directive::RestoreSource }
    }

    pub(super) fn restoring(&mut self, input: Input, resumes: bool) -> Directive {
        match input {
            Input::NotDone if resumes && self.is_memory_shared() => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::UpgradeNotUndone))
            }
            Input::NotDone => Directive::End(SwitchoverOutcome::Unresolved(Unresolved::SourceUnknown)),
            Input::Source(SourceStatus::Exited) => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::SourceExitedSince))
            }
            _ => Directive::End(SwitchoverOutcome::Safe),
        }
    }

    /// Restores the source even if the peer did not receive the message: without another one it does not start the guest.
    pub(super) fn withdrawing(&mut self) -> Directive {
        self.restore(false)
    }
}
