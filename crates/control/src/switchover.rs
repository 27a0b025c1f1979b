//! The switchover: which end may run the guest, from the last byte of its stream to the end of the command.
//!
//! ```text
//!   Transfer ─► Committed ─► Acknowledged ─► Starting ─► Settling ─► Releasing ─► Ended
//!      │       (a destination   (the source    (it is done:   (the guest  (the source is
//!      │        that runs by     may finish)    `cont`, or     is there)   resumed, ended,
//!      │        itself)                         the outcome)               put in order)
//!      └────────────┴───────────────┴─► Undoing ─► Ended       the source has its guest back
//! ```
//! One state machine for every command that can end with a guest elsewhere. It does no I/O and has no clock: inputs are what a
//! monitor answered, what the stream says, what became of QEMU's process, a message of a towline at the other end, the user's wish
//! to cancel, a deadline that has passed. The answer to each is one [`Directive`]. The driver carries it out and reports
//! what came of it; [`Outcome`] is the end, and names the exit code and the place of the guest.
//!
//! Rules that it keeps, each tried against every order of events by `model`:
//! - A destination is run only when its source cannot run the guest any more: it says `completed`, or its process has exited.
//! - A monitor that does not answer, or is closed, says nothing about the guest. Only a process that is seen to exit does.
//! - Whether the guest runs at its destination is decided by the run state that its stream carries.
//! - What the user or an operator did to the guest is not undone: only a state that this migration caused is.
//! - Where it cannot be known which end has the guest, neither is run, and the outcome says so.
//! - A decision that another end acts on, or that a later towline has to know, is durable before it is acted on (`decision`). One that
//!   cannot be recorded is not acted on.
//!
//! What was recorded, and a look at both ends, are what a move that was interrupted is finished by (`resume`).

mod decision;
mod events;
mod fault;
mod outcome;
mod resume;

#[cfg(test)]
mod model;

pub(crate) use decision::Decision;
pub(crate) use events::{
    DestinationKind, DestinationView, Directive, GuestRun, Input, Link, PeerMessage, Request, RunRequest,
    SourceAfter, SourceKind, SourceView, Started,
};
use fault::Fault;
pub(crate) use outcome::{Held, Outcome, Placed};
pub(crate) use resume::{Case, Choice, Doubt, End, Finish};

/// See the module's picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    /// Memory moves; the destination cannot run the guest.
    Transfer,
    /// This is being made durable, and is acted on then.
    Recording(Decision),
    /// A destination that runs by itself was given the last bytes.
    Committed,
    /// The source was acknowledged, and may say that it is done.
    Acknowledged,
    /// The same, but the destination has not said that it holds the guest: it may run it or not.
    Held,
    /// The stream failed when the destination may hold everything: the source is looked at first.
    Undoing {
        cancelled: bool,
    },
    /// The source's QEMU has exited; the destination, which was sent everything, is waited for.
    TakingOver,
    /// The other towline was told the outcome.
    Reporting,
    /// The guest is being run at the destination.
    Starting,
    /// The guest is where it is to be; what is left is order.
    Settling(Placed),
    /// The source is put in order or ended.
    Releasing(Placed),
    /// The source has its guest back; its settings are put back.
    Restoring,
    /// The other towline is told that the source has its guest back.
    Withdrawing,
    /// The other towline is told that the guest does not run here.
    Failing(Held),
    Ended(Outcome),
}

/// The state machine. Copyable and comparable, so that it can be explored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Switchover {
    request: Request,
    stage: Stage,
    /// The destination was given all bytes but perhaps the last: it may hold the whole guest.
    sent: bool,
    /// As the stream says.
    guest: GuestRun,
    /// The user's cancellation is being carried out.
    aborting: bool,
    /// The source's QEMU exited while the guest moved.
    source_exited: bool,
    fault: fault::Switch,
}

impl Switchover {
    /// The machine of one command, at its beginning.
    pub(crate) fn new(request: Request) -> Self {
        Self {
            request,
            stage: Stage::Transfer,
            sent: false,
            guest: GuestRun::Running,
            aborting: false,
            source_exited: false,
            fault: fault::Switch::default(),
        }
    }

    /// What holds the guest afterwards.
    pub(crate) fn destination(&self) -> DestinationKind {
        self.request.destination
    }

