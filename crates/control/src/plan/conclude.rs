//! Carries out what the switchover directs, from the end of the stream to the end of the command.
//!
//! ```text
//!   the stream went through, or failed ─► Switchover ─► directive ─► QMP, the connection, the other towline ─┐
//!                                             ▲                                                              │
//!                                             └───────────── what came of it ◄───────────────────────────────┘
//! ```
//! Nothing is decided here: which end may run the guest is [`crate::switchover`]'s.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_migration::probe_link;
use towline_protocol::session::{FromDestination, FromSource, GuestPlacement, Run as RunWord};

use super::context::Run;
use super::destination::RunFailed;
use super::endpoint::{DestinationEndpoint, Origin, Undo};
use super::error::look_at;
use super::error::{Error, Failure};
use super::outcomes::{GuestState, Keeper, Place};
use super::peer::{Peer, Received};
use super::progress::Phase;
use super::report::{DestinationState, SourceState};
use super::source::QmpSource;
use super::switch::{Switch, link};
use crate::switchover::{
    Decision, DestinationView, Directive, Held, Input, Link, Outcome, PeerMessage, Placed, RunRequest,
    SourceView, Started,
};

/// How long a source whose stream was closed may take to see that, before its migration is cancelled.
const GIVE_UP_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a source may take to say what became of its migration.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a source that somebody else drives may take to close its connection once it is acknowledged.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a destination that has everything may take to load it.
const LOADED_TIMEOUT: Duration = Duration::from_secs(60);
/// How long another towline may take to report: longer than any of its own deadlines.
const PEER_TIMEOUT: Duration = Duration::from_secs(150);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Both ends and what is known by now.
pub(super) struct Conclusion<'a> {
    pub(super) switch: &'a Switch,
    pub(super) origin: Origin<'a>,
    pub(super) target: &'a mut dyn DestinationEndpoint,
    pub(super) run: &'a Run<'a>,
    /// What failed, if something did.
    pub(super) error: Option<Error>,
}

/// A guest that is at its destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Concluded {
    pub(super) source: SourceState,
    pub(super) destination: DestinationState,
    /// How long the guest stood still, as the source's QEMU has it, in milliseconds.
    pub(super) downtime_ms: Option<u64>,
}

/// What is waited for, and since when.
struct Wait {
    directive: Directive,
    since: Instant,
}

struct Conclude<'a> {
    ends: Conclusion<'a>,
    wait: Wait,
    notes: Vec<String>,
    downtime_ms: Option<u64>,
    /// Why what was taken out of the guest is not in it again.
    not_attached: Option<Error>,
    peer_below: Option<Peer>,
    peer_above: Option<Peer>,
    cancel_is_answered: bool,
    is_cut_over: bool,
}

/// Concludes; `first` is the machine's answer to the end of the stream.
pub(super) fn conclude(ends: Conclusion<'_>, first: Directive) -> Result<Concluded, Failure> {
    let peer_above = match &ends.origin {
        Origin::Stream(channel) => Some(Peer::new(Arc::clone(channel))),
        _ => None,
    };
    let peer_below = ends.target.channel().map(Peer::new);
    // A command that is being undone needs no word about a cancellation.
    let cancel_is_answered = ends.error.is_some();
    let wait = Wait { directive: first, since: Instant::now() };
    let (notes, downtime_ms) = (Vec::new(), None);
    Conclude {
        ends,
        wait,
        notes,
        downtime_ms,
        not_attached: None,
        peer_below,
        peer_above,
        cancel_is_answered,
        is_cut_over: false,
    }
    .run(first)
}

