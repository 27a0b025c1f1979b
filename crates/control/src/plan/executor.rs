//! Carries out the switchover's directives, from the end of the stream to the end of the command.
//!
//! ```text
//!   the stream is complete, or failed ─► Switchover ─► directive ─► QMP, the connection, the other towline ─┐
//!                                                ▲                                                           │
//!                                                └───────────── result ◄─────────────────────────────────────┘
//! ```
//! Nothing is decided here: [`crate::switchover`] decides which end may run the guest.

mod ends;
mod postcopy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::Channel;
use towline_migration::silence_max;
use towline_protocol::session::{FromDestination, FromSource};

use super::context::Context;
use super::destination::HeldGuest;
use super::endpoint::{DestinationEndpoint, Rollback, SourceControl};
use super::error::{ABORTS_ASLEEP, Error, Failure};
use super::outcomes::{GuestAfterFailure, SourceCategory};
use super::peer::{PeerReply, PeerSession};
use super::progress::{DestinationState, PostcopyReport, SourceState};
use super::shared_switchover::SharedSwitchover;
use super::source::GuestAction;
use super::way::Way;
use crate::switchover::{
    Decision, DestinationKind, Directive, GuestRunState, GuestState, Input, MemorySharing, PeerMessage,
    Placement, SourceAction, SourceKind, SwitchoverOutcome, ToDo,
};

/// Timeout for the message of another towline that still sends heartbeats: longer than every timeout there.
const PEER_REPORT_TIMEOUT: Duration = Duration::from_secs(150);

/// Both ends, and the error so far.
pub(super) struct SwitchoverEnds<'a> {
    pub(super) switchover: &'a SharedSwitchover,
    pub(super) source: SourceControl<'a>,
    pub(super) destination: &'a mut dyn DestinationEndpoint,
    pub(super) link: HostLink<'a>,
    pub(super) context: &'a Context<'a>,
    /// The first error, if one occurred.
    pub(super) error: Option<Error>,
}

/// Connection of two hosts whose QEMUs are connected to each other; none of others.
#[derive(Default)]
pub(super) struct HostLink<'a> {
    /// The session with the other towline, if it has begun.
    pub(super) session: Option<PeerSession>,
    /// The way, if it can be made again.
    pub(super) way: Option<Way<'a>>,
}

/// Result for a guest that is at its destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct SwitchoverReport {
    pub(super) source: SourceState,
    pub(super) destination: DestinationState,
    /// Downtime in milliseconds, as the source's QEMU reports it.
    pub(super) downtime_ms: Option<u64>,
    /// Statistics of postcopy between two QEMUs.
    pub(super) postcopy: PostcopyReport,
}

/// The current directive, and since when it has been repeated.
struct DirectiveWait {
    directive: Directive,
    since: Instant,
}

struct Executor<'a> {
    ends: SwitchoverEnds<'a>,
    wait: DirectiveWait,
    notes: Vec<String>,
    downtime_ms: Option<u64>,
    postcopy: PostcopyReport,
    /// Error because of which the vsocks could not be attached.
    not_attached: Option<Error>,
    destination_peer: Option<PeerSession>,
    source_peer: Option<PeerSession>,
    cancel_handled: bool,
    is_cut_over: bool,
    /// The QEMUs have not been connected to each other since then.
    stuck_since: Option<Instant>,
    /// The destination has reported that it lacks nothing.
    is_all_there: bool,
    /// Time at which the hosts were connected again.
    reconnected_at: Option<Instant>,
    /// Number of connections in a row that were lost soon after that.
    brief_connections: u32,
}