    /// The destination of a stream is a towline, of this kind.
    pub(crate) fn found_destination(&mut self, kind: DestinationKind) {
        if self.request.destination == DestinationKind::Stream {
            self.request.destination = kind;
        }
    }

    /// Whether the source is a QEMU whose monitor is at hand.
    pub(crate) fn drives_source(&self) -> bool {
        self.request.source == SourceKind::Qemu
    }

    /// What was asked for, and which ends were found.
    pub(crate) fn request(&self) -> Request {
        self.request
    }

    /// Whether the guest was live when it was stopped, as its stream says.
    pub(crate) fn guest(&self) -> GuestRun {
        self.guest
    }

    /// Whether the source's QEMU is known to have exited.
    pub(crate) fn has_source_exited(&self) -> bool {
        self.source_exited
    }

    /// Whether it is the outcome of the source's towline that is waited for, and not what the destination's did.
    pub(crate) fn awaits_outcome(&self) -> bool {
        matches!(self.stage, Stage::Acknowledged | Stage::Held)
    }

    /// Whether a source that has not given up by itself is cancelled next.
    pub(crate) fn cancels_next(&self) -> bool {
        matches!(self.stage, Stage::Undoing { cancelled: false })
    }

    /// The source of a stream has said that it is a towline that reports the outcome.
    pub(crate) fn found_source_towline(&mut self) {
        if self.request.source == SourceKind::Stream {
            self.request.source = SourceKind::Towline;
        }
    }

    /// Takes in what has happened; returns what to do.
    pub(crate) fn handle(&mut self, input: Input) -> Directive {
        if input == Input::Cancel {
            return self.cancel();
        }
        let directive = match self.stage {
            // That of a decision which something else has overtaken.
            _ if matches!(input, Input::Recorded | Input::NotRecorded) && !self.is_recording() => {
                Directive::Refuse
            }
            Stage::Transfer | Stage::Committed => self.transfer(input),
            Stage::Recording(decision) => self.recording(input, decision),
            Stage::Acknowledged | Stage::Held => self.acknowledged(input),
            Stage::Undoing { cancelled } => self.undoing(input, cancelled),
            Stage::TakingOver => self.taking_over(input),
            Stage::Reporting => self.reporting(input),
            Stage::Starting => self.starting(input),
            Stage::Settling(placed) => self.settling(input, placed),
            Stage::Releasing(placed) => self.releasing(input, placed),
            Stage::Restoring => self.restoring(input),
            Stage::Withdrawing => self.withdrawing(),
            Stage::Failing(held) => Directive::End(Outcome::Look(held)),
            Stage::Ended(outcome) => Directive::End(outcome),
        };
        if let Directive::End(outcome) = directive {
            self.stage = Stage::Ended(outcome);
        }
        directive
    }

    fn is_recording(&self) -> bool {
        matches!(self.stage, Stage::Recording(_))
    }

    /// Whether the model has put this fault back; never outside of tests.
    fn has_fault(&self, fault: Fault) -> bool {
        self.fault.has(fault)
    }

    fn cancel(&mut self) -> Directive {
        match self.stage {
            Stage::Transfer | Stage::Recording(Decision::Commit | Decision::Acknowledge) => {
                self.aborting = true;
                Directive::Abort
            }
            Stage::Committed if self.has_fault(Fault::CancelAfterCommit) => {
                self.stage = Stage::Transfer;
                Directive::Abort
            }
            _ => Directive::TooLate,
        }
    }

    fn transfer(&mut self, input: Input) -> Directive {
        match input {
            Input::CommitRequested(_) | Input::AcknowledgeRequested { .. } if self.aborting => {
                Directive::Refuse
            }
            Input::CommitRequested(guest) => {
                self.guest = guest;
                if self.request.destination.runs_by_itself() {
                    return self.decide(Decision::Commit);
                }
                self.sent = true;
                Directive::Proceed
            }
            Input::AcknowledgeRequested { guest, source } => self.acknowledge(guest, source),
            Input::Delivered => self.delivered(),
            Input::DestinationRefused => self.undo(),
            Input::Failed if self.stage == Stage::Committed => self.hold(),
            _ => self.undo(),
        }
    }