impl Conclude<'_> {
    fn run(mut self, first: Directive) -> Result<Concluded, Failure> {
        let mut directive = first;
        loop {
            if let Directive::End(outcome) = directive {
                return self.end(outcome);
            }
            if directive != self.wait.directive {
                self.wait = Wait { directive, since: Instant::now() };
            }
            let input = self.carry_out(directive);
            if input == Input::TimedOut {
                self.wait.since = Instant::now();
            }
            self.answer_cancel();
            directive = self.ends.switch.handle(input);
        }
    }

    fn answer_cancel(&mut self) {
        if !self.cancel_is_answered && self.ends.run.cancel.is_cancelled() {
            self.cancel_is_answered = true;
            if !self.ends.switch.cancel() {
                let text = "the guest is being handed over, so it is too late to cancel";
                self.ends.run.observer.notice(text);
            }
        }
    }

    fn waited(&self) -> Duration {
        self.wait.since.elapsed()
    }

    fn carry_out(&mut self, directive: Directive) -> Input {
        match directive {
            Directive::LookAtSource => self.look_at_source(),
            Directive::LookAtLink => self.probe_link(),
            Directive::LookAtDestination => self.look_at_destination(),
            Directive::AwaitPeer => self.await_peer(),
            Directive::RunDestination => self.run_destination(),
            Directive::Send(message) => self.send(message),
            Directive::SettleDestination => self.settle(),
            Directive::CancelSource => self.with_source(|source| source.cancel_own()),
            Directive::RestoreSource => self.restore(false),
            Directive::ResumeSource => self.restore(true),
            Directive::QuitSource => self.quit(),
            Directive::Record(decision) => self.record(decision),
            // What the engine is directed; it has acknowledged a source that is to be held.
            Directive::Hold
            | Directive::Proceed
            | Directive::Refuse
            | Directive::Abort
            | Directive::TooLate
            | Directive::End(_) => Input::Done,
        }
    }

    fn look_at_source(&mut self) -> Input {
        let limit = if self.ends.switch.state().cancels_next() { GIVE_UP_TIMEOUT } else { SOURCE_TIMEOUT };
        let live = self.ends.run.options.is_snapshot();
        let Origin::Qemu(source) = &mut self.ends.origin else { return Input::Failed };
        let view = source.view(live);
        let is_over = self.wait.since.elapsed() >= limit;
        if matches!(view, SourceView::Migrating | SourceView::Unknown) && is_over {
            let error = source.not_completed(limit);
            self.ends.error.get_or_insert(error);
            return Input::TimedOut;
        }
        if view == SourceView::Migrating {
            source.await_event(POLL_INTERVAL);
        }
        Input::Source(view)
    }

    fn probe_link(&mut self) -> Input {
        let Origin::Stream(channel) = &self.ends.origin else { return Input::Failed };
        let found = link(probe_link(channel.as_ref()));
        let peer = channel.peer().to_owned();
        match found {
            Link::Open if self.waited() >= LINK_TIMEOUT => {
                self.ends.error = Some(Error::SourceNotDone { peer, waited: LINK_TIMEOUT });
                return Input::TimedOut;
            }
            Link::Open => thread::sleep(POLL_INTERVAL.min(self.waited() / 4)),
            Link::Reset => {
                self.ends.error = Some(Error::SourceReset { peer });
            }
            Link::Closed => {}
        }
        Input::SourceLink(found)
    }

    fn look_at_destination(&mut self) -> Input {
        let view = self.ends.target.view();
        if matches!(view, DestinationView::Loading | DestinationView::Unknown) {
            if self.waited() >= LOADED_TIMEOUT {
                return Input::TimedOut;
            }
            thread::sleep(POLL_INTERVAL);
        }
        Input::Destination(view)
    }

    /// Waits for the other towline: the machine is not asked before something has happened.
    fn await_peer(&mut self) -> Input {
        loop {
            let found = match (&mut self.peer_above, &mut self.peer_below) {
                (Some(above), _) if self.ends.switch.state().awaits_outcome() => {
                    above.outcome().map(peer_outcome)
                }
                (_, Some(below)) => below.settled().map(peer_settled),
                _ => return Input::PeerLost,
            };
            match found {
                Received::Frame(message) => return Input::Peer(message),
                Received::Nothing if self.waited() >= PEER_TIMEOUT => {
                    self.ends.error.get_or_insert(Error::PeerSilent { waited: PEER_TIMEOUT });
                    return Input::TimedOut;
                }
                Received::Nothing => self.answer_cancel(),
                Received::Lost(error) => {
                    self.ends.error.get_or_insert(error);
                    return Input::PeerLost;
                }
            }
        }
    }

    fn send(&mut self, message: PeerMessage) -> Input {
        let sent = match (message, &self.peer_above, &self.peer_below) {
            (PeerMessage::Completed(run), _, Some(below)) => {
                below.send_outcome(FromSource::Completed(run_word(run)))
            }
            (PeerMessage::Aborted, _, Some(below)) => below.send_outcome(FromSource::Aborted),
            (PeerMessage::Settled(placed), Some(above), _) => {
                above.send_settled(&FromDestination::Settled(settled_word(placed)))
            }
            (PeerMessage::NotRun, Some(above), _) => {
                let reason = self.ends.error.as_ref().map(Error::to_string).unwrap_or_default();
                // The source's operator may run it there as soon as this arrives.
                self.ends.switch.retract().and_then(|()| above.send_settled(&FromDestination::NotRun(reason)))
            }
            _ => Ok(()),
        };
        match sent {
            Ok(()) => Input::Done,
            Err(error) => {
                self.ends.error.get_or_insert(error);
                Input::NotDone
            }
        }
    }

    fn run_destination(&mut self) -> Input {
        self.cut_over();
        let started = match self.ends.target.run_guest() {
            Ok(started) => started,
            Err(RunFailed { started, error }) => {
                self.ends.error = Some(*error);
                started
            }
        };
        if started == Started::Live {
            self.ends.run.observer.phase(Phase::Running);
        }
        Input::Started(started)
    }

    /// The source is done with the guest, which is the destination's.
    fn cut_over(&mut self) {
        if !std::mem::replace(&mut self.is_cut_over, true) {
            self.ends.run.observer.phase(Phase::CutOver);
        }
    }

    fn settle(&mut self) -> Input {
        if !matches!(self.ends.origin, Origin::Stored) {
            self.cut_over();
        }
        match self.ends.target.settle(self.ends.run) {
            Ok(notes) => {
                notes.iter().for_each(|note| self.ends.run.observer.notice(note));
                if let Origin::Qemu(source) = &self.ends.origin {
                    self.not_attached = self.ends.target.attach(&source.vsocks).err();
                }
                Input::Done
            }
            Err(error) => {
                self.ends.error = Some(error);
                match self.ends.target.view() {
                    DestinationView::Exited => Input::Destination(DestinationView::Exited),
                    _ => Input::NotDone,
                }
            }
        }
    }

    fn with_source(&mut self, act: impl FnOnce(&mut QmpSource) -> Result<(), Error>) -> Input {
        let Origin::Qemu(source) = &mut self.ends.origin else { return Input::Done };
        match act(source) {
            Ok(()) => Input::Done,
            Err(error) => {
                tracing::debug!(%error, "the source");
                Input::NotDone
            }
        }
    }

    fn restore(&mut self, resume: bool) -> Input {
        let undoes = self.ends.error.is_some();
        let Origin::Qemu(source) = &mut self.ends.origin else { return Input::Done };
        match source.restore(resume, undoes) {
            Ok(released) => {
                self.downtime_ms = released.downtime_ms.or(self.downtime_ms);
                self.notes.extend(released.notes);
                Input::Done
            }
            Err(error) => {
                let exited = source.has_ended();
                self.ends.error.get_or_insert(error);
                if exited { Input::Source(SourceView::Exited) } else { Input::NotDone }
            }
        }
    }

    fn quit(&mut self) -> Input {
        let Origin::Qemu(source) = &mut self.ends.origin else { return Input::Done };
        match source.end() {
            Ok(downtime_ms) => {
                self.downtime_ms = downtime_ms.or(self.downtime_ms);
                Input::Done
            }
            Err(error) => {
                self.ends.error = Some(error);
                Input::NotDone
            }
        }
    }

    fn record(&mut self, decision: Decision) -> Input {
        match self.ends.switch.record(decision) {
            Ok(()) => Input::Recorded,
            Err(error) => {
                self.ends.error.get_or_insert(error);
                Input::NotRecorded
            }
        }
    }

    fn end(mut self, outcome: Outcome) -> Result<Concluded, Failure> {
        let said = match outcome {
            Outcome::Look(held) => self.look_at(held).text(Keeper::Qemu).into_owned(),
            Outcome::Done(_) | Outcome::Safe => String::new(),
        };
        self.notes.extend(self.ends.switch.ended(outcome, &said));
        let placed = match outcome {
            Outcome::Done(placed) => placed,
            Outcome::Safe => return Err(self.failure(GuestState::Safe)),
            Outcome::Look(held) => {
                let guest = self.look_at(held);
                return Err(self.failure(guest));
            }
        };
        let exited = self.ends.switch.state().has_source_exited();
        let source = match &self.ends.origin {
            Origin::Qemu(source) => {
                source.state_after(self.ends.run.options, exited, self.ends.switch.state().guest())
            }
            Origin::Stream(_) | Origin::Stored => SourceState::Unchanged,
        };
        if let Some(error) = self.not_attached.take() {
            self.ends.error = Some(error);
            return Err(self.failure(GuestState::look_at(Place::WithoutVsock)));
        }
        self.notes.iter().for_each(|note| self.ends.run.observer.notice(note));
        let destination = match placed {
            Placed::Running => DestinationState::Running,
            Placed::Paused => DestinationState::Paused,
            Placed::Loaded => DestinationState::Loaded,
            Placed::Stored => self.ends.target.stored_state(),
        };
        Ok(Concluded { source, destination, downtime_ms: self.downtime_ms })
    }

    fn look_at(&self, held: Held) -> GuestState {
        match &self.ends.origin {
            Origin::Stored => GuestState::look_at(Place::HeldOfImage(held)),
            Origin::Qemu(source) => GuestState::look_at_source(held, source.socket()),
            Origin::Stream(_) => GuestState::look_at(Place::Held(held)),
        }
    }

    fn failure(mut self, guest: GuestState) -> Failure {
        let error = self.ends.switch.not_recorded().or(self.ends.error.take()).unwrap_or(Error::Cancelled);
        let holds = matches!(guest, GuestState::LookAt(_));
        let (error, notes) =
            self.ends.target.undo(error, self.ends.run, Undo { is_cut_over: self.is_cut_over, holds });
        self.notes.extend(notes);
        if let (Origin::Qemu(source), GuestState::LookAt(_)) = (&mut self.ends.origin, &guest) {
            source.forget();
        }
        Failure { error: Box::new(error), guest, notes: self.notes }
    }
}

