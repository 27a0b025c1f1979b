//! From a source that is done with its guest to the end of the command.

use super::decision::Decision;
use super::events::{
    DestinationKind, DestinationStatus, Directive, FinalRunState, Input, MemorySharing, PeerMessage,
    SourceAction, SourceKind, SourceStatus, StartResult,
};
use super::fault::SwitchoverBug;
use super::machine::{AfterRetraction, Switchover, SwitchoverState};
use super::outcome::{Placement, SwitchoverOutcome, Unresolved};

impl Switchover {
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
            // Its operator may run it at the source now, whose record must not prove that the source is done.
            Input::Peer(PeerMessage::NotRun) => self.retract(AfterRetraction::EndAsReported),
            _ => Directive::End(SwitchoverOutcome::Unresolved(Unresolved::PeerUnknown)),
        }
    }

    pub(super) fn starting(&mut self, input: Input) -> Directive {
        let Input::Started(started) = input else {
            return self.end_unresolved(self.not_known_to_run());
        };
        if self.is_memory_shared() && !self.is_source_gone() && self.has_not_run(started) {
            return self.retract(AfterRetraction::Resume);
        }
        let is_shared = self.is_memory_shared();
        let unresolved = match started {
            StartResult::Live => return self.finalize(Placement::Running),
            StartResult::StoppedAgain if is_shared => Unresolved::UpgradedStopped,
            StartResult::StoppedAgain => Unresolved::StoppedAgain,
            StartResult::Refused if self.is_source_gone() => Unresolved::DestinationOnly,
            StartResult::Refused => Unresolved::BothPaused,
            StartResult::Exited | StartResult::ExitedBefore if self.is_source_gone() => {
                Unresolved::BothExited
            }
            StartResult::Exited if is_shared => Unresolved::UpgradedLost,
            StartResult::Exited | StartResult::ExitedBefore => Unresolved::DestinationLost,
            StartResult::NotSent | StartResult::Unknown => self.not_known_to_run(),
        };
        self.end_unresolved(unresolved)
    }

    fn not_known_to_run(&self) -> Unresolved {
        if self.is_memory_shared() { Unresolved::UpgradedUnknown } else { Unresolved::DestinationUnknown }
    }

    /// Returns true if nothing has run in the destination's memory, so that the source's state still fits it.
    fn has_not_run(&self, started: StartResult) -> bool {
        match started {
            StartResult::Refused | StartResult::NotSent | StartResult::ExitedBefore => true,
            StartResult::Exited => self.has_fault(SwitchoverBug::RevivesSharedSource),
            _ => false,
        }
    }

    /// Returns true if both QEMUs map the same memory.
    pub(super) fn is_memory_shared(&self) -> bool {
        self.request.memory == MemorySharing::Shared
    }

    /// Returns true if no QEMU at the source holds the guest.
    pub(super) fn is_source_gone(&self) -> bool {
        self.source_exited
    }

    pub(super) fn finalize(&mut self, placement: Placement) -> Directive {
        self.stage = SwitchoverState::Finalizing(placement);
        Directive::FinalizeDestination
    }

    pub(super) fn finalizing(&mut self, input: Input, placement: Placement) -> Directive {
        match input {
            Input::Destination(DestinationStatus::Exited) if self.is_source_gone() => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::BothExited))
            }
            Input::Destination(DestinationStatus::Exited) if self.has_run_in_shared_memory(placement) => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::UpgradedLost))
            }
            Input::Destination(DestinationStatus::Exited) => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::DestinationLost))
            }
            Input::NotDone if self.is_source_gone() => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::DestinationAlone))
            }
            Input::NotDone if self.has_run_in_shared_memory(placement) => {
                Directive::End(SwitchoverOutcome::Unresolved(Unresolved::UpgradedUnknown))
            }
            Input::NotDone => Directive::End(SwitchoverOutcome::Unresolved(Unresolved::DestinationUnknown)),
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
            (Input::NotDone, SourceKind::Qemu, SourceAction::Quit) => Unresolved::SourceNotEnded,
            (Input::NotDone, SourceKind::Qemu, SourceAction::Resume) => Unresolved::SourceNotResumed,
            (Input::Source(SourceStatus::Exited), _, SourceAction::Resume) => Unresolved::StoredOnly,
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
            (Input::NotDone, SwitchoverOutcome::Unresolved(Unresolved::StoredOnly)) => {
                SwitchoverOutcome::Unresolved(Unresolved::Unpublished)
            }
            (Input::NotDone, SwitchoverOutcome::Completed(_)) if self.is_source_gone() => {
                SwitchoverOutcome::Unresolved(Unresolved::Unpublished)
            }
            (Input::NotDone, SwitchoverOutcome::Completed(_)) => SwitchoverOutcome::Safe,
            (Input::NotDone, SwitchoverOutcome::Unresolved(Unresolved::SourceNotResumed)) => {
                SwitchoverOutcome::Unresolved(Unresolved::SourceUnknown)
            }
            (_, outcome) => outcome,
        })
    }
}
