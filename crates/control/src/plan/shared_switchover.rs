//! The switchover of one command, shared by the engine's threads, which call it at the points of no return,
//! and the plan's thread.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use towline_channel::Channel;
use towline_migration::{Commit, Error as EngineError, LinkState, Session, SwitchoverGate, probe_link};
use towline_protocol::session::{MoveId, ReceiverMode};
use towline_protocol::{Error as ProtocolError, PeerMisbehaved};

use crate::lock::lock;
use crate::moves::RecordFile;
use crate::switchover::{
    Decision, DestinationKind, Directive, GuestRunState, Input, MemorySharing, RunRequest, SourceAction,
    SourceKind, SourceLink, Switchover, SwitchoverOutcome, SwitchoverRequest,
};

use super::context::Context;
use super::error::Error;
use super::progress::Observer;
use super::recorder::{RecordedEnds, Recorder};
use super::request;

/// See the module's text.
#[derive(Debug)]
pub(super) struct SharedSwitchover {
    machine: Mutex<Switchover>,
    id: OnceLock<MoveId>,
    recorder: Mutex<Recorder>,
    /// Connection to the source.
    link: OnceLock<Arc<dyn Channel>>,
    /// Error because of which a point of no return was not passed.
    not_recorded: Mutex<Option<Error>>,
    /// Directive that followed the failure which the engine reported.
    failed: OnceLock<Directive>,
    peer_timeout: Duration,
}

/// Switchover and context of one transfer.
#[derive(Clone, Copy)]
pub(super) struct TransferContext<'a> {
    pub(super) switchover: &'a Arc<SharedSwitchover>,
    pub(super) context: &'a Context<'a>,
}

impl SharedSwitchover {
    /// The switchover of a command between these kinds of ends, with this memory.
    pub(super) fn new(
        source: SourceKind,
        destination: DestinationKind,
        memory: MemorySharing,
        options: &request::CopyRequest,
    ) -> Arc<Self> {
        let after = match (options.ends_source(), options.resumes()) {
            (true, _) => SourceAction::Quit,
            (false, true) => SourceAction::Resume,
            (false, false) => SourceAction::KeepPaused,
        };
        let run = match options.run() {
            None => RunRequest::AsItWas,
            Some(true) => RunRequest::Run,
            Some(false) => RunRequest::Pause,
        };
        let request = SwitchoverRequest { source, destination, run, after, memory };
        let machine = Mutex::new(Switchover::new(request));
        let (recorder, link) = (Mutex::default(), OnceLock::new());
        let (id, not_recorded, failed) = (OnceLock::new(), Mutex::new(None), OnceLock::new());
        let peer_timeout = options.peer_timeout;
        Arc::new(Self { machine, id, recorder, link, not_recorded, failed, peer_timeout })
    }

    /// That of a source here which an earlier towline has switched to postcopy, by the record of that.
    pub(super) fn going_on(
        file: RecordFile,
        ends: RecordedEnds,
        options: &request::CopyRequest,
    ) -> Arc<Self> {
        let (id, plan) = (file.record().id.to_move_id(), file.record().guest_plan);
        let memory = MemorySharing::ConnectedPostcopy;
        let going_on = Self::new(SourceKind::Qemu, DestinationKind::Towline, memory, options);
        let run = if plan.run { RunRequest::Run } else { RunRequest::Pause };
        let request = SwitchoverRequest { run, ..going_on.state().request() };
        let guest = if plan.live { GuestRunState::Running } else { GuestRunState::Stopped };
        *going_on.machine() = Switchover::going_on(request, guest);
        going_on.id.get_or_init(|| id);
        *lock(&going_on.recorder) = Recorder::going_on(ends, file);
        going_on
    }

    /// Starts to record the decisions of a move between these ends.
    ///
    /// # Errors
    /// It is not known whether the guest has generations.
    pub(super) fn keep_record(&self, ends: RecordedEnds, context: &Context<'_>) -> Result<(), Error> {
        lock(&self.recorder).begin(ends, &self.state(), context)
    }

