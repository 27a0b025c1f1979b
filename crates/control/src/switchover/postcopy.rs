//! Postcopy: the guest runs at its destination before all of its memory is there.
//!
//! ```text
//!   of a QEMU    Transfer ─► RecordingSwitch ─► Switching ─► Following ─► Arriving ─► Starting ─► …
//!                             (`migrate-start-postcopy`) ◄─┘   │   └─► Reconnecting (postcopy-paused)
//!                                                              └─► Judging: it failed, has exited, or cannot be queried
//!   of an image  Transfer ─► Serving ─► Arriving ─► Finalizing ─► …
//!                              └─► Reconnecting ─► Abandoning: its memory is no longer sent
//!   to another host: the source's towline   … ─► Acknowledged ─► Recording(Complete) ─► Reporting ─► Releasing
//!                    the destination's      … ─► Acknowledged ─► TakingOver ─► Starting ─► Arriving ─► …
//! ```
//! Two QEMUs are connected to each other and may complete by themselves, so that a record exists before they
//! are. The point of no return of a QEMU is `migrate-start-postcopy`, even if its reply is lost: from then on its
//! migration is never cancelled, and the source is not asked to run its guest. Only the source itself shows
//! that it has switched; until then the destination is not started. That of an image is the last byte before
//! the guest runs.

use super::events::{
    Decision, DestinationKind, DestinationStatus, Directive, FinalRunState, GuestRunState, Input, LossCause,
    MemoryLoss, MemorySharing, SourceKind, SourceStatus, StartResult, SwitchProgress,
};
use super::fault::SwitchoverBug;
use super::machine::{Switchover, SwitchoverState};
use super::outcome::{AtDestination, AtSource, GuestState, Placement, SwitchoverOutcome, ToDo};

impl Switchover {
    /// Returns true if the two QEMUs are connected to each other, so that nothing that passes between them is seen here.
    pub(super) fn is_direct(&self) -> bool {
        self.request.memory == MemorySharing::Postcopy && self.request.source == SourceKind::Qemu
    }

    /// Returns true if QEMUs of two hosts are connected to each other, and the source may be switched to postcopy.
    pub(super) fn may_switch(&self) -> bool {
        self.request.memory == MemorySharing::ConnectedPostcopy
    }

    /// Returns true if the QEMU of another host was switched, or the one here that sends to it.
    pub(crate) fn has_switched(&self) -> bool {
        self.may_switch() && self.switch >= SwitchProgress::Switched
    }

    /// The source's state of the guest may be older than the destination's.
    pub(super) fn may_have_switched(&self) -> bool {
        self.has_switched() || self.is_direct() && self.switch != SwitchProgress::Unasked
    }

    /// The source on the other host has stopped its guest for good, and this destination has its devices.
    pub(super) fn run_switched(&mut self) -> Directive {
        self.switch = SwitchProgress::Switched;
        match self.final_run_state() {
            FinalRunState::Running => self.decide(Decision::Run),
            FinalRunState::Paused => self.arrive(),
        }
    }

    /// The guest runs, and waits for the rest of its memory.
    pub(super) fn gather(&mut self) -> Directive {
        self.switch = SwitchProgress::Runs;
        if self.fault.has(SwitchoverBug::CompletesWithoutMemory) {
            return self.finalize(Placement::Running);
        }
        self.arrive()
    }

    fn final_run_state(&self) -> FinalRunState {
        FinalRunState::requested(self.request.run, self.guest)
    }

    /// The source has passed over its memory once, while the guest runs: it is to switch.
    pub(super) fn request_switch(&mut self, guest: GuestRunState) -> Directive {
        self.guest = guest;
        self.record_switch()
    }

    /// Directs the record of the switch: before the source is asked, and again once it has stopped its guest, which that
    /// record then proves.
    pub(super) fn record_switch(&mut self) -> Directive {
        self.stage = SwitchoverState::RecordingSwitch;
        if self.fault.has(SwitchoverBug::ActsBeforeRecord) {
            return self.recording_switch(Input::Recorded);
        }
        Directive::Record(Decision::Run)
    }

    pub(super) fn recording_switch(&mut self, input: Input) -> Directive {
        match (self.switch, input) {
            (SwitchProgress::Unasked, Input::Recorded) => self.ask_to_switch(),
            (SwitchProgress::Unasked, _) => self.not_passed(),
            _ => self.follow(),
        }
    }

