//! The state machine: its stages, and the transfer until the source has completed.

use super::events::{
    Decision, DestinationKind, Directive, GuestRunState, Input, LossCause, MemorySharing, RunRequest,
    SourceAction, SourceKind, SourceLink, SourceStatus, SwitchProgress, SwitchoverRequest,
};
use super::fault::{FaultSwitch, SwitchoverBug};
use super::outcome::{AtDestination, AtSource, GuestState, Placement, SwitchoverOutcome, ToDo};

/// States; see the picture in the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SwitchoverState {
    /// Memory is transferred; the destination cannot run the guest.
    Transfer,
    /// This decision is being made durable and is then acted on.
    Recording(Decision),
    /// A destination that runs the guest by itself was sent the last bytes.
    Committed,
    /// The source was acknowledged and may complete.
    Acknowledged,
    /// The source was acknowledged, but the destination has not confirmed that it holds the guest: it may run
    /// it or not.
    AcknowledgedUnconfirmed,
    /// The decision to switch to postcopy is being made durable.
    RecordingSwitch,
    /// The source is asked to switch to postcopy.
    Switching,
    /// The source was asked to switch, and is queried until it has completed.
    Following,
    /// The memory of a stored guest is sent.
    Serving,
    /// The connection that memory is sent over is lost.
    Reconnecting,
    /// The source of a postcopy ended like this: the destination is queried.
    Judging(SourceStatus),
    /// The memory of a stored guest is not sent any more: the destination is queried.
    Abandoning(LossCause),
    /// All memory was sent: the destination is queried.
    Arriving,
    /// The stream failed when the destination may hold everything: the source is queried first.
    Undoing {
        cancelled: bool,
    },
    /// The source's QEMU has exited; the destination, which was sent everything, is awaited.
    TakingOver,
    /// The other towline was sent the outcome.
    Reporting,
    /// The guest is being started at the destination.
    Starting,
    /// The guest is in its final state; the destination's settings are being restored.
    Finalizing(Placement),
    /// The source is being restored, resumed or ended.
    Releasing(Placement),
    /// The source has been resumed, or could not be, and the guest that it stored is being published.
    Publishing(SwitchoverOutcome),
    /// The destination is looked at, before the source resumes the guest.
    Looking,
    /// The decision to run the guest at its destination is withdrawn from the record, before this.
    Retracting(AfterRetraction),
    /// The source has its guest back; its settings are being restored, and its guest is resumed if this migration stopped it.
    Restoring(Restoration),
    /// The source has its guest; the destination, which was sent everything, is looked at.
    Confirming,
    /// The other towline is sent that the source has its guest back.
    Withdrawing,
    /// The other towline is sent that the guest does not run here.
    ReportingNotRun(GuestState),
    Ended(SwitchoverOutcome),
}

/// State that a source gets back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Restoration {
    /// Its settings: its guest is as it was.
    Settings,
    /// Its guest too, which this migration stopped.
    Guest,
    /// As `Guest`, with a record that still has the guest running at its destination.
    GuestUnretracted,
}

/// Step after a withdrawn decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum AfterRetraction {
    /// The guest stays paused at both ends.
    End,
    /// The same, as the destination's towline has reported.
    EndAsReported,
    /// The source, which shares its memory, resumes the guest.
    Resume,
}

/// The state machine. It is copyable and comparable, so that the model can explore it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Switchover {
    pub(super) request: SwitchoverRequest,
    pub(super) stage: SwitchoverState,
    /// The destination was sent everything except perhaps the last bytes: it may hold the whole guest.
    pub(super) sent: bool,
    /// Progress of the switch to postcopy.
    pub(super) switch: SwitchProgress,
    /// Run state of the guest, from its stream.
    pub(super) guest: GuestRunState,
    /// A cancellation is being carried out.
    pub(super) aborting: bool,
    /// The source's QEMU exited during the migration.
    pub(super) source_exited: bool,
    pub(super) fault: FaultSwitch,
}

impl Switchover {
    /// The machine of one command in its initial state.
    pub(crate) fn new(request: SwitchoverRequest) -> Self {
        Self {
            request,
            stage: SwitchoverState::Transfer,
            sent: false,
            switch: SwitchProgress::Unasked,
            guest: GuestRunState::Running,
            aborting: false,
            source_exited: false,
            fault: FaultSwitch::default(),
        }
    }

    /// That of a source which an earlier towline has switched to postcopy, with its destination on another host: it is to be connected again
    /// ([`Directive::Recover`]).
    pub(crate) fn going_on(request: SwitchoverRequest, guest: GuestRunState) -> Self {
        let (stage, switch) = (SwitchoverState::Reconnecting, SwitchProgress::Accepted);
        Self { stage, switch, guest, sent: true, ..Self::new(request) }
    }