    /// Sets the connection to the source.
    pub(super) fn connected(&self, channel: Arc<dyn Channel>) {
        self.link.get_or_init(|| channel);
    }

    /// Makes a decision durable.
    pub(super) fn record(&self, decision: Decision) -> Result<(), Error> {
        lock(&self.recorder).record(self.id(), decision, &self.state())
    }

    /// Withdraws the recorded decision to run the guest at the destination: it does not run there.
    pub(super) fn retract(&self) -> Result<(), Error> {
        lock(&self.recorder).retract()
    }

    /// Ends the record; `message` is the command's message about the guest. Returns a notice for the user.
    pub(super) fn ended(&self, outcome: SwitchoverOutcome, message: &str) -> Option<String> {
        lock(&self.recorder).end(self.id(), outcome, &self.state(), message)
    }

    /// Passes a point of no return, after its decision has been recorded.
    pub(super) fn pass(&self, input: Input) -> Directive {
        let directive = self.handle(input);
        let Directive::Record(decision) = directive else { return directive };
        if let Err(error) = self.record(decision) {
            *lock(&self.not_recorded) = Some(error);
            return self.handle(Input::NotRecorded);
        }
        // A source that has disconnected by now resumes its guest.
        let is_there = decision != Decision::Commit || self.is_source_there();
        self.handle(if is_there { Input::Recorded } else { Input::NotRecorded })
    }

    /// Error because of which a decision could not be recorded. The engine only sees the refusal.
    pub(super) fn not_recorded(&self) -> Option<Error> {
        lock(&self.not_recorded).take()
    }

    fn is_source_there(&self) -> bool {
        self.link.get().is_none_or(|channel| probe_link(channel.as_ref()) == LinkState::Open)
    }

    /// A new session, whose engine calls this switchover at its points of no return.
    pub(super) fn new_gated_session(self: &Arc<Self>) -> Arc<Session> {
        let session = Arc::new(Session::default());
        let gate: Arc<dyn SwitchoverGate> = Arc::<Self>::clone(self);
        session.set_gate(gate);
        session
    }

    /// Processes an input; returns the next directive.
    pub(super) fn handle(&self, input: Input) -> Directive {
        let directive = self.machine().handle(input);
        tracing::debug!(?input, ?directive, "switchover");
        directive
    }

    /// Reports that a guest is loaded that towline's engine did not transfer; returns the next directive.
    pub(super) fn loaded(&self, guest: GuestRunState) -> Directive {
        // A stream has the same run state, if there was one.
        if self.pass(Input::CommitRequested(guest)) == Directive::Refuse {
            return self.failed(&Error::Cancelled);
        }
        self.handle(Input::Delivered)
    }

    /// Cancels the command; returns true if the stream is to fail.
    pub(super) fn cancel(&self) -> bool {
        self.handle(Input::Cancel) == Directive::Abort
    }

    /// Cancels a command whose guest may be at its destination; `observer` gets a notice if it is too late.
    pub(super) fn cancel_late(&self, observer: &dyn Observer) {
        if self.cancel() {
            return;
        }
        let runs_there = {
            let state = self.state();
            state.request().memory == MemorySharing::Postcopy || state.has_switched()
        };
        observer.notice(if runs_there {
            "the guest runs at its destination, so it is too late to cancel: the rest of its memory is still sent"
        } else {
            "the switchover is in progress, so it is too late to cancel"
        });
    }

    /// Reports that QEMUs which are, or will be, connected to each other may complete by themselves. Returns false if they must not.
    pub(super) fn may_acknowledge(&self, guest: GuestRunState) -> bool {
        self.pass(Input::AcknowledgeRequested { guest, source: SourceLink::Open }) == Directive::Proceed
    }

    /// Reports a failure; returns the next directive. The engine may have reported it before.
    pub(super) fn failed(&self, error: &Error) -> Directive {
        self.failed_by(matches!(error, Error::Migration(error) if is_refusal(error)))
    }