    fn ask_to_switch(&mut self) -> Directive {
        self.stage = SwitchoverState::Switching;
        Directive::StartPostcopy
    }

    pub(super) fn switching(&mut self, input: Input) -> Directive {
        match input {
            Input::NotDone if self.switch == SwitchProgress::Unasked => return self.undo(),
            Input::Done | Input::NotDone => self.switch = SwitchProgress::Accepted,
            _ if self.fault.has(SwitchoverBug::LostReplyIsRefusal) => return self.undo(),
            _ => self.switch = SwitchProgress::Unanswered,
        }
        self.follow()
    }

    pub(super) fn follow(&mut self) -> Directive {
        self.stage = SwitchoverState::Following;
        Directive::FollowSource
    }

    pub(super) fn following(&mut self, input: Input) -> Directive {
        match input {
            Input::Source(status) => self.followed(status),
            Input::Started(StartResult::Live) => {
                self.switch = SwitchProgress::Runs;
                Directive::FollowSource
            }
            Input::Started(StartResult::NotSent) => Directive::FollowSource,
            Input::Started(_) => {
                self.switch = SwitchProgress::MayRun;
                Directive::FollowSource
            }
            _ => self.judge(SourceStatus::Unknown),
        }
    }

    fn followed(&mut self, status: SourceStatus) -> Directive {
        let has_stopped = matches!(
            status,
            SourceStatus::Following | SourceStatus::FollowingPaused | SourceStatus::Completed
        );
        if has_stopped && self.switch < SwitchProgress::Switched {
            self.switch = SwitchProgress::Switched;
            return self.record_switch();
        }
        match status {
            SourceStatus::Migrating if self.fault.has(SwitchoverBug::RunsBeforeSwitch) => Directive::RunEarly,
            // The request did not arrive.
            SourceStatus::Migrating if self.switch == SwitchProgress::Unanswered => self.ask_to_switch(),
            SourceStatus::Following
                if self.switch != SwitchProgress::Runs
                    && self.final_run_state() == FinalRunState::Running =>
            {
                Directive::RunEarly
            }
            SourceStatus::Migrating | SourceStatus::Unknown | SourceStatus::Following => {
                Directive::FollowSource
            }
            SourceStatus::FollowingPaused if self.fault.has(SwitchoverBug::PausedIsFailed) => {
                self.restore(false)
            }
            SourceStatus::FollowingPaused => self.reconnect(),
            SourceStatus::Completed => self.arrive(),
            SourceStatus::CompletedThenResumed | SourceStatus::CompletedByOthers => {
                Directive::unresolved(AtSource::HasIt, AtDestination::MayRun, ToDo::EndOne)
            }
            SourceStatus::HasGuest => self.judge(status),
            SourceStatus::Exited => {
                self.source_exited = true;
                self.judge(status)
            }
        }
    }

    pub(super) fn judge(&mut self, source: SourceStatus) -> Directive {
        self.stage = SwitchoverState::Judging(source);
        Directive::QueryDestination
    }

    pub(super) fn judging(&mut self, input: Input, source: SourceStatus) -> Directive {
        match input {
            Input::Destination(DestinationStatus::Loading) => Directive::QueryDestination,
            Input::Destination(destination) => self.judged(source, destination),
            _ => self.judged(source, DestinationStatus::Unknown),
        }
    }

    /// Where the guest is, by the state of both ends.
    fn judged(&mut self, source: SourceStatus, destination: DestinationStatus) -> Directive {
        match source {
            SourceStatus::HasGuest => self.judged_with_guest(destination),
            SourceStatus::Exited => self.judged_alone(destination),
            _ if self.fault.has(SwitchoverBug::UnseenSourceHasGuest) => {
                Directive::End(SwitchoverOutcome::Safe)
            }
            _ => self.judged_unseen(destination),
        }
    }