/// Carries out directives from `first` until the end of the command.
pub(super) fn conclude(mut ends: SwitchoverEnds<'_>, first: Directive) -> Result<SwitchoverReport, Failure> {
    // A cancellation that came before a QEMU was changed does not end these queries: they tell where the guest is.
    if let SourceControl::Qemu(source) = &mut ends.source {
        source.qemu.wait_for_replies();
    }
    if let Some(to) = ends.destination.qemu() {
        to.qmp.qemu.wait_for_replies();
    }
    let mut begun = ends.link.session.take();
    let mut session = |channel: Arc<dyn Channel>| begun.take().unwrap_or_else(|| PeerSession::new(channel));
    let source_peer = match &ends.source {
        SourceControl::Stream(channel) => Some(session(Arc::clone(channel))),
        _ => None,
    };
    let destination_peer = ends.destination.channel().map(session);
    // A command that has failed does not report that it is too late to cancel. An image's memory was sent before.
    let request = ends.switchover.state().request();
    let is_served = request.memory == MemorySharing::Postcopy && request.source == SourceKind::Stored;
    let cancel_handled = ends.error.is_some() || is_served;
    let wait = DirectiveWait { directive: first, since: Instant::now() };
    let (notes, downtime_ms) = (Vec::new(), None);
    Executor {
        ends,
        wait,
        notes,
        downtime_ms,
        postcopy: PostcopyReport::default(),
        not_attached: None,
        destination_peer,
        source_peer,
        cancel_handled,
        is_cut_over: false,
        stuck_since: None,
        is_all_there: false,
        reconnected_at: None,
        brief_connections: 0,
    }
    .run(first)
}