    fn failed_by(&self, is_refused: bool) -> Directive {
        let input = if is_refused { Input::DestinationRefused } else { Input::Failed };
        *self.failed.get_or_init(|| self.handle(input))
    }

    /// A copy of the machine's state.
    pub(super) fn state(&self) -> Switchover {
        *self.machine()
    }

    /// Id of this move, which both towlines have.
    pub(super) fn id(&self) -> MoveId {
        *self.id.get_or_init(|| std::array::from_fn(|_| fastrand::u8(..)))
    }

    fn machine(&self) -> MutexGuard<'_, Switchover> {
        // Every input leaves the machine consistent.
        lock(&self.machine)
    }
}

/// Returns true if the destination reported that it could not load the guest.
fn is_refusal(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::Protocol { source: ProtocolError::Misbehaved(PeerMisbehaved::ShutWithError { .. }), .. }
    )
}

impl SwitchoverGate for SharedSwitchover {
    fn destination(&self, receiver: Option<ReceiverMode>) {
        let kind = match receiver {
            Some(ReceiverMode::Waits) => DestinationKind::Towline,
            Some(ReceiverMode::Stores) => DestinationKind::Stored,
            Some(ReceiverMode::RunsByItself) => DestinationKind::Relayed,
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

    fn peer_timeout(&self) -> Duration {
        self.peer_timeout
    }

    fn confirms_loading(&self) -> bool {
        self.state().request().destination == DestinationKind::Stream
    }

    fn commit(&self, run_state: Option<&str>) -> Commit {
        match self.pass(Input::CommitRequested(GuestRunState::from_state(run_state))) {
            Directive::Proceed if self.state().request().destination.runs_by_itself() => Commit::Final,
            Directive::Proceed => Commit::Reversible,
            _ => Commit::Refused,
        }
    }

    fn acknowledge(&self, run_state: Option<&str>, source: LinkState) -> bool {
        let guest = GuestRunState::from_state(run_state);
        self.pass(Input::AcknowledgeRequested { guest, source }) == Directive::Proceed
    }

    fn must_acknowledge_after(&self, error: &EngineError) -> bool {
        self.failed_by(is_refusal(error)) == Directive::AcknowledgeUnconfirmed
    }
}

#[cfg(test)]
pub(super) mod tests {
    use tempfile::TempDir;
    use towline_channel::UnixChannel;

    use super::super::recorder::tests::recorder;
    use super::super::request::{AfterCopy, CopyRequest, Task, TransferOptions};
    use super::*;

    fn copied(from: SourceKind, to: DestinationKind, options: &CopyRequest) -> Arc<SharedSwitchover> {
        SharedSwitchover::new(from, to, MemorySharing::Copied, options)
    }

    fn switchover(destination: DestinationKind) -> (Arc<SharedSwitchover>, UnixChannel) {
        let transfer = TransferOptions::default();
        let options = CopyRequest::new(Task::Copy { transfer, after: AfterCopy::default(), base: None });
        let switchover = copied(SourceKind::Qemu, destination, &options);
        let (here, there) = UnixChannel::pair().unwrap();
        switchover.connected(Arc::new(here));
        (switchover, there)
    }

    #[test]
    fn what_is_done_with_both_ends_is_what_the_command_asks_for() {
        let transfer = TransferOptions::default();
        let copy = |after| Task::Copy { transfer, after, base: None };
        let paused = |run| copy(AfterCopy::SourcePaused { run });
        let moved = |run| Task::Move { transfer, run, detach_vsock: false, devices: Vec::new() };
        for (task, run, after) in [
            (paused(None), RunRequest::AsItWas, SourceAction::KeepPaused),
            (paused(Some(true)), RunRequest::Run, SourceAction::KeepPaused),
            (paused(Some(false)), RunRequest::Pause, SourceAction::KeepPaused),
            (copy(AfterCopy::SourceResumed), RunRequest::Pause, SourceAction::Resume),
            (moved(None), RunRequest::AsItWas, SourceAction::Quit),
            (moved(Some(false)), RunRequest::Pause, SourceAction::Quit),
            (Task::Snapshot { base: None }, RunRequest::AsItWas, SourceAction::KeepPaused),
        ] {
            let options = CopyRequest::new(task);
            let switchover = copied(SourceKind::Qemu, DestinationKind::Qemu, &options);
            let request = switchover.state().request();
            assert_eq!((request.run, request.after), (run, after), "{:?}", options.task);
        }
    }

    /// Has a switchover that has just been made record its decisions below this directory.
    pub(in super::super) fn recording(
        switchover: Arc<SharedSwitchover>,
        place: &TempDir,
    ) -> Arc<SharedSwitchover> {
        let mut switchover = Arc::into_inner(switchover).unwrap();
        switchover.recorder = Mutex::new(recorder(place));
        Arc::new(switchover)
    }

    /// The source has its guest back, so it must not run elsewhere.
    #[test]
    fn a_source_is_not_acknowledged_if_that_cannot_be_recorded() {
        for is_lost in [false, true] {
            let (place, options) = (TempDir::new().unwrap(), CopyRequest::default());
            let switchover = copied(SourceKind::Stream, DestinationKind::Qemu, &options);
            let switchover = recording(switchover, &place);
            switchover.source_reports([3; 16]);
            assert_eq!(switchover.commit(None), Commit::Reversible);
            if is_lost {
                std::fs::remove_dir_all(place.path().join("towline")).unwrap();
            }
            assert_eq!(switchover.acknowledge(None, LinkState::Open), !is_lost);
            assert_eq!(switchover.not_recorded().is_some(), is_lost);
        }
    }

    /// The source has its guest back, so a destination that runs the guest on its own must not receive the rest.
    #[test]
    fn a_source_that_has_disconnected_ends_the_stream_before_the_last_bytes() {
        let (switchover, source) = switchover(DestinationKind::Stream);
        assert!(switchover.confirms_loading());
        drop(source);
        assert_eq!(switchover.commit(Some("running")), Commit::Refused);
        let (switchover, _source) = super::tests::switchover(DestinationKind::Stream);
        assert_eq!(switchover.commit(Some("running")), Commit::Final);
        assert!(!switchover.cancel(), "it is too late");
        assert!(switchover.must_acknowledge_after(&EngineError::Cancelled));
    }

    #[test]
    fn a_destination_that_waits_can_be_given_up_until_its_source_is_acknowledged() {
        let (switchover, _source) = switchover(DestinationKind::Qemu);
        assert!(!switchover.confirms_loading());
        assert_eq!(switchover.commit(Some("suspended")), Commit::Reversible);
        assert_eq!(switchover.state().guest(), GuestRunState::Suspended);
        assert!(switchover.cancel());
        assert!(!switchover.acknowledge(Some("running"), LinkState::Open), "it is cancelled");
        let (switchover, _source) = super::tests::switchover(DestinationKind::Qemu);
        assert_eq!(switchover.commit(Some("running")), Commit::Reversible);
        assert!(switchover.acknowledge(Some("running"), LinkState::Open));
        assert!(!switchover.cancel(), "it is too late");
    }

    /// The source's towline reports the outcome: until then a lost connection means a source that runs its guest.
    #[test]
    fn a_source_whose_connection_is_gone_is_not_acknowledged() {
        for link in [LinkState::Closed, LinkState::Reset] {
            let options = CopyRequest::default();
            let switchover = copied(SourceKind::Stream, DestinationKind::Qemu, &options);
            switchover.source_reports([3; 16]);
            assert_eq!(switchover.move_id(), [3; 16]);
            assert_eq!(switchover.commit(None), Commit::Reversible);
            assert!(!switchover.acknowledge(None, link));
        }
    }

    #[test]
    fn the_first_failure_decides() {
        let (switchover, _source) = switchover(DestinationKind::Qemu);
        assert_eq!(switchover.failed(&Error::Cancelled), Directive::QuerySource);
        assert_eq!(switchover.failed(&Error::Cancelled), Directive::QuerySource);
        assert!(switchover.state().cancels_next(), "the second report is not another input");
    }
}