/// The guest runs elsewhere: the source is put in order, or ended. Returns what is left there, and how long the guest stood still,
/// in milliseconds.
pub(super) fn release_source(
    source: &mut QmpSource,
    run: &Run<'_>,
) -> Result<(SourceState, Option<u64>), Failure> {
    if run.options.ends_source() {
        let ended = source.end().map_err(|error| look_at(error, Place::Held(Held::SourceNotEnded)))?;
        return Ok((SourceState::Ended, ended));
    }
    let released =
        source.restore(false, false).map_err(|error| look_at(error, Place::Held(Held::SourceUnknown)))?;
    released.notes.iter().for_each(|note| run.observer.notice(note));
    Ok((SourceState::Paused, released.downtime_ms))
}

impl<T> Received<T> {
    fn map<U>(self, to: impl FnOnce(T) -> U) -> Received<U> {
        match self {
            Self::Frame(frame) => Received::Frame(to(frame)),
            Self::Nothing => Received::Nothing,
            Self::Lost(error) => Received::Lost(error),
        }
    }
}

fn peer_outcome(frame: FromSource) -> PeerMessage {
    match frame {
        FromSource::Completed(RunWord::AsItWas) => PeerMessage::Completed(RunRequest::AsItWas),
        FromSource::Completed(RunWord::Run) => PeerMessage::Completed(RunRequest::Run),
        FromSource::Completed(RunWord::Pause) => PeerMessage::Completed(RunRequest::Pause),
        // A second greeting says nothing of the outcome, and no towline sends it.
        FromSource::Aborted | FromSource::Hello(_) => PeerMessage::Aborted,
    }
}

fn peer_settled(frame: FromDestination) -> PeerMessage {
    match frame {
        FromDestination::Settled(settled) => PeerMessage::Settled(match settled {
            GuestPlacement::Running => Placed::Running,
            GuestPlacement::Paused => Placed::Paused,
            GuestPlacement::Loaded => Placed::Loaded,
            GuestPlacement::Stored => Placed::Stored,
        }),
        FromDestination::NotRun(reason) => {
            tracing::warn!(reason, "the destination's towline could not run the guest");
            PeerMessage::NotRun
        }
    }
}

fn run_word(run: RunRequest) -> RunWord {
    match run {
        RunRequest::AsItWas => RunWord::AsItWas,
        RunRequest::Run => RunWord::Run,
        RunRequest::Pause => RunWord::Pause,
    }
}

fn settled_word(placed: Placed) -> GuestPlacement {
    match placed {
        Placed::Running => GuestPlacement::Running,
        Placed::Paused => GuestPlacement::Paused,
        Placed::Loaded => GuestPlacement::Loaded,
        Placed::Stored => GuestPlacement::Stored,
    }
}