impl Executor<'_> {
    fn run(mut self, first: Directive) -> Result<SwitchoverReport, Failure> {
        self.beat_until_outcome();
        let mut directive = first;
        loop {
            if let Directive::End(outcome) = directive {
                return self.end(outcome);
            }
            if directive != self.wait.directive {
                self.wait = DirectiveWait { directive, since: Instant::now() };
            }
            let input = self.carry_out(directive);
            if input == Input::TimedOut {
                self.wait.since = Instant::now();
            }
            self.handle_cancel();
            directive = self.ends.switchover.handle(input);
        }
    }

    /// Sends heartbeats to a towline at the destination, which holds the guest until it has the outcome, or to one at a source whose
    /// QEMU completes by itself.
    fn beat_until_outcome(&mut self) {
        if self.ends.error.is_none()
            && self.ends.switchover.state().destination() == DestinationKind::Towline
            && let Some(peer) = &mut self.destination_peer
        {
            peer.beat_until_outcome();
        }
        // The source may be cancelled if this end is silent.
        if self.are_qemus_connected()
            && let Some(peer) = &mut self.source_peer
        {
            peer.beat_until_report();
        }
    }

    fn are_qemus_connected(&self) -> bool {
        matches!(
            self.ends.switchover.state().request().memory,
            MemorySharing::Connected | MemorySharing::ConnectedPostcopy
        )
    }

    fn handle_cancel(&mut self) {
        if !self.cancel_handled && self.ends.context.cancel.is_cancelled() {
            self.cancel_handled = true;
            self.ends.switchover.cancel_late(self.ends.context.observer);
        }
    }

    /// Keeps an error as the reason, unless there is one already; the switchover goes on with `input`.
    fn fail(&mut self, error: Error, input: Input) -> Input {
        self.ends.error.get_or_insert(error);
        input
    }

    fn waited(&self) -> Duration {
        self.wait.since.elapsed()
    }

    fn carry_out(&mut self, directive: Directive) -> Input {
        match directive {
            Directive::StartPostcopy => self.start_postcopy(),
            Directive::FollowSource => self.follow_source(),
            Directive::RunEarly => self.run_early(),
            Directive::Recover => self.recover(),
            Directive::QuerySource => self.query_source(),
            Directive::ProbeSourceLink => self.probe_link(),
            Directive::QueryDestination => self.query_destination(),
            Directive::AwaitPeer => self.await_peer(),
            Directive::RunDestination => self.start_destination(),
            Directive::Send(message) => self.send(message),
            Directive::FinalizeDestination => self.finalize(),
            Directive::CancelMigration => self.with_source(|source| source.cancel_migration()),
            Directive::RestoreSource => self.restore(GuestAction::Leave),
            Directive::ResumeSource => match self.end_in_shared_memory() {
                Ok(()) => self.restore(GuestAction::Resume),
                Err(error) => self.fail(error, Input::NotDone),
            },
            Directive::ResumeSourceFirst => self.restore(GuestAction::Resume),
            Directive::QuitSource => self.quit(),
            Directive::Record(decision) => self.record(decision),
            Directive::Retract => self.retract(),
            Directive::LookAtDestination => Input::Destination(self.destination_status()),
            // Directives of an engine, which has already acknowledged a source whose guest is unconfirmed.
            Directive::AcknowledgeUnconfirmed
            | Directive::Proceed
            | Directive::ServeMemory
            | Directive::Refuse
            | Directive::Abort
            | Directive::TooLate
            | Directive::End(_) => Input::Done,
        }
    }

    /// Waits for the other towline; returns only after an event.
    fn await_peer(&mut self) -> Input {
        let silence_max = silence_max(self.ends.context.options.peer_timeout);
        loop {
            let stuck = self.watch_following_source();
            let awaits_outcome = self.ends.switchover.state().awaits_source_outcome();
            let (reply, silence) = match (&mut self.source_peer, &mut self.destination_peer) {
                (Some(peer), _) if awaits_outcome => (peer.receive_outcome(), peer.silence()),
                (_, Some(peer)) => {
                    let reply = peer.receive_report();
                    let reason = peer.not_run.take().map(|reason| Error::PeerDidNotRun { reason });
                    self.ends.error = self.ends.error.take().or(reason);
                    (reply, peer.silence())
                }
                _ => return Input::PeerLost,
            };
            match reply {
                PeerReply::Message(message) => {
                    // From here on the source waits for the report.
                    if let Some(peer) = self.source_peer.as_mut().filter(|_| awaits_outcome) {
                        peer.beat_until_report();
                    }
                    return Input::Peer(message);
                }
                PeerReply::Nothing
                    if silence >= silence_max
                        || self.waited() >= PEER_REPORT_TIMEOUT && !self.has_switched() =>
                {
                    let waited = if silence >= silence_max { silence } else { self.waited() };
                    return self.fail(Error::PeerSilent { waited }, Input::TimedOut);
                }
                PeerReply::Nothing => match stuck {
                    Some(input) => return input,
                    None => self.handle_cancel(),
                },
                PeerReply::Lost(error) => return self.fail(error, Input::PeerLost),
            }
        }
    }

    fn send(&mut self, message: PeerMessage) -> Input {
        let is_following = self.has_switched() && matches!(message, PeerMessage::Completed(_));
        let sent = match (message, &mut self.source_peer, &mut self.destination_peer) {
            (PeerMessage::Completed(run), _, Some(peer)) => peer.send_outcome(FromSource::Completed(run)),
            (PeerMessage::Aborted, _, Some(peer)) => peer.send_outcome(FromSource::Aborted),
            (PeerMessage::Placed(placement), Some(peer), _) => {
                peer.send_report(&FromDestination::Placed(placement))
            }
            (PeerMessage::NotRun, Some(peer), _) => {
                let reason = self.ends.error.as_ref().map(Error::to_string).unwrap_or_default();
                peer.send_report(&FromDestination::NotRun(reason))
            }
            _ => Ok(()),
        };
        match sent {
            Ok(()) => {
                // The rest of the memory takes as long as it takes.
                if let Some(peer) = self.destination_peer.as_mut().filter(|_| is_following) {
                    peer.beat_until_outcome();
                }
                if let PeerMessage::Placed(placement) = message {
                    self.confirm_placed(placement);
                }
                Input::Done
            }
            Err(error) => {
                let is_sent = match message {
                    PeerMessage::Placed(placement) => self.confirm_placed(placement),
                    _ => false,
                };
                if is_sent { Input::Done } else { self.fail(error, Input::NotDone) }
            }
        }
    }

    fn record(&mut self, decision: Decision) -> Input {
        match self.ends.switchover.record(decision) {
            Ok(()) => Input::Recorded,
            Err(error) => self.fail(error, Input::NotRecorded),
        }
    }

    fn retract(&mut self) -> Input {
        match self.ends.switchover.retract() {
            Ok(()) => {
                tracing::debug!("withdrew the decision to run the guest");
                Input::Recorded
            }
            Err(error) => {
                tracing::warn!(%error, "the record of the move still has the guest running at its destination");
                Input::NotRecorded
            }
        }
    }

    /// Notes that a guest that runs on was stopped for longer than its downtime limit.
    fn note_downtime(&mut self) {
        let limit = self.ends.context.options.tuning.downtime_limit();
        let limit = limit.unwrap_or(self.ends.context.options.downtime_limit).as_millis();
        let resumes = self.ends.switchover.state().request().after == SourceAction::Resume;
        if let Some(found) = self.downtime_ms.filter(|&found| resumes && u128::from(found) > limit) {
            self.notes.push(format!(
                "the guest was stopped for {found} ms, longer than its downtime limit of {limit} ms"
            ));
        }
    }

    fn end(mut self, outcome: SwitchoverOutcome) -> Result<SwitchoverReport, Failure> {
        // The destination of a postcopy waits for that.
        if let Some(peer) = self.destination_peer.take().filter(|_| self.ends.link.way.is_some()) {
            peer.close();
        }
        let message = match outcome {
            SwitchoverOutcome::Unresolved(unresolved) => {
                self.unresolved_state(unresolved).sentence(self.category())
            }
            SwitchoverOutcome::Completed(_) | SwitchoverOutcome::Safe => String::new(),
        };
        self.notes.extend(self.ends.switchover.ended(outcome, &message));
        let placement = match outcome {
            SwitchoverOutcome::Completed(placement) => placement,
            SwitchoverOutcome::Safe => return Err(self.failure(GuestAfterFailure::SAFE)),
            SwitchoverOutcome::Unresolved(unresolved) => {
                let guest = self.unresolved_state(unresolved);
                return Err(self.failure(guest));
            }
        };
        let exited = self.ends.switchover.state().has_source_exited();
        let source = match &mut self.ends.source {
            SourceControl::Qemu(source) => {
                source.state_after(self.ends.context.options, exited, self.ends.switchover.state().guest())
            }
            SourceControl::Stream(_) => SourceState::UpToSender,
            SourceControl::Stored => SourceState::Unchanged,
        };
        if source == SourceState::Paused && self.ends.switchover.state().guest() == GuestRunState::Suspended {
            self.notes.push(format!("the guest sleeps, and {ABORTS_ASLEEP}: run it at its destination only"));
        }
        if let Some(error) = self.not_attached.take() {
            self.ends.error = Some(error);
            let state = GuestState::new(source.into(), placement.into(), ToDo::AttachVsock);
            return Err(self.failure(GuestAfterFailure::unresolved(state)));
        }
        self.note_downtime();
        self.notes.iter().for_each(|note| self.ends.context.observer.notice(note));
        let destination = match placement {
            Placement::Running => DestinationState::Running,
            Placement::Paused => DestinationState::Paused,
            Placement::Loaded if self.ends.context.options.return_path => DestinationState::Loaded,
            Placement::Loaded => DestinationState::Sent,
            Placement::Stored => self.ends.destination.stored_state(),
        };
        let (downtime_ms, postcopy) = (self.downtime_ms, self.postcopy);
        Ok(SwitchoverReport { source, destination, downtime_ms, postcopy })
    }

    fn unresolved_state(&self, state: GuestState) -> GuestAfterFailure {
        match &self.ends.source {
            SourceControl::Qemu(source) => GuestAfterFailure::unresolved_at(state, source.qemu.socket()),
            SourceControl::Stored | SourceControl::Stream(_) => GuestAfterFailure::unresolved(state),
        }
    }

    fn category(&self) -> SourceCategory {
        match &self.ends.source {
            SourceControl::Stored => SourceCategory::Image,
            SourceControl::Qemu(_) | SourceControl::Stream(_) => SourceCategory::Qemu,
        }
    }

    /// The reason of a failure of which there is no error.
    fn reason(&mut self, guest: &GuestAfterFailure) -> Error {
        let qemu = self.ends.destination.qemu().filter(|_| guest.needs_attention());
        qemu.and_then(|to| to.qmp.check_running().err()).unwrap_or(Error::Cancelled)
    }

    fn failure(mut self, guest: GuestAfterFailure) -> Failure {
        let error = self.ends.switchover.not_recorded().or(self.ends.error.take());
        let error = error.unwrap_or_else(|| self.reason(&guest));
        let held = if guest.needs_attention() { HeldGuest::MayBeOnlyCopy } else { HeldGuest::Incomplete };
        // A guest that runs before its memory is there has been loaded.
        let is_early = (self.is_postcopy() || self.has_switched()) && guest.needs_attention();
        let undo = Rollback { is_cut_over: self.is_cut_over || is_early, held };
        let (error, notes) = self.ends.destination.roll_back(error, self.ends.context, undo);
        self.notes.extend(notes);
        if let (SourceControl::Qemu(source), true) = (&mut self.ends.source, guest.needs_attention()) {
            source.keep_settings();
        }
        Failure { error: Box::new(error), guest, notes: self.notes }
    }
}

#[cfg(test)]
mod tests;
