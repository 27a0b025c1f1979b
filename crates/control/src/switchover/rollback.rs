//! From a failed stream to a source that has its guest back, or a destination that is the only one to hold it.

use super::events::{
    DestinationKind, DestinationStatus, Directive, FinalRunState, Input, MemorySharing, PeerMessage,
    SourceKind, SourceStatus,
};
use super::fault::SwitchoverBug;
use super::machine::{Restoration, Switchover, SwitchoverState};
use super::outcome::{AtDestination, AtSource, SwitchoverOutcome, ToDo};

impl Switchover {
    /// The stream failed before the source was acknowledged: the source has its guest or gets it back.
    pub(super) fn undo(&mut self) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return self.confirm();
        }
        self.stage = SwitchoverState::Undoing { cancelled: false };
        Directive::QuerySource
    }

    pub(super) fn undoing(&mut self, input: Input, cancelled: bool) -> Directive {
        match input {
            Input::Source(SourceStatus::HasGuest) => self.restore(false),
            // An operator at the destination may have been told so.
            Input::Source(SourceStatus::Completed)
                if self.may_take_back() && !self.fault.has(SwitchoverBug::RegainsCompleted) =>
            {
                self.complete()
            }
            // It completed all the same: the destination acknowledged it directly.
            Input::Source(SourceStatus::Completed) if self.fault.has(SwitchoverBug::RegainsCompleted) => {
                self.regain(true)
            }
            Input::Source(SourceStatus::Completed) => self.restore(true),
            Input::Source(SourceStatus::CompletedThenResumed) => self.restore(false),
            // It may have run on after its cancellation.
            Input::Source(SourceStatus::Exited) if cancelled && self.may_take_back() => {
                self.source_exited = true;
                self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination)
            }
            Input::Source(SourceStatus::Exited) => self.take_over(),
            // Another party has switched it to postcopy.
            Input::Source(SourceStatus::Following | SourceStatus::FollowingPaused) => {
                self.unresolved(AtDestination::Unknown, ToDo::Reconnect)
            }
            Input::Source(SourceStatus::Migrating | SourceStatus::Unknown) | Input::Done => {
                Directive::QuerySource
            }
            Input::TimedOut if !cancelled => self.cancel_source(),
            _ => Directive::source_unknown(self.unseen()),
        }
    }

    pub(super) fn cancel_source(&mut self) -> Directive {
        self.stage = SwitchoverState::Undoing { cancelled: true };
        Directive::CancelMigration
    }

    /// Returns true if the QEMUs are connected to each other, and one of them is another towline's.
    pub(crate) fn are_qemus_connected(&self) -> bool {
        matches!(self.request.memory, MemorySharing::Connected | MemorySharing::ConnectedPostcopy)
    }

    /// Returns true if the source gets its guest back by a cancellation as long as it has not completed.
    pub(super) fn may_take_back(&self) -> bool {
        self.are_qemus_connected() && self.request.source == SourceKind::Qemu
    }

    /// The source's process has exited. Only a destination that was sent everything can run the guest.
    pub(super) fn take_over(&mut self) -> Directive {
        self.source_exited = true;
        match self.request.destination {
            // It looks whether it holds the guest before it runs that.
            DestinationKind::Towline if self.are_qemus_connected() && self.sent => self.complete_exited(),
            DestinationKind::Qemu
                if self.may_be_held() && !self.fault.has(SwitchoverBug::AbandonsCompleteDestination) =>
            {
                self.stage = SwitchoverState::TakingOver;
                Directive::QueryDestination
            }
            DestinationKind::Stream | DestinationKind::Relayed | DestinationKind::Towline if self.sent => {
                self.unresolved(AtDestination::MayRun, ToDo::LookAtDestination)
            }
            _ => self.unresolved(AtDestination::None, ToDo::StartAgain),
        }
    }

    pub(super) fn taking_over(&mut self, input: Input) -> Directive {
        match input {
            Input::Destination(DestinationStatus::LacksMemory(_)) if self.may_switch() => self.run_switched(),
            // The source has stopped its guest, and cannot send its devices a second time.
            Input::Destination(DestinationStatus::Failed) if self.may_switch() => {
                self.unresolved(AtDestination::Ended, ToDo::RunSourceUnlessItRan)
            }
            Input::Destination(DestinationStatus::Loaded | DestinationStatus::Running) => self.complete(),
            Input::Destination(DestinationStatus::Loading | DestinationStatus::Unknown) => {
                Directive::QueryDestination
            }
            Input::Destination(DestinationStatus::Exited) if !self.source_exited => {
                Directive::unresolved(AtSource::Unknown, AtDestination::Ended, ToDo::LookAtSource)
            }
            Input::Destination(DestinationStatus::Exited) => {
                self.unresolved(AtDestination::Ended, ToDo::StartAgain)
            }
            Input::Destination(DestinationStatus::Failed) => {
                // A source that completes has been told that everything was loaded.
                self.source_exited = true;
                self.unresolved(AtDestination::None, ToDo::StartAgain)
            }
            _ => self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination),
        }
    }

    /// The source keeps its guest. `stopped`: this migration stopped it.
    pub(super) fn restore(&mut self, stopped: bool) -> Directive {
        if self.may_take_back() {
            return self.withdraw();
        }
        let is_qemu = self.request.source == SourceKind::Qemu;
        if is_qemu && stopped && self.guest.is_live() && self.may_be_run_by_others() {
            self.stage = SwitchoverState::Looking;
            return Directive::LookAtDestination;
        }
        self.regain(stopped)
    }

    pub(super) fn begin_restoring(&mut self, restoration: Restoration) -> Directive {
        self.stage = SwitchoverState::Restoring(restoration);
        match restoration {
            Restoration::Settings => Directive::RestoreSource,
            Restoration::Guest => Directive::ResumeSource,
            // Its destination is left: what the record says of it stays true.
            Restoration::GuestUnretracted => Directive::ResumeSourceFirst,
        }
    }

    /// The source is complete and would resume the guest, which another party may have started at its destination.
    pub(super) fn looking(&mut self, input: Input) -> Directive {
        match input {
            Input::Destination(DestinationStatus::Running) => self.complete(),
            _ => self.begin_restoring(Restoration::Guest),
        }
    }

    /// Returns true if the destination may hold the whole guest, which another party's `cont` would run. One that shares the source's
    /// memory is ended first.
    fn may_be_run_by_others(&self) -> bool {
        self.may_be_held()
            && !self.is_memory_shared()
            && !self.fault.has(SwitchoverBug::OverlooksRunningDestination)
    }

    /// The guest at its destination, which was not queried.
    fn unseen(&self) -> AtDestination {
        if self.may_be_held() { AtDestination::Unknown } else { AtDestination::None }
    }

    /// Returns true if the destination may hold the whole guest, paused.
    fn may_be_held(&self) -> bool {
        (self.sent || self.are_qemus_connected()) && self.request.destination == DestinationKind::Qemu
    }

    /// The source has its guest. That is the end, unless another party runs it at its destination.
    fn confirm(&mut self) -> Directive {
        if !self.may_be_run_by_others() {
            return Directive::End(SwitchoverOutcome::Safe);
        }
        self.stage = SwitchoverState::Confirming;
        Directive::LookAtDestination
    }

    pub(super) fn confirming(&mut self, input: Input) -> Directive {
        // An image is not a guest that runs.
        let to_do = match self.request.source {
            SourceKind::Stored => ToDo::LookAtDestination,
            _ => ToDo::EndOne,
        };
        match input {
            Input::Destination(
                DestinationStatus::Running | DestinationStatus::LacksMemory(FinalRunState::Running),
            ) => Directive::unresolved(AtSource::HasIt, AtDestination::Runs, to_do),
            _ => Directive::End(SwitchoverOutcome::Safe),
        }
    }

    pub(super) fn restoring(&mut self, input: Input, restoration: Restoration) -> Directive {
        match input {
            Input::NotDone if restoration == Restoration::GuestUnretracted => {
                self.unresolved(AtDestination::Holds, ToDo::ForgetRecord)
            }
            Input::NotDone if restoration == Restoration::Guest && self.is_memory_shared() => {
                self.unresolved(AtDestination::None, ToDo::RunSource)
            }
            Input::NotDone => Directive::source_unknown(self.unseen()),
            // It ran on: the destination's state of it is older.
            Input::Source(SourceStatus::Exited) => {
                Directive::unresolved(AtSource::Ended, self.unseen(), ToDo::StartAgain)
            }
            _ if restoration != Restoration::Settings => Directive::End(SwitchoverOutcome::Safe),
            _ => self.confirm(),
        }
    }

    /// The other towline is sent that before the source is restored, even if that does not arrive: without another message it does not start
    /// the guest.
    pub(super) fn withdraw(&mut self) -> Directive {
        self.stage = SwitchoverState::Withdrawing;
        Directive::Send(PeerMessage::Aborted)
    }

    /// The source gets its guest back.
    pub(super) fn regain(&mut self, stopped: bool) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return self.confirm();
        }
        let resumes = stopped && self.guest.is_live();
        self.begin_restoring(if resumes { Restoration::Guest } else { Restoration::Settings })
    }
}