    /// The destination holds everything: may the source be acknowledged? Not one that is gone: it has given up and runs on.
    fn acknowledge(&mut self, guest: GuestRun, source: Link) -> Directive {
        let runs = self.request.destination != DestinationKind::Stored;
        let is_seen = runs && matches!(self.request.source, SourceKind::Stream | SourceKind::Towline);
        let ignores = self.has_fault(Fault::IgnoresLink);
        if is_seen && source != Link::Open && !ignores {
            return Directive::Refuse;
        }
        self.guest = guest;
        if self.request.destination.runs_by_itself() {
            // Decided when it was given the last bytes.
            (self.sent, self.stage) = (true, Stage::Acknowledged);
            return Directive::Proceed;
        }
        self.decide(Decision::Acknowledge)
    }

    fn delivered(&mut self) -> Directive {
        self.sent = true;
        self.stage = Stage::Acknowledged;
        self.await_source()
    }

    /// A destination that runs by itself was given the last bytes and has not answered. The source is stopped for good, so that the
    /// guest does not run twice.
    fn hold(&mut self) -> Directive {
        if self.has_fault(Fault::UndoesCommitted) {
            return self.undo();
        }
        match self.request.source {
            SourceKind::Stored => Directive::End(Outcome::Look(Held::DestinationMayRun)),
            SourceKind::Qemu | SourceKind::Stream | SourceKind::Towline => {
                self.stage = Stage::Held;
                Directive::Hold
            }
        }
    }

    /// What shows that the source is done with the guest.
    fn await_source(&mut self) -> Directive {
        match self.request.source {
            SourceKind::Qemu => Directive::LookAtSource,
            // What is stored is stored, whatever becomes of a source that is not ours to put in order.
            _ if self.request.destination == DestinationKind::Stored => self.complete(),
            SourceKind::Stream => Directive::LookAtLink,
            SourceKind::Towline => Directive::AwaitPeer,
            SourceKind::Stored => self.complete(),
        }
    }

    fn acknowledged(&mut self, input: Input) -> Directive {
        let held = self.stage == Stage::Held;
        match input {
            Input::Delivered | Input::Done => self.await_source(),
            Input::Failed | Input::NotDone if self.request.source == SourceKind::Qemu => self.await_source(),
            // The acknowledgement could not be sent, or its connection broke: nobody knows whether it arrived.
            Input::Failed | Input::NotDone => self.undecided(),
            Input::Source(SourceView::Completed) if held => {
                Directive::End(Outcome::Look(Held::DestinationMayRun))
            }
            Input::Source(SourceView::Completed) => self.complete(),
            Input::Source(SourceView::CompletedAndRun) => {
                Directive::End(Outcome::Look(Held::SourceRunByOthers))
            }
            Input::Source(SourceView::HasGuest) => self.source_has_guest(),
            Input::Source(SourceView::Exited) => {
                self.source_exited = true;
                if held { Directive::End(Outcome::Look(Held::DestinationMayRun)) } else { self.complete() }
            }
            Input::Source(SourceView::Migrating) => Directive::LookAtSource,
            Input::Source(SourceView::Unknown) if self.has_fault(Fault::SilenceIsExit) => {
                self.source_exited = true;
                self.complete()
            }
            Input::Source(SourceView::Unknown) => Directive::LookAtSource,
            Input::SourceLink(Link::Open) => Directive::LookAtLink,
            Input::SourceLink(Link::Closed) if held => Directive::End(Outcome::Look(Held::DestinationMayRun)),
            Input::SourceLink(Link::Closed) => self.complete(),
            Input::SourceLink(Link::Reset) if self.has_fault(Fault::IgnoresLink) => self.complete(),
            Input::SourceLink(Link::Reset) => self.undecided(),
            Input::Peer(PeerMessage::Completed(run)) => {
                if self.request.run == RunRequest::AsItWas {
                    self.request.run = run;
                }
                self.complete()
            }
            Input::Peer(PeerMessage::Aborted) => self.source_has_guest(),
            Input::PeerLost | Input::TimedOut if self.has_fault(Fault::RunsWhenCut) => self.complete(),
            _ => self.undecided(),
        }
    }