    /// The source failed, and has its guest back.
    fn judged_with_guest(&mut self, destination: DestinationStatus) -> Directive {
        match destination {
            DestinationStatus::Running | DestinationStatus::LacksMemory(FinalRunState::Running) => {
                Directive::unresolved(AtSource::HasIt, AtDestination::Runs, ToDo::EndOne)
            }
            DestinationStatus::Unknown | DestinationStatus::Blocked
                if self.switch >= SwitchProgress::MayRun =>
            {
                Directive::unresolved(AtSource::HasIt, AtDestination::Unknown, ToDo::EndOne)
            }
            _ => self.restore(false),
        }
    }

    /// The source has exited, and memory that it had not sent is lost.
    fn judged_alone(&mut self, destination: DestinationStatus) -> Directive {
        let (destination, to_do) = match destination {
            DestinationStatus::Loaded | DestinationStatus::Running => return self.arrive(),
            DestinationStatus::LacksMemory(_) if self.fault.has(SwitchoverBug::CompletesWithoutMemory) => {
                return self.finalize(Placement::Running);
            }
            DestinationStatus::LacksMemory(_) => (AtDestination::Runs, ToDo::StartAgain),
            DestinationStatus::Failed => (AtDestination::None, ToDo::StartAgain),
            DestinationStatus::Exited => (AtDestination::Ended, ToDo::StartAgain),
            _ => (AtDestination::Unknown, ToDo::LookAtDestination),
        };
        Directive::unresolved(AtSource::Ended, destination, to_do)
    }

    /// The source holds memory that it cannot send, or cannot be queried.
    pub(super) fn judged_unseen(&mut self, destination: DestinationStatus) -> Directive {
        // One whose main loop waits for a page does not reply.
        let may_lack_memory = matches!(
            destination,
            DestinationStatus::LacksMemory(_) | DestinationStatus::Blocked | DestinationStatus::Unknown
        );
        if self.may_switch() && may_lack_memory {
            return self.reconnect();
        }
        self.not_seen(destination)
    }

    pub(super) fn not_seen(&self, destination: DestinationStatus) -> Directive {
        let has_stopped = self.switch >= SwitchProgress::Switched;
        let source = if has_stopped { AtSource::Paused } else { AtSource::Unknown };
        let (destination, to_do) = match destination {
            DestinationStatus::Failed | DestinationStatus::Exited => {
                let to_do = if has_stopped { ToDo::RunSourceUnlessItRan } else { ToDo::RunSource };
                (AtDestination::Ended, to_do)
            }
            DestinationStatus::Loaded if has_stopped => (AtDestination::Holds, ToDo::KeepDestination),
            DestinationStatus::Loaded => (AtDestination::Holds, ToDo::LookAtSource),
            DestinationStatus::Running => (AtDestination::Runs, ToDo::EndSource),
            DestinationStatus::LacksMemory(FinalRunState::Running) => (AtDestination::Runs, ToDo::Reconnect),
            DestinationStatus::LacksMemory(FinalRunState::Paused) => {
                (AtDestination::Unknown, ToDo::Reconnect)
            }
            DestinationStatus::Blocked => (AtDestination::Runs, ToDo::Reconnect),
            _ if has_stopped => (AtDestination::Unknown, ToDo::Reconnect),
            _ => (AtDestination::Unknown, ToDo::LookAtSource),
        };
        Directive::unresolved(source, destination, to_do)
    }

    /// The devices of a stored guest were sent: from here on it may run at its destination.
    pub(super) fn serve(&mut self) -> Directive {
        (self.sent, self.stage) = (true, SwitchoverState::Serving);
        self.switch = self.switch.max(SwitchProgress::Accepted);
        Directive::ServeMemory
    }

    pub(super) fn serving(&mut self, input: Input) -> Directive {
        match input {
            Input::Delivered if self.request.destination == DestinationKind::Qemu => self.arrive(),
            Input::Delivered => self.finalize(Placement::Loaded),
            Input::MemoryLost(MemoryLoss { cause, has_loaded }) => {
                if has_loaded {
                    self.switch = SwitchProgress::Switched;
                }
                match cause {
                    LossCause::Connection => self.reconnect(),
                    LossCause::Unreadable | LossCause::Truncated => self.abandon(cause),
                }
            }
            _ => self.reconnect(),
        }
    }

    /// The rest of a stored guest's memory is not sent.
    pub(super) fn abandon(&mut self, cause: LossCause) -> Directive {
        if self.request.destination != DestinationKind::Qemu {
            return self.abandoned(cause, DestinationStatus::Unknown);
        }
        self.stage = SwitchoverState::Abandoning(cause);
        Directive::QueryDestination
    }