    /// Records that the destination of a stream is a towline, and of which kind.
    pub(crate) fn found_destination(&mut self, kind: DestinationKind) {
        if self.request.destination == DestinationKind::Stream {
            self.request.destination = kind;
        }
    }

    /// The request, with the kinds of ends that were found.
    pub(crate) fn request(&self) -> SwitchoverRequest {
        self.request
    }

    /// The guest's run state when it was stopped, from its stream.
    pub(crate) fn guest(&self) -> GuestRunState {
        self.guest
    }

    /// Returns true if the source's QEMU is known to have exited.
    pub(crate) fn has_source_exited(&self) -> bool {
        self.source_exited
    }

    /// Returns true if the outcome of the source's towline is awaited, not the report of the destination's.
    pub(crate) fn awaits_source_outcome(&self) -> bool {
        matches!(self.stage, SwitchoverState::Acknowledged | SwitchoverState::AcknowledgedUnconfirmed)
    }

    /// Returns true if the source's migration is cancelled next unless it fails by itself.
    pub(crate) fn cancels_next(&self) -> bool {
        matches!(self.stage, SwitchoverState::Undoing { cancelled: false })
    }

    /// Records that the source of a stream is a towline, which reports the outcome.
    pub(crate) fn found_source_towline(&mut self) {
        if self.request.source == SourceKind::Stream {
            self.request.source = SourceKind::Towline;
        }
    }

    /// Processes an input; returns the next directive.
    pub(crate) fn handle(&mut self, input: Input) -> Directive {
        if input == Input::Cancel {
            return self.cancel();
        }
        let directive = match self.stage {
            // The reply to a recording that another input has overtaken.
            _ if matches!(input, Input::Recorded | Input::NotRecorded) && !self.is_recording() => {
                Directive::Refuse
            }
            SwitchoverState::Transfer | SwitchoverState::Committed => self.transfer(input),
            SwitchoverState::Recording(decision) => self.recording(input, decision),
            SwitchoverState::Acknowledged | SwitchoverState::AcknowledgedUnconfirmed => {
                self.acknowledged(input)
            }
            SwitchoverState::RecordingSwitch => self.recording_switch(input),
            SwitchoverState::Switching => self.switching(input),
            SwitchoverState::Following => self.following(input),
            SwitchoverState::Serving => self.serving(input),
            SwitchoverState::Reconnecting => self.reconnecting(input),
            SwitchoverState::Judging(source) => self.judging(input, source),
            SwitchoverState::Abandoning(cause) => self.abandoning(input, cause),
            SwitchoverState::Arriving => self.arriving(input),
            SwitchoverState::Undoing { cancelled } => self.undoing(input, cancelled),
            SwitchoverState::TakingOver => self.taking_over(input),
            SwitchoverState::Reporting => self.reporting(input),
            SwitchoverState::Starting => self.starting(input),
            SwitchoverState::Finalizing(placement) => self.finalizing(input, placement),
            SwitchoverState::Releasing(placement) => self.releasing(input, placement),
            SwitchoverState::Publishing(outcome) => self.publishing(input, outcome),
            SwitchoverState::Looking => self.looking(input),
            SwitchoverState::Retracting(then) => self.retracting(input, then),
            SwitchoverState::Restoring(restoration) => self.restoring(input, restoration),
            SwitchoverState::Confirming => self.confirming(input),
            SwitchoverState::Withdrawing => self.regain(false),
            SwitchoverState::ReportingNotRun(unresolved) => {
                Directive::End(SwitchoverOutcome::Unresolved(unresolved))
            }
            SwitchoverState::Ended(outcome) => Directive::End(outcome),
        };
        if let Directive::End(outcome) = directive {
            self.stage = SwitchoverState::Ended(outcome);
        }
        directive
    }

    pub(super) fn is_recording(&self) -> bool {
        matches!(
            self.stage,
            SwitchoverState::Recording(_) | SwitchoverState::RecordingSwitch | SwitchoverState::Retracting(_)
        )
    }

    /// Returns true if the source of a move that ended like this stays paused with a guest that was paused before, or that runs
    /// elsewhere now.
    pub(crate) fn leaves_paused_guest(&self, placement: Placement) -> bool {
        let is_live = self.guest.is_live();
        let runs_there = matches!(placement, Placement::Running | Placement::Loaded)
            && (is_live || self.request.run == RunRequest::Run);
        let stays = self.request.after != SourceAction::Quit && !self.source_exited;
        self.request.source == SourceKind::Qemu && stays && (runs_there || !is_live)
    }

