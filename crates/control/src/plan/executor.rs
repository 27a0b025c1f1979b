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

use towline_protocol::session::{FromDestination, FromSource};

use super::context::Context;
use super::destination::HeldGuest;
use super::endpoint::{DestinationEndpoint, Rollback, SourceControl};
use super::error::{ABORTS_ASLEEP, Error, Failure};
use super::outcomes::{GuestAfterFailure, SourceCategory};
use super::peer::{PeerSession, received};
use super::progress::{CopyReport, DestinationState, PostcopyReport, SourceState};
use super::shared_switchover::SharedSwitchover;
use super::source::GuestAction;
use super::way::Way;
use crate::switchover::{
    Decision, DestinationKind, Directive, GuestRunState, GuestState, Input, MemorySharing, PeerMessage,
    Placement, SourceAction, SourceKind, SwitchoverOutcome, ToDo,
};

/// Timeout for the message of another towline that still sends heartbeats: longer than every timeout there.
const PEER_REPORT_TIMEOUT: Duration = Duration::from_secs(150);

/// Both ends of a command, which are brought to its end.
pub(super) struct Executor<'a> {
    switchover: &'a SharedSwitchover,
    source: SourceControl<'a>,
    destination: &'a mut dyn DestinationEndpoint,
    context: &'a Context<'a>,
    /// The first error, if one occurred.
    pub(super) error: Option<Error>,
    /// Sessions with the towlines at the other ends.
    pub(super) source_peer: Option<PeerSession>,
    pub(super) destination_peer: Option<PeerSession>,
    /// The way between two hosts, if it can be made again.
    pub(super) way: Option<Way<'a>>,
    /// The current directive has been repeated since then.
    since: Instant,
    notes: Vec<String>,
    downtime_ms: Option<u64>,
    postcopy: PostcopyReport,
    /// Error because of which the vsocks could not be attached.
    not_attached: Option<Error>,
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

impl<'a> Executor<'a> {
    /// For these ends, between which the stream is complete, or has failed.
    pub(super) fn new(
        switchover: &'a SharedSwitchover,
        source: SourceControl<'a>,
        destination: &'a mut dyn DestinationEndpoint,
        context: &'a Context<'a>,
    ) -> Self {
        let source_peer = match &source {
            SourceControl::Stream(channel) => Some(PeerSession::new(Arc::clone(channel))),
            _ => None,
        };
        let destination_peer = destination.channel().map(PeerSession::new);
        Self {
            switchover,
            source,
            destination,
            context,
            error: None,
            source_peer,
            destination_peer,
            way: None,
            since: Instant::now(),
            notes: Vec::new(),
            downtime_ms: None,
            postcopy: PostcopyReport::default(),
            not_attached: None,
            cancel_handled: false,
            is_cut_over: false,
            stuck_since: None,
            is_all_there: false,
            reconnected_at: None,
            brief_connections: 0,
        }
    }

    /// Carries out the directive that followed the stream, or its failure, and all others until the end of the command. The report
    /// lacks counters of the transfer.
    pub(super) fn conclude(mut self, ended: Result<Directive, Error>) -> Result<CopyReport, Failure> {
        let first = ended.unwrap_or_else(|error| {
            let directive = self.switchover.failed(&error);
            self.error = Some(error);
            directive
        });
        self.run(first)
    }

    /// Carries out directives from `first` until the end of the command; the report as that of [`Self::conclude`].
    pub(super) fn run(mut self, first: Directive) -> Result<CopyReport, Failure> {
        // A cancellation that came before a QEMU was changed does not end these queries: they tell where the guest is.
        if let SourceControl::Qemu(source) = &mut self.source {
            source.qemu.wait_for_replies();
        }
        if let Some(to) = self.destination.qemu() {
            to.qmp.qemu.wait_for_replies();
        }
        // A command that has failed does not report that it is too late to cancel. An image's memory was sent before.
        let request = self.switchover.state().request();
        let is_served = request.memory == MemorySharing::Postcopy && request.source == SourceKind::Stored;
        self.cancel_handled = self.error.is_some() || is_served;
        self.beat_until_outcome();
        let (mut directive, mut last) = (first, first);
        self.since = Instant::now();
        loop {
            if let Directive::End(outcome) = directive {
                return self.end(outcome);
            }
            if directive != last {
                (last, self.since) = (directive, Instant::now());
            }
            let input = self.carry_out(directive);
            if input == Input::TimedOut {
                self.since = Instant::now();
            }
            self.handle_cancel();
            directive = self.switchover.handle(input);
        }
    }