    pub(super) fn abandoning(&mut self, input: Input, cause: LossCause) -> Directive {
        match input {
            Input::Destination(DestinationStatus::Loading) => Directive::QueryDestination,
            Input::Destination(destination) => self.abandoned(cause, destination),
            _ => self.abandoned(cause, DestinationStatus::Unknown),
        }
    }

    pub(super) fn abandoned(&mut self, cause: LossCause, destination: DestinationStatus) -> Directive {
        let has_loaded = self.switch >= SwitchProgress::Switched;
        let state = match (destination, cause) {
            _ if !has_loaded && self.fault.has(SwitchoverBug::UnloadedIsSafe) => {
                return Directive::End(SwitchoverOutcome::Safe);
            }
            (DestinationStatus::Failed | DestinationStatus::Exited, _) if !has_loaded => {
                return Directive::End(SwitchoverOutcome::Safe);
            }
            (DestinationStatus::Failed | DestinationStatus::Exited, _) => GuestState::RAN_AND_ENDED,
            (DestinationStatus::Unknown, _) if self.fault.has(SwitchoverBug::LostMonitorIsExit) => {
                GuestState::RAN_AND_ENDED
            }
            (_, LossCause::Truncated) => GuestState::TRUNCATED,
            (DestinationStatus::Loaded | DestinationStatus::Running, _) => return self.arrive(),
            (DestinationStatus::Blocked, _) => GuestState::BLOCKED,
            (_, LossCause::Unreadable) => GuestState::UNREADABLE,
            (DestinationStatus::Unknown, LossCause::Connection) if !has_loaded => GuestState::UNSEEN,
            (_, LossCause::Connection) => GuestState::LACKS_MEMORY,
        };
        Directive::End(SwitchoverOutcome::Unresolved(state))
    }

    /// All memory was sent.
    pub(super) fn arrive(&mut self) -> Directive {
        if self.is_direct() && self.fault.has(SwitchoverBug::DecidesAgain) {
            return self.complete();
        }
        self.stage = SwitchoverState::Arriving;
        Directive::QueryDestination
    }

    pub(super) fn arriving(&mut self, input: Input) -> Directive {
        let status = match input {
            Input::Destination(status) => status,
            Input::PeerLost if self.has_switched() => return self.reconnect(),
            _ if self.has_switched() => return self.disconnected(),
            _ => return self.unresolved(AtDestination::MayRun, self.keep_destination()),
        };
        match (status, self.final_run_state()) {
            (DestinationStatus::Running, FinalRunState::Running) => self.finalize(Placement::Running),
            (DestinationStatus::Running | DestinationStatus::Loaded, FinalRunState::Paused) => {
                self.finalize(Placement::Paused)
            }
            // QEMU runs a stored guest by itself: an operator has stopped it, or it has failed.
            (DestinationStatus::Loaded, _) if self.is_restored() => {
                Directive::End(SwitchoverOutcome::Unresolved(GuestState::ARRIVED))
            }
            (DestinationStatus::Loaded, _) if self.switch == SwitchProgress::Runs => {
                self.unresolved(AtDestination::Holds, self.keep_destination())
            }
            (DestinationStatus::Loaded, _) => {
                self.stage = SwitchoverState::Starting;
                Directive::RunDestination
            }
            (DestinationStatus::Exited, _) => {
                Directive::End(SwitchoverOutcome::Unresolved(self.destination_lost(false)))
            }
            (DestinationStatus::Failed, _) if self.is_restored() => {
                Directive::End(SwitchoverOutcome::Unresolved(GuestState::RAN_AND_ENDED))
            }
            (DestinationStatus::Failed, _) => {
                self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination)
            }
            _ => Directive::QueryDestination,
        }
    }

    /// Returns true if the guest is that of an image.
    fn is_restored(&self) -> bool {
        self.request.source == SourceKind::Stored
    }

    /// The destination's state of the guest is the newest, if a source has one.
    pub(super) fn keep_destination(&self) -> ToDo {
        match self.source_end() {
            AtSource::Paused => ToDo::KeepDestination,
            _ => ToDo::LookAtDestination,
        }
    }
}
