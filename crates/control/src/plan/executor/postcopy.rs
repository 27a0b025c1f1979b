//! Directives of a postcopy between two QEMUs.

use std::thread;
use std::time::{Duration, Instant};

use towline_protocol::session::FromDestination;

use super::super::destination::{RECOVER_INTERVAL, RecoveryState};
use super::super::endpoint::SourceControl;
use super::super::error::Error;
use super::super::error_origin;
use super::super::peer::{PeerSession, received};
use super::super::progress::{CopyPhase, PostcopyReport};
use super::super::way::{NotReconnected, Way};
use super::Executor;
use crate::switchover::{
    DestinationStatus, Input, MemorySharing, PeerMessage, Placement, SourceStatus, StartResult,
};

/// Time in which a destination that has all memory reports it after its QEMU has closed the connection.
const LAST_REPORT_TIME: Duration = Duration::from_secs(2);
/// Time for which a destination on this host may take to listen again, in one attempt.
const LISTEN_TIME: Duration = Duration::from_secs(2);
/// Connections that last less are brief.
const BRIEF: Duration = Duration::from_secs(5);
/// Brief connections in a row after which there is no further one.
const BRIEF_CONNECTIONS_MAX: u32 = 16;

impl Executor<'_> {
    pub(super) fn is_postcopy(&self) -> bool {
        self.switchover.state().request().memory == MemorySharing::Postcopy
    }

    /// Returns true if the source was switched, and the other end is another host's.
    pub(super) fn has_switched(&self) -> bool {
        self.switchover.state().has_switched()
    }

    /// Queries a source that sends the rest of its memory to another host. Returns what ends that early.
    pub(super) fn watch_following_source(&mut self) -> Option<Input> {
        let has_switched = self.has_switched();
        let SourceControl::Qemu(source) = &mut self.source else { return None };
        let status = if has_switched { source.follow(self.context.options).ok()? } else { return None };
        self.context.observer.progress(&source.progress);
        if status == SourceStatus::Completed {
            self.downtime_ms = source.reported_downtime();
        }
        if matches!(status, SourceStatus::Completed | SourceStatus::Following | SourceStatus::Unknown) {
            self.stuck_since = None;
            return None;
        }
        if status == SourceStatus::FollowingPaused && self.is_all_there {
            return None;
        }
        // A destination that has everything has reported that, or does so now.
        let since = *self.stuck_since.get_or_insert_with(Instant::now);
        if since.elapsed() < LAST_REPORT_TIME {
            return None;
        }
        let error = source.not_completed(self.since.elapsed());
        Some(self.fail(error, Input::Source(status)))
    }

    /// Returns the input for a destination whose source has switched if the towline of that is lost, which forwards memory.
    pub(super) fn watch_forwarding_peer(&mut self) -> Option<Input> {
        if !self.has_switched() {
            return None;
        }
        let peer = self.source_peer.as_mut()?;
        let error = match received(peer, self.context, PeerSession::receive_outcome) {
            Ok(None) => return None,
            // Once more, of a source that is connected again.
            Ok(Some(PeerMessage::Completed(_))) => {
                peer.beat_until_report();
                return None;
            }
            Ok(Some(message)) => peer.unexpected(&message),
            Err(error) => error,
        };
        Some(self.fail(error, Input::PeerLost))
    }

    /// Returns the input for a destination that was queried and lacks memory: its source sends that, however long it takes, unless the
    /// QEMUs have lost each other, which its source sees, too.
    pub(super) fn watch_memory(&mut self, status: DestinationStatus) -> Option<Input> {
        let is_open = matches!(status, DestinationStatus::LacksMemory(_) | DestinationStatus::Unknown);
        if !self.has_switched() || !is_open || self.source_peer.is_none() {
            return None;
        }
        let is_interrupted = self.destination.qemu().is_some_and(|to| to.qmp.is_interrupted);
        let since = *self.stuck_since.get_or_insert_with(Instant::now);
        self.stuck_since = Some(since).filter(|_| is_interrupted);
        if is_interrupted && since.elapsed() >= LAST_REPORT_TIME {
            return Some(self.fail(Error::ConnectionOfQemus, Input::PeerLost));
        }
        Some(Input::Destination(status))
    }

    /// Statistics of a postcopy from a QEMU.
    pub(super) fn report_of_postcopy(&self) -> Option<PostcopyReport> {
        let SourceControl::Qemu(source) = &self.source else { return None };
        let mut report = self.postcopy;
        report.faults.requests = source.requested_pages();
        (self.is_postcopy() || self.has_switched()).then_some(report)
    }

    pub(super) fn set_running(&mut self) {
        if self.postcopy.running_after.is_none() {
            self.postcopy.running_after = Some(self.context.elapsed());
            self.context.observer.phase(CopyPhase::Running);
        }
    }

    pub(super) fn start_postcopy(&mut self) -> Input {
        let SourceControl::Qemu(source) = &mut self.source else { return Input::NotDone };
        self.context.observer.phase(CopyPhase::Switchover);
        match source.switch_to_postcopy() {
            Ok(()) => Input::Done,
            Err(error) if error_origin::is_refusal(&error) => self.fail(error, Input::NotDone),
            Err(error) => {
                tracing::debug!(%error, "it is not known whether the source switches to postcopy");
                Input::TimedOut
            }
        }
    }

    pub(super) fn follow_source(&mut self) -> Input {
        let SourceControl::Qemu(source) = &mut self.source else { return Input::TimedOut };
        let status = match source.follow(self.context.options) {
            Ok(status) => status,
            Err(error) => return self.fail(error, Input::TimedOut),
        };
        self.context.observer.progress(&source.progress);
        match status {
            SourceStatus::Completed => {
                self.downtime_ms = source.reported_downtime();
                self.context.observer.phase(CopyPhase::Release);
            }
            SourceStatus::HasGuest => {
                self.error.get_or_insert(source.failure());
            }
            SourceStatus::Exited => {
                let socket = source.qemu.socket().to_owned();
                self.error.get_or_insert(Error::SourceEnded { socket });
            }
            _ => {}
        }
        Input::Source(status)
    }

    /// Starts the guest as soon as the destination has its devices.
    pub(super) fn run_early(&mut self) -> Input {
        self.cut_over();
        let started = self.destination.qemu().map_or(Ok(StartResult::NotSent), |to| to.qmp.start_if_loaded());
        let started = started.unwrap_or_else(|error| {
            tracing::debug!(%error, "the destination does not run the guest yet");
            StartResult::Unknown
        });
        if started == StartResult::Live {
            self.set_running();
        }
        Input::Started(started)
    }

    /// Has the destination listen again, and the source connect to it.
    pub(super) fn recover(&mut self) -> Input {
        match self.way {
            Some(Way::Departure(_)) => {
                return self.reconnect("lost the other host before it had all of the guest's memory");
            }
            Some(Way::Arrival(_)) => {
                return self.reconnect("lost the guest's source, which has a part of its memory");
            }
            None => {}
        }
        let (begun, cancel) = (Instant::now(), self.context.cancel);
        let was_cancelled = cancel.is_cancelled();
        let (SourceControl::Qemu(source), Some(to)) = (&mut self.source, self.destination.qemu()) else {
            return Input::NotDone;
        };
        self.postcopy.recoveries += 1;
        loop {
            match to.qmp.listen_again(LISTEN_TIME) {
                RecoveryState::Ended { status, error } => {
                    self.error = self.error.take().or(error);
                    return Input::Destination(status);
                }
                RecoveryState::Listening(address) => match source.resume_to(&address) {
                    Ok(()) => {
                        self.context.observer.notice("the QEMUs lost their connection; connected again");
                        return Input::Done;
                    }
                    // It is queried next.
                    Err(error) if error_origin::is_monitor_lost(&error) => return Input::Done,
                    Err(error) => tracing::debug!(%error, "the source does not resume yet"),
                },
                RecoveryState::NotReady => {}
            }
            if cancel.is_cancelled() && !was_cancelled {
                self.cancel_handled = true;
                return self.fail(Error::Cancelled, Input::NotDone);
            }
            if begun.elapsed() >= self.context.options.recover_timeout {
                return self.fail(Error::NotConnectedAgain { waited: begun.elapsed() }, Input::NotDone);
            }
            thread::sleep(RECOVER_INTERVAL);
        }
    }

    /// Waits until the source of a postcopy has this report, which was sent, and has ended the session; it is sent once more if that is
    /// lost before. Returns true if the source has it.
    pub(super) fn confirm_placed(&mut self, placement: Placement) -> bool {
        if !self.has_switched() || !matches!(self.way, Some(Way::Arrival(_))) {
            return false;
        }
        while let Some(peer) = &mut self.source_peer {
            match received(peer, self.context, PeerSession::receive_outcome) {
                Ok(_) => continue,
                Err(_) if peer.is_ended => return true,
                Err(_) => {}
            }
            let loss = "the guest is here, and its source has not confirmed that it knows";
            if self.reconnect(loss) != Input::Done {
                self.error = None;
                return false;
            }
            let report = FromDestination::Placed(placement);
            let sent = self.source_peer.as_mut().map(|peer| peer.send_report(&report));
            if let Some(Err(error)) = sent {
                tracing::debug!(%error, "the report is sent once more");
            }
        }
        false
    }

    /// Connects the two hosts again, unless that lasts for a moment only, again and again.
    fn reconnect(&mut self, loss: &str) -> Input {
        let is_brief = self.reconnected_at.is_some_and(|at| at.elapsed() < BRIEF);
        self.brief_connections = if is_brief { self.brief_connections + 1 } else { 0 };
        if self.brief_connections >= BRIEF_CONNECTIONS_MAX {
            return Input::NotDone;
        }
        for peer in [self.source_peer.take(), self.destination_peer.take()].into_iter().flatten() {
            peer.close();
        }
        self.stuck_since = None;
        let (context, id) = (self.context, self.switchover.id());
        let reason = self.error.take().map(|error| format!(" ({error})")).unwrap_or_default();
        let within = context.options.recover_timeout.as_secs_f64();
        let begun = Instant::now();
        context.observer.notice(&format!("{loss}{reason}; it is connected to again within {within:.0} s"));
        let (connected, peer) = match (&mut self.way, &mut self.source, self.destination.qemu()) {
            (Some(Way::Departure(way)), SourceControl::Qemu(source), _) => {
                (way.reconnect(source, id, context), &mut self.destination_peer)
            }
            (Some(Way::Arrival(way)), _, Some(to)) => {
                (way.reconnect(&mut to.qmp, id, context), &mut self.source_peer)
            }
            _ => return Input::NotDone,
        };
        match connected {
            Ok(again) => {
                *peer = Some(again.peer);
                self.is_all_there |= again.has_everything;
                self.reconnected_at = Some(Instant::now());
                self.postcopy.recoveries += 1;
                let after = begun.elapsed().as_secs_f64();
                context.observer.notice(&format!("connected again after {after:.1} s"));
                Input::Done
            }
            Err(NotReconnected { error, input }) => {
                self.cancel_handled |= matches!(*error, Error::Cancelled);
                self.fail(*error, input)
            }
        }
    }
}