    /// Sends heartbeats to a towline at the destination, which holds the guest until it has the outcome, or to one at a source whose
    /// QEMU completes by itself.
    fn beat_until_outcome(&mut self) {
        if self.error.is_none()
            && self.switchover.state().request().destination == DestinationKind::Towline
            && let Some(peer) = &mut self.destination_peer
        {
            peer.beat_until_outcome();
        }
        // The source may be cancelled if this end is silent.
        if self.switchover.state().are_qemus_connected()
            && let Some(peer) = &mut self.source_peer
        {
            peer.beat_until_report();
        }
    }

    fn handle_cancel(&mut self) {
        if !self.cancel_handled && self.context.cancel.is_cancelled() {
            self.cancel_handled = true;
            self.switchover.cancel_late(self.context.observer);
        }
    }

    /// Keeps an error as the reason, unless there is one already; the switchover goes on with `input`.
    fn fail(&mut self, error: Error, input: Input) -> Input {
        self.error.get_or_insert(error);
        input
    }

    fn waited(&self) -> Duration {
        self.since.elapsed()
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
            Directive::CancelMigration => self.cancel_migration(),
            Directive::RestoreSource => self.restore(GuestAction::Leave),
            Directive::ResumeSource => match self.end_in_shared_memory() {
                Ok(()) => self.restore(GuestAction::Resume),
                Err(error) => self.fail(error, Input::NotDone),
            },
            Directive::ResumeSourceFirst => self.restore(GuestAction::Resume),
            Directive::QuitSource => self.quit(),
            Directive::Record(decision) => self.record(decision),
            Directive::Retract => self.retract(),
            Directive::LookAtDestination => Input::Destination(self.destination.query_status()),
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
        loop {
            let stuck = self.watch_following_source();
            let awaits_outcome = self.switchover.state().awaits_source_outcome();
            let reply = match (&mut self.source_peer, &mut self.destination_peer) {
                (Some(peer), _) if awaits_outcome => {
                    received(peer, self.context, PeerSession::receive_outcome)
                }
                (_, Some(peer)) => {
                    let report = received(peer, self.context, PeerSession::receive_report);
                    let reason = peer.not_run.take().map(|reason| Error::PeerDidNotRun { reason });
                    self.error = self.error.take().or(reason);
                    report
                }
                _ => return Input::PeerLost,
            };
            match reply {
                Ok(Some(message)) => {
                    // From here on the source waits for the report.
                    if let Some(peer) = self.source_peer.as_mut().filter(|_| awaits_outcome) {
                        peer.beat_until_report();
                    }
                    return Input::Peer(message);
                }
                Ok(None) if self.waited() >= PEER_REPORT_TIMEOUT && !self.has_switched() => {
                    return self.fail(Error::PeerSilent { waited: self.waited() }, Input::TimedOut);
                }
                Ok(None) => match stuck {
                    Some(input) => return input,
                    None => self.handle_cancel(),
                },
                Err(error @ Error::PeerSilent { .. }) => return self.fail(error, Input::TimedOut),
                Err(error) => return self.fail(error, Input::PeerLost),
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
                let reason = self.error.as_ref().map(Error::to_string).unwrap_or_default();
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
        match self.switchover.record(decision) {
            Ok(()) => Input::Recorded,
            Err(error) => self.fail(error, Input::NotRecorded),
        }
    }

    fn retract(&mut self) -> Input {
        match self.switchover.retract() {
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
        let limit = self.context.options.tuning.downtime_limit();
        let limit = limit.unwrap_or(self.context.options.downtime_limit).as_millis();
        let resumes = self.switchover.state().request().after == SourceAction::Resume;
        if let Some(found) = self.downtime_ms.filter(|&found| resumes && u128::from(found) > limit) {
            self.notes.push(format!(
                "the guest was stopped for {found} ms, longer than its downtime limit of {limit} ms"
            ));
        }
    }

    fn end(mut self, outcome: SwitchoverOutcome) -> Result<CopyReport, Failure> {
        // The destination of a postcopy waits for that.
        if let Some(peer) = self.destination_peer.take().filter(|_| self.way.is_some()) {
            peer.close();
        }
        let (guest, message) = match outcome {
            SwitchoverOutcome::Unresolved(unresolved) => {
                let guest = self.unresolved_state(unresolved);
                let message = guest.sentence(self.category());
                (guest, message)
            }
            SwitchoverOutcome::Completed(_) | SwitchoverOutcome::Safe => {
                (GuestAfterFailure::SAFE, String::new())
            }
        };
        self.notes.extend(self.switchover.ended(outcome, &message));
        let SwitchoverOutcome::Completed(placement) = outcome else { return Err(self.failure(guest)) };
        let exited = self.switchover.state().has_source_exited();
        let source = match &mut self.source {
            SourceControl::Qemu(source) => {
                source.state_after(self.context.options, exited, self.switchover.state().guest())
            }
            SourceControl::Stream(_) => SourceState::UpToSender,
            SourceControl::Stored => SourceState::Unchanged,
        };
        if source == SourceState::Paused && self.switchover.state().guest() == GuestRunState::Suspended {
            self.notes.push(format!("the guest sleeps, and {ABORTS_ASLEEP}: run it at its destination only"));
        }
        if let Some(error) = self.not_attached.take() {
            self.error = Some(error);
            let state = GuestState::new(source.into(), placement.into(), ToDo::AttachVsock);
            return Err(self.failure(GuestAfterFailure::unresolved(state)));
        }
        self.note_downtime();
        self.notes.iter().for_each(|note| self.context.observer.notice(note));
        let destination = match placement {
            Placement::Running => DestinationState::Running,
            Placement::Paused => DestinationState::Paused,
            Placement::Loaded if self.context.options.return_path => DestinationState::Loaded,
            Placement::Loaded => DestinationState::Sent,
            Placement::Stored => self.destination.stored_state(),
        };
        let postcopy = self.report_of_postcopy();
        let report = self.context.build_report(source, destination);
        Ok(CopyReport { downtime_ms: self.downtime_ms, postcopy, ..report })
    }

    fn unresolved_state(&self, state: GuestState) -> GuestAfterFailure {
        match &self.source {
            SourceControl::Qemu(source) => GuestAfterFailure::unresolved_at(state, source.qemu.socket()),
            SourceControl::Stored | SourceControl::Stream(_) => GuestAfterFailure::unresolved(state),
        }
    }

    fn category(&self) -> SourceCategory {
        match &self.source {
            SourceControl::Stored => SourceCategory::Image,
            SourceControl::Qemu(_) | SourceControl::Stream(_) => SourceCategory::Qemu,
        }
    }

    /// The reason of a failure of which there is no error.
    fn reason(&mut self, guest: &GuestAfterFailure) -> Error {
        let qemu = self.destination.qemu().filter(|_| guest.needs_attention());
        qemu.and_then(|to| to.qmp.check_running().err()).unwrap_or(Error::Cancelled)
    }

    fn failure(mut self, guest: GuestAfterFailure) -> Failure {
        let error = self.switchover.not_recorded().or(self.error.take());
        let error = error.unwrap_or_else(|| self.reason(&guest));
        let held = if guest.needs_attention() { HeldGuest::MayBeOnlyCopy } else { HeldGuest::Incomplete };
        // A guest that runs before its memory is there has been loaded.
        let is_early = (self.is_postcopy() || self.has_switched()) && guest.needs_attention();
        let undo = Rollback { is_cut_over: self.is_cut_over || is_early, held };
        let (error, notes) = self.destination.roll_back(error, self.context, undo);
        self.notes.extend(notes);
        if let (SourceControl::Qemu(source), true) = (&mut self.source, guest.needs_attention()) {
            source.keep_settings();
        }
        Failure { error: Box::new(error), guest, notes: self.notes }
    }
}

#[cfg(test)]
mod tests;
