//! The switchover of one command: its machine, asked by the engine's threads at the points of no return and by the plan's thread for
//! all else.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use towline_channel::Channel;
use towline_migration::{Commit, Error as EngineError, LinkState, Session, SwitchoverGate, probe_link};
use towline_protocol::session::{MoveId, Receiver};
use towline_protocol::{Error as ProtocolError, PeerMisbehaved};

use crate::moves::MoveEnd;
use crate::switchover::{
    Decision, DestinationKind, Directive, GuestRunState, Input, Outcome, RunRequest, SourceAction,
    SourceKind, SourceLink, Switchover, SwitchoverRequest,
};

use super::context::Context;
use super::error::Error;
use super::recorder::Recorder;
use super::request;

/// See the module's text.
#[derive(Debug)]
pub(super) struct SharedSwitchover {
    machine: Mutex<Switchover>,
    id: OnceLock<MoveId>,
    recorder: Recorder,
    /// The connection to the source.
    link: OnceLock<Arc<dyn Channel>>,
    /// Why a point of no return was not passed.
    not_recorded: Mutex<Option<Error>>,
    /// What was directed when the engine reported its failure.
    failed: OnceLock<Directive>,
}

impl SharedSwitchover {
    /// The switchover of a command between these two kinds of ends.
    pub(super) fn new(
        source: SourceKind,
        destination: DestinationKind,
        options: &request::Request,
    ) -> Arc<Self> {
        let after = match (options.ends_source(), options.resumes() && !options.is_snapshot()) {
            (true, _) => SourceAction::Quit,
            (false, true) => SourceAction::Resume,
            (false, false) => SourceAction::KeepPaused,
        };
        let run = match options.run() {
            None => RunRequest::AsItWas,
            Some(true) => RunRequest::Run,
            Some(false) => RunRequest::Pause,
        };
        let machine = Mutex::new(Switchover::new(SwitchoverRequest { source, destination, run, after }));
        let (recorder, link) = (Recorder::default(), OnceLock::new());
        let (id, not_recorded, failed) = (OnceLock::new(), Mutex::new(None), OnceLock::new());
        Arc::new(Self { machine, id, recorder, link, not_recorded, failed })
    }

    /// What is decided of a move between these ends is recorded.
    pub(super) fn keep_record(&self, source: MoveEnd, destination: MoveEnd, context: &Context<'_>) {
        self.recorder.begin(source, destination, &self.state(), context);
    }

    /// The source is at the other end of this connection.
    pub(super) fn connected(&self, channel: Arc<dyn Channel>) {
        self.link.get_or_init(|| channel);
    }

    /// Makes a decision durable.
    pub(super) fn record(&self, decision: Decision) -> Result<(), Error> {
        self.recorder.record(self.id(), decision, &self.state())
    }

    /// That the destination runs the guest is recorded no more: it does not.
    pub(super) fn retract(&self) -> Result<(), Error> {
        self.recorder.retract()
    }

    /// The command ends; `said` is what it says of the guest. Returns what else the user should know.
    pub(super) fn ended(&self, outcome: Outcome, said: &str) -> Option<String> {
        self.recorder.end(self.id(), outcome, &self.state(), said)
    }

    /// At a point of no return: what is to be recorded first is.
    fn pass(&self, input: Input) -> Directive {
        let directive = self.handle(input);
        let Directive::Record(decision) = directive else { return directive };
        if let Err(error) = self.record(decision) {
            *self.not_recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            return self.handle(Input::NotRecorded);
        }
        // A source that is gone by now runs its guest again.
        let is_there = decision != Decision::Commit || self.is_source_there();
        self.handle(if is_there { Input::Recorded } else { Input::NotRecorded })
    }

