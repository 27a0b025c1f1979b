//! From a source that was acknowledged to the end of the command.

use super::events::{
    Decision, DestinationKind, DestinationStatus, Directive, FinalRunState, Input, MemorySharing,
    PeerMessage, RunRequest, SourceAction, SourceKind, SourceLink, SourceStatus, StartResult, SwitchProgress,
};
use super::fault::SwitchoverBug;
use super::machine::{AfterRetraction, Switchover, SwitchoverState};
use super::outcome::{AtDestination, AtSource, GuestState, Placement, SwitchoverOutcome, ToDo};

impl Switchover {
    pub(super) fn acknowledged(&mut self, input: Input) -> Directive {
        let unresolved = self.stage == SwitchoverState::AcknowledgedUnconfirmed;
        match input {
            Input::Delivered | Input::Done => self.await_source(),
            Input::Failed | Input::NotDone if self.may_take_back() => self.undo(),
            Input::TimedOut if self.may_take_back() => self.cancel_source(),
            Input::Failed | Input::NotDone if self.request.source == SourceKind::Qemu => self.await_source(),
            // The acknowledgement could not be sent or its connection broke: it is not known whether it
            // arrived.
            Input::Failed | Input::NotDone => self.undecided(),
            Input::Source(SourceStatus::Completed) | Input::SourceLink(SourceLink::Closed) if unresolved => {
                self.unresolved(AtDestination::MayRun, ToDo::LookAtDestination)
            }
            Input::Source(SourceStatus::Completed) | Input::SourceLink(SourceLink::Closed) => self.complete(),
            Input::Source(SourceStatus::CompletedThenResumed) => {
                Directive::unresolved(AtSource::HasIt, AtDestination::Holds, ToDo::RunOne)
            }
            Input::Source(SourceStatus::HasGuest) => self.source_has_guest(),
            Input::Source(SourceStatus::Following | SourceStatus::FollowingPaused) if self.may_switch() => {
                self.switch = SwitchProgress::Switched;
                self.complete()
            }
            Input::Source(SourceStatus::Exited) => {
                self.source_exited = true;
                if unresolved {
                    self.unresolved(AtDestination::MayRun, ToDo::LookAtDestination)
                } else {
                    self.complete_exited()
                }
            }
            Input::Source(SourceStatus::Unknown) if self.fault.has(SwitchoverBug::TimeoutIsExit) => {
                self.source_exited = true;
                self.complete()
            }
            Input::Source(SourceStatus::Migrating | SourceStatus::Unknown) => Directive::QuerySource,
            Input::SourceLink(SourceLink::Open) => Directive::ProbeSourceLink,
            Input::SourceLink(SourceLink::Reset) if self.fault.has(SwitchoverBug::IgnoresLink) => {
                self.complete()
            }
            Input::SourceLink(SourceLink::Reset) => self.undecided(),
            Input::Peer(PeerMessage::Completed(run)) => {
                if self.request.run == RunRequest::AsItWas {
                    self.request.run = run;
                }
                self.completed_there()
            }
            Input::Peer(PeerMessage::Aborted) => self.source_has_guest(),
            Input::PeerLost | Input::TimedOut if self.fault.has(SwitchoverBug::RunsWhenCut) => {
                self.complete()
            }
            _ => self.undecided(),
        }
    }

    /// The source's towline is done with the guest. Of connected QEMUs the source may have exited before this one had everything.
    fn completed_there(&mut self) -> Directive {
        if self.are_qemus_connected() && self.request.destination == DestinationKind::Qemu {
            self.stage = SwitchoverState::TakingOver;
            return Directive::QueryDestination;
        }
        self.complete()
    }

    /// The source was acknowledged and did not complete: it was cancelled there, or failed.
    pub(super) fn source_has_guest(&mut self) -> Directive {
        if self.fault.has(SwitchoverBug::CompletesCancelledSource) {
            return self.complete();
        }
        match (self.request.destination, self.stage) {
            (to, _) if to.runs_by_itself() => {
                Directive::unresolved(AtSource::HasIt, AtDestination::MayRun, ToDo::EndOne)
            }
            (DestinationKind::Towline, SwitchoverState::Acknowledged) => self.withdraw(),
            _ => self.restore(false),
        }
    }

    /// Neither end is started: it is not known whether the source is done with the guest.
    pub(super) fn undecided(&mut self) -> Directive {
        match self.request.destination {
            // It awaits the guest, and may not hold it.
            DestinationKind::Qemu if self.are_qemus_connected() => self.judge(SourceStatus::Unknown),
            to if to.runs_by_itself() || self.stage == SwitchoverState::AcknowledgedUnconfirmed => {
                self.unresolved(AtDestination::MayRun, ToDo::LookAtDestination)
            }
            DestinationKind::Stored => Directive::source_unknown(AtDestination::None),
            _ => Directive::unresolved(AtSource::Unknown, AtDestination::Holds, ToDo::LookAtSource),
        }
    }