    /// The source was acknowledged, and has not completed: it was cancelled there, or failed.
    fn source_has_guest(&mut self) -> Directive {
        if self.has_fault(Fault::CompletesWhatWasCancelled) {
            return self.complete();
        }
        match (self.request.destination, self.stage) {
            (to, _) if to.runs_by_itself() => Directive::End(Outcome::Look(Held::BothMayRun)),
            (DestinationKind::Towline, Stage::Acknowledged) => {
                self.stage = Stage::Withdrawing;
                Directive::Send(PeerMessage::Aborted)
            }
            _ => self.restore(false),
        }
    }

    /// Neither end is run: it is not known whether the source is done with the guest.
    fn undecided(&self) -> Directive {
        let held = match (self.request.source, self.request.destination) {
            _ if self.stage == Stage::Held => Held::DestinationMayRun,
            (_, DestinationKind::Stream | DestinationKind::Relayed) => Held::DestinationMayRun,
            (_, DestinationKind::Stored) => Held::SourceUnknown,
            (_, DestinationKind::Towline) => Held::PeerWaits,
            (SourceKind::Qemu, DestinationKind::Qemu) => Held::DestinationHolds,
            (_, DestinationKind::Qemu) => Held::Undecided,
        };
        Directive::End(Outcome::Look(held))
    }

    /// The source cannot run the guest any more.
    fn complete(&mut self) -> Directive {
        match self.request.destination {
            DestinationKind::Stored => self.settle(Placed::Stored),
            DestinationKind::Stream | DestinationKind::Relayed => self.settle(Placed::Loaded),
            DestinationKind::Towline => self.decide(Decision::Complete),
            DestinationKind::Qemu if self.runs() => self.decide(Decision::Run),
            DestinationKind::Qemu => self.settle(Placed::Paused),
        }
    }

    fn runs(&self) -> bool {
        match self.request.run {
            RunRequest::AsItWas => self.guest.is_live(),
            RunRequest::Run => true,
            RunRequest::Pause => false,
        }
    }

    fn reporting(&mut self, input: Input) -> Directive {
        match input {
            Input::Done => Directive::AwaitPeer,
            Input::Peer(PeerMessage::Settled(placed)) if self.request.source == SourceKind::Towline => {
                self.stage = Stage::Releasing(placed);
                Directive::Send(PeerMessage::Settled(placed))
            }
            Input::Peer(PeerMessage::Settled(placed)) => self.release(placed),
            Input::Peer(PeerMessage::NotRun) => Directive::End(Outcome::Look(Held::PeerDidNotRun)),
            _ => Directive::End(Outcome::Look(Held::PeerUnknown)),
        }
    }

    fn starting(&mut self, input: Input) -> Directive {
        let held = match input {
            Input::Started(Started::Live) => return self.settle(Placed::Running),
            Input::Started(Started::StoppedAgain) => Held::StoppedAgain,
            Input::Started(Started::Refused) if self.source_gone() => Held::DestinationOnly,
            Input::Started(Started::Refused) => Held::BothPaused,
            Input::Started(Started::Exited) if self.source_gone() => Held::BothExited,
            Input::Started(Started::Exited) => Held::DestinationLost,
            _ => Held::DestinationUnknown,
        };
        self.held_there(held)
    }

    /// Whether nothing at the source holds the guest.
    fn source_gone(&self) -> bool {
        self.source_exited
    }

    fn settle(&mut self, placed: Placed) -> Directive {
        self.stage = Stage::Settling(placed);
        Directive::SettleDestination
    }

    fn settling(&mut self, input: Input, placed: Placed) -> Directive {
        match input {
            Input::Destination(DestinationView::Exited) if self.source_gone() => {
                Directive::End(Outcome::Look(Held::BothExited))
            }
            Input::Destination(DestinationView::Exited) => {
                Directive::End(Outcome::Look(Held::DestinationLost))
            }
            Input::NotDone if self.source_gone() => Directive::End(Outcome::Look(Held::DestinationAlone)),
            Input::NotDone => Directive::End(Outcome::Look(Held::DestinationUnknown)),
            _ if self.request.source == SourceKind::Towline => {
                self.stage = Stage::Releasing(placed);
                Directive::Send(PeerMessage::Settled(placed))
            }
            _ => self.release(placed),
        }
    }