    /// Why the guest was not handed over, if that could not be recorded: the engine only knows that it was not to be.
    pub(super) fn not_recorded(&self) -> Option<Error> {
        self.not_recorded.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn is_source_there(&self) -> bool {
        self.link.get().is_none_or(|channel| probe_link(channel.as_ref()) == LinkState::Open)
    }

    /// A session whose engine asks this at its points of no return.
    pub(super) fn session(self: &Arc<Self>) -> Arc<Session> {
        let session = Arc::new(Session::default());
        let gate: Arc<dyn SwitchoverGate> = Arc::<Self>::clone(self);
        session.set_gate(gate);
        session
    }

    /// Takes in what has happened; returns what to do.
    pub(super) fn handle(&self, input: Input) -> Directive {
        let directive = self.machine().handle(input);
        tracing::debug!(?input, ?directive, "switchover");
        directive
    }

    /// A guest that no engine of ours carried is loaded at its destination: what to do.
    pub(super) fn loaded(&self, guest: GuestRunState) -> Directive {
        // The stream's own, where there was one, says the same.
        if self.pass(Input::CommitRequested(guest)) == Directive::Refuse {
            return self.failed(&Error::Cancelled);
        }
        self.handle(Input::Delivered)
    }

    /// The user's wish to cancel: whether the stream is to fail.
    pub(super) fn cancel(&self) -> bool {
        self.handle(Input::Cancel) == Directive::Abort
    }

    /// The stream, or what was done meanwhile, failed: what to do. The engine may have reported it before.
    pub(super) fn failed(&self, error: &Error) -> Directive {
        let refused = matches!(error, Error::Migration(error) if is_refusal(error));
        *self.failed.get_or_init(|| self.handle(failure(refused)))
    }

    /// What is known of the guest, its destination and the stage.
    pub(super) fn state(&self) -> Switchover {
        *self.machine()
    }

    /// The name of this move, which both towlines have.
    pub(super) fn id(&self) -> MoveId {
        *self.id.get_or_init(|| std::array::from_fn(|_| fastrand::u8(..)))
    }

    fn machine(&self) -> MutexGuard<'_, Switchover> {
        // Every input leaves it whole.
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failure(refused: bool) -> Input {
    if refused { Input::DestinationRefused } else { Input::Failed }
}

/// Whether the destination said that it could not load the guest.
fn is_refusal(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::Protocol { source: ProtocolError::Misbehaved(PeerMisbehaved::ShutWithError { .. }), .. }
    )
}

impl SwitchoverGate for SharedSwitchover {
    fn destination(&self, receiver: Option<Receiver>) {
        let kind = match receiver {
            Some(Receiver::Waits) => DestinationKind::Towline,
            Some(Receiver::Stores) => DestinationKind::Stored,
            Some(Receiver::RunsByItself) => DestinationKind::Relayed,
            None => return,
        };
        self.machine().found_destination(kind);
    }

    fn source_reports(&self, id: MoveId) {
        self.id.get_or_init(|| id);
        self.machine().found_source_towline();
    }

    fn move_id(&self) -> MoveId {
        self.id()
    }

    fn confirms_loading(&self) -> bool {
        self.machine().destination() == DestinationKind::Stream
    }

    fn commit(&self, run_state: Option<&str>) -> Commit {
        match self.pass(Input::CommitRequested(GuestRunState::from_state(run_state))) {
            Directive::Proceed if self.machine().destination().runs_by_itself() => Commit::Final,
            Directive::Proceed => Commit::Reversible,
            _ => Commit::Refused,
        }
    }

    fn acknowledge(&self, run_state: Option<&str>, source: LinkState) -> bool {
        let input = Input::AcknowledgeRequested {
            guest: GuestRunState::from_state(run_state),
            source: source_link(source),
        };
        self.pass(input) == Directive::Proceed
    }

    fn holds(&self, error: &EngineError) -> bool {
        *self.failed.get_or_init(|| self.handle(failure(is_refusal(error))))
            == Directive::AcknowledgeUnconfirmed
    }
}

/// The same in the machine's words.
pub(super) fn source_link(state: LinkState) -> SourceLink {
    match state {
        LinkState::Open => SourceLink::Open,
        LinkState::Closed => SourceLink::Closed,
        LinkState::Reset => SourceLink::Reset,
    }
}