    /// The source has exited after it was acknowledged. One that may have switched to postcopy may not have sent all memory.
    pub(super) fn complete_exited(&mut self) -> Directive {
        if self.may_switch() && !self.fault.has(SwitchoverBug::RunsWithoutMemory) {
            return self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination);
        }
        self.complete()
    }

    /// The source cannot run the guest any more.
    pub(super) fn complete(&mut self) -> Directive {
        match self.request.destination {
            // Its guest does not wait until the image is published.
            DestinationKind::Stored if self.resumes_first() => self.release(Placement::Stored),
            DestinationKind::Stored => self.finalize(Placement::Stored),
            DestinationKind::Stream | DestinationKind::Relayed => self.finalize(Placement::Loaded),
            DestinationKind::Towline => self.decide(Decision::Complete),
            DestinationKind::Qemu => match FinalRunState::requested(self.request.run, self.guest) {
                FinalRunState::Running => self.decide(Decision::Run),
                FinalRunState::Paused => self.finalize(Placement::Paused),
            },
        }
    }

    /// Returns true if the source is resumed before its image is published.
    fn resumes_first(&self) -> bool {
        self.request.after == SourceAction::Resume
            && self.request.source == SourceKind::Qemu
            && self.request.destination == DestinationKind::Stored
    }

    pub(super) fn reporting(&mut self, input: Input) -> Directive {
        match input {
            Input::Done => Directive::AwaitPeer,
            Input::Peer(PeerMessage::Placed(placement)) if self.request.source == SourceKind::Towline => {
                self.stage = SwitchoverState::Releasing(placement);
                Directive::Send(PeerMessage::Placed(placement))
            }
            Input::Peer(PeerMessage::Placed(placement)) => self.release(placement),
            Input::Source(SourceStatus::Exited) => {
                self.source_exited = true;
                self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination)
            }
            Input::Source(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed) => {
                Directive::unresolved(AtSource::HasIt, AtDestination::MayRun, ToDo::EndOne)
            }
            Input::NotDone | Input::PeerLost | Input::TimedOut | Input::Source(_) if self.has_switched() => {
                self.reconnect()
            }
            _ if self.has_switched() => self.disconnected(),
            // Its operator may run it at the source now, whose record must not prove that the source is done.
            Input::Peer(PeerMessage::NotRun) => self.retract(AfterRetraction::EndAsReported),
            _ => self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination),
        }
    }

    pub(super) fn starting(&mut self, input: Input) -> Directive {
        let Input::Started(started) = input else {
            return self.end_unresolved(self.not_known_to_run());
        };
        if self.is_memory_shared() && !self.source_exited && self.has_not_run(started) {
            return self.retract(AfterRetraction::Resume);
        }
        let unresolved = match started {
            StartResult::Live if self.has_switched() => return self.gather(),
            StartResult::Exited | StartResult::ExitedBefore if self.has_switched() => {
                self.destination_lost(false)
            }
            // It may wait for a page, which may have to be sent over another connection.
            StartResult::Unknown if self.has_switched() => return self.arrive(),
            _ if self.has_switched() => return self.disconnected(),
            StartResult::Live => return self.finalize(Placement::Running),
            StartResult::StoppedAgain => self.stopped_again(),
            StartResult::Refused if self.may_have_switched() => self.stopped_again(),
            StartResult::Refused => self.not_started(),
            StartResult::Exited => self.destination_lost(self.is_memory_shared()),
            StartResult::ExitedBefore => self.destination_lost(false),
            StartResult::NotSent | StartResult::Unknown => self.not_known_to_run(),
        };
        self.end_unresolved(unresolved)
    }

    /// The destination ran it and stopped it again: a state that was paused at its source is older.
    fn stopped_again(&self) -> GuestState {
        self.state(AtDestination::Holds, self.keep_destination())
    }

    /// The destination, which holds it, has not run it.
    pub(super) fn not_started(&self) -> GuestState {
        if self.has_switched() {
            return self.state(AtDestination::Unknown, ToDo::Reconnect);
        }
        let to_do = match self.source_end() {
            AtSource::Paused => ToDo::RunOne,
            _ => ToDo::RunDestination,
        };
        self.state(AtDestination::Holds, to_do)
    }

    /// The destination has exited. `changed`: it may have run the guest in the memory of its source.
    pub(super) fn destination_lost(&self, changed: bool) -> GuestState {
        let is_lost = changed || self.source_exited;
        let to_do = if is_lost { ToDo::StartAgain } else { ToDo::RunSourceUnlessItRan };
        self.state(AtDestination::Ended, to_do)
    }

    fn not_known_to_run(&self) -> GuestState {
        let is_older = (self.is_memory_shared() || self.may_have_switched()) && !self.source_exited;
        let to_do = if is_older { ToDo::KeepDestination } else { ToDo::LookAtDestination };
        self.state(AtDestination::Unknown, to_do)
    }

    /// Returns true if nothing has run in the destination's memory, so that the source's state still fits it.
    fn has_not_run(&self, started: StartResult) -> bool {
        match started {
            StartResult::Refused | StartResult::NotSent | StartResult::ExitedBefore => true,
            StartResult::Exited => self.fault.has(SwitchoverBug::RevivesSharedSource),
            _ => false,
        }
    }

    /// Returns true if both QEMUs map the same memory.
    pub(super) fn is_memory_shared(&self) -> bool {
        self.request.memory == MemorySharing::Shared
    }

    pub(super) fn finalize(&mut self, placement: Placement) -> Directive {
        self.stage = SwitchoverState::Finalizing(placement);
        Directive::FinalizeDestination
    }

    pub(super) fn finalizing(&mut self, input: Input, placement: Placement) -> Directive {
        match input {
            Input::Destination(DestinationStatus::Exited) => {
                let lost = self.destination_lost(self.has_run_in_shared_memory(placement));
                Directive::End(SwitchoverOutcome::Unresolved(lost))
            }
            Input::NotDone if self.source_exited => {
                self.unresolved(AtDestination::MayRun, ToDo::LookAtDestination)
            }
            Input::NotDone if self.may_have_switched() || self.has_run_in_shared_memory(placement) => {
                self.unresolved(AtDestination::Unknown, ToDo::KeepDestination)
            }
            Input::NotDone => self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination),
            _ if self.request.source == SourceKind::Towline => {
                self.stage = SwitchoverState::Releasing(placement);
                Directive::Send(PeerMessage::Placed(placement))
            }
            _ => self.release(placement),
        }
    }

    fn has_run_in_shared_memory(&self, placement: Placement) -> bool {
        self.is_memory_shared() && placement == Placement::Running
    }

    pub(super) fn release(&mut self, placement: Placement) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return Directive::End(SwitchoverOutcome::Completed(placement));
        }
        if self.source_exited {
            return self.released(SwitchoverOutcome::Completed(placement));
        }
        self.stage = SwitchoverState::Releasing(placement);
        match self.request.after {
            SourceAction::Quit => Directive::QuitSource,
            SourceAction::Resume
                if !matches!(placement, Placement::Running | Placement::Loaded) && self.guest.is_live() =>
            {
                Directive::ResumeSource
            }
            _ => Directive::RestoreSource,
        }
    }

    pub(super) fn releasing(&mut self, input: Input, placement: Placement) -> Directive {
        let unresolved = match (input, self.request.source, self.request.after) {
            (Input::NotDone, SourceKind::Qemu, SourceAction::Quit) => GuestState::not_ended(placement),
            (Input::NotDone, SourceKind::Qemu, SourceAction::Resume) => GuestState::NOT_RESUMED,
            (Input::Source(SourceStatus::Exited), _, SourceAction::Resume) => GuestState::STORED_ONLY,
            _ => return self.released(SwitchoverOutcome::Completed(placement)),
        };
        self.released(SwitchoverOutcome::Unresolved(unresolved))
    }

    /// The source is in its final state.
    fn released(&mut self, outcome: SwitchoverOutcome) -> Directive {
        if !self.resumes_first() {
            return Directive::End(outcome);
        }
        self.stage = SwitchoverState::Publishing(outcome);
        Directive::FinalizeDestination
    }

    pub(super) fn publishing(&mut self, input: Input, outcome: SwitchoverOutcome) -> Directive {
        Directive::End(match (input, outcome) {
            (Input::NotDone, SwitchoverOutcome::Unresolved(GuestState::STORED_ONLY)) => {
                SwitchoverOutcome::Unresolved(GuestState::UNPUBLISHED)
            }
            (Input::NotDone, SwitchoverOutcome::Completed(_)) if self.source_exited => {
                SwitchoverOutcome::Unresolved(GuestState::UNPUBLISHED)
            }
            (Input::NotDone, SwitchoverOutcome::Completed(_)) => SwitchoverOutcome::Safe,
            (Input::NotDone, SwitchoverOutcome::Unresolved(GuestState::NOT_RESUMED)) => {
                SwitchoverOutcome::Unresolved(GuestState::source_unknown(AtDestination::None))
            }
            (_, outcome) => outcome,
        })
    }
}