    fn release(&mut self, placed: Placed) -> Directive {
        if self.request.source != SourceKind::Qemu || self.source_exited {
            return Directive::End(Outcome::Done(placed));
        }
        self.stage = Stage::Releasing(placed);
        match self.request.after {
            SourceAfter::Quit => Directive::QuitSource,
            SourceAfter::Resume
                if !matches!(placed, Placed::Running | Placed::Loaded) && self.guest.is_live() =>
            {
                Directive::ResumeSource
            }
            _ => Directive::RestoreSource,
        }
    }

    fn releasing(&mut self, input: Input, placed: Placed) -> Directive {
        let held = match (input, self.request.source, self.request.after) {
            (Input::NotDone, SourceKind::Qemu, SourceAfter::Quit) => Held::SourceNotEnded,
            (Input::NotDone, SourceKind::Qemu, SourceAfter::Resume) => Held::SourceNotResumed,
            (Input::Source(SourceView::Exited), _, SourceAfter::Resume) => Held::StoredOnly,
            (Input::NotDone, SourceKind::Qemu, SourceAfter::Stay) => {
                return Directive::End(Outcome::Done(placed));
            }
            _ => return Directive::End(Outcome::Done(placed)),
        };
        Directive::End(Outcome::Look(held))
    }

    /// The stream failed before the source was acknowledged: it has its guest, or gets it back.
    fn undo(&mut self) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return Directive::End(Outcome::Safe);
        }
        self.stage = Stage::Undoing { cancelled: false };
        Directive::LookAtSource
    }

    fn undoing(&mut self, input: Input, cancelled: bool) -> Directive {
        match input {
            Input::Source(SourceView::HasGuest) => self.restore(false),
            // It completed all the same: its last answer came from the destination itself.
            Input::Source(SourceView::Completed) => self.restore(true),
            Input::Source(SourceView::CompletedAndRun) => self.restore(false),
            Input::Source(SourceView::Exited) => self.take_over(),
            Input::Source(SourceView::Migrating | SourceView::Unknown) | Input::Done => {
                Directive::LookAtSource
            }
            Input::TimedOut if !cancelled => {
                self.stage = Stage::Undoing { cancelled: true };
                Directive::CancelSource
            }
            _ => Directive::End(Outcome::Look(Held::SourceUnknown)),
        }
    }

    /// The source's process has exited. A destination that was sent everything is the only one that can run the guest.
    fn take_over(&mut self) -> Directive {
        self.source_exited = true;
        match self.request.destination {
            DestinationKind::Qemu if self.sent && !self.has_fault(Fault::LosesWhatWasSent) => {
                self.stage = Stage::TakingOver;
                Directive::LookAtDestination
            }
            DestinationKind::Stream | DestinationKind::Relayed | DestinationKind::Towline if self.sent => {
                Directive::End(Outcome::Look(Held::DestinationMayRun))
            }
            _ => Directive::End(Outcome::Look(Held::SourceExited)),
        }
    }

    fn taking_over(&mut self, input: Input) -> Directive {
        match input {
            Input::Destination(DestinationView::Loaded | DestinationView::Running) => self.complete(),
            Input::Destination(DestinationView::Loading | DestinationView::Unknown) => {
                Directive::LookAtDestination
            }
            Input::Destination(DestinationView::Exited) => Directive::End(Outcome::Look(Held::BothExited)),
            Input::Destination(DestinationView::Failed) => Directive::End(Outcome::Look(Held::SourceExited)),
            _ => Directive::End(Outcome::Look(Held::DestinationUnknown)),
        }
    }

    /// The source keeps its guest. `stopped`: by this migration, in which its guest was live or not.
    fn restore(&mut self, stopped: bool) -> Directive {
        if self.request.source != SourceKind::Qemu {
            return Directive::End(Outcome::Safe);
        }
        self.stage = Stage::Restoring;
        match stopped && self.guest.is_live() {
            true => Directive::ResumeSource,
            false => Directive::RestoreSource,
        }
    }

    fn restoring(&mut self, input: Input) -> Directive {
        match input {
            Input::NotDone => Directive::End(Outcome::Look(Held::SourceUnknown)),
            Input::Source(SourceView::Exited) => Directive::End(Outcome::Look(Held::SourceExitedSince)),
            _ => Directive::End(Outcome::Safe),
        }
    }

    /// Whether it reads or not: it does not run the guest without another message.
    fn withdrawing(&mut self) -> Directive {
        self.restore(false)
    }
}