    pub(super) fn cancel(&mut self) -> Directive {
        match self.stage {
            SwitchoverState::Transfer
            | SwitchoverState::Recording(Decision::Commit | Decision::Acknowledge) => {
                self.aborting = true;
                Directive::Abort
            }
            SwitchoverState::Committed if self.fault.has(SwitchoverBug::CancelAfterCommit) => {
                self.stage = SwitchoverState::Transfer;
                Directive::Abort
            }
            SwitchoverState::Following if self.fault.has(SwitchoverBug::CancelAfterSwitch) => {
                self.stage = SwitchoverState::Transfer;
                Directive::Abort
            }
            _ => Directive::TooLate,
        }
    }

    pub(super) fn transfer(&mut self, input: Input) -> Directive {
        match input {
            Input::CommitRequested(_) | Input::AcknowledgeRequested { .. } | Input::SwitchRequested(_)
                if self.aborting =>
            {
                Directive::Refuse
            }
            Input::SwitchRequested(guest) => self.request_switch(guest),
            Input::CommitRequested(guest) => {
                self.guest = guest;
                if self.request.memory == MemorySharing::Postcopy && !self.is_direct() {
                    return self.serve();
                }
                if self.request.destination.runs_by_itself() {
                    return self.decide(Decision::Commit);
                }
                self.sent = true;
                Directive::Proceed
            }
            Input::AcknowledgeRequested { guest, source } => self.acknowledge(guest, source),
            Input::Delivered => self.delivered(),
            Input::Failed if self.stage == SwitchoverState::Committed => self.acknowledge_unconfirmed(),
            _ => self.undo(),
        }
    }

    /// The destination holds everything and the source is to be acknowledged. A source whose connection is
    /// closed has given up and runs its guest, so it is refused.
    pub(super) fn acknowledge(&mut self, guest: GuestRunState, source: SourceLink) -> Directive {
        let runs = self.request.destination != DestinationKind::Stored;
        let is_seen = runs && matches!(self.request.source, SourceKind::Stream | SourceKind::Towline);
        let ignores = self.fault.has(SwitchoverBug::IgnoresLink);
        if is_seen && source != SourceLink::Open && !ignores {
            return Directive::Refuse;
        }
        self.guest = guest;
        if self.request.destination.runs_by_itself() {
            // This was decided when it was sent the last bytes.
            (self.sent, self.stage) = (true, SwitchoverState::Acknowledged);
            return Directive::Proceed;
        }
        if self.is_direct() && self.fault.has(SwitchoverBug::ConnectsUnrecorded) {
            return self.recording(Input::Recorded, Decision::Acknowledge);
        }
        self.decide(Decision::Acknowledge)
    }

    pub(super) fn delivered(&mut self) -> Directive {
        self.sent = true;
        self.stage = SwitchoverState::Acknowledged;
        self.await_source()
    }

    /// A destination that runs the guest by itself was sent the last bytes and has not acknowledged them. The
    /// source is acknowledged so that it stops for good and the guest does not run twice.
    pub(super) fn acknowledge_unconfirmed(&mut self) -> Directive {
        if self.fault.has(SwitchoverBug::UndoesCommitted) {
            return self.undo();
        }
        match self.request.source {
            SourceKind::Stored => self.unresolved(AtDestination::MayRun, ToDo::LookAtDestination),
            SourceKind::Qemu | SourceKind::Stream | SourceKind::Towline => {
                self.stage = SwitchoverState::AcknowledgedUnconfirmed;
                Directive::AcknowledgeUnconfirmed
            }
        }
    }

    /// Directs what shows that the source is done with the guest.
    pub(super) fn await_source(&mut self) -> Directive {
        match self.request.source {
            SourceKind::Qemu => Directive::QuerySource,
            // A stored guest is complete, whatever becomes of a source that another party drives.
            _ if self.request.destination == DestinationKind::Stored => self.complete(),
            SourceKind::Stream => Directive::ProbeSourceLink,
            SourceKind::Towline => Directive::AwaitPeer,
            SourceKind::Stored => self.complete(),
        }
    }

    /// The guest at a source that runs it only if an operator decides so: an image is as it was, a QEMU holds it
    /// paused or has exited.
    pub(super) fn source_end(&self) -> AtSource {
        match self.request.source {
            SourceKind::Stored => AtSource::HasIt,
            _ if self.source_exited => AtSource::Ended,
            _ => AtSource::Paused,
        }
    }

    /// State of a guest that its source cannot run without an operator.
    pub(super) fn state(&self, destination: AtDestination, to_do: ToDo) -> GuestState {
        GuestState::new(self.source_end(), destination, to_do)
    }

    /// The end in such a state.
    pub(super) fn unresolved(&self, destination: AtDestination, to_do: ToDo) -> Directive {
        Directive::End(SwitchoverOutcome::Unresolved(self.state(destination, to_do)))
    }
}
