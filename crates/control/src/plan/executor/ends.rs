//! Directives that ask or change a QEMU.

use std::thread;
use std::time::Duration;

use towline_migration::probe_link;

use super::super::destination::{LOADED_TIMEOUT, StartFailure};
use super::super::endpoint::SourceControl;
use super::super::error::Error;
use super::super::peer::{PeerSession, received};
use super::super::progress::CopyPhase;
use super::super::source::{CopyEnd, GuestAction};
use super::Executor;
use crate::switchover::{
    DestinationStatus, GuestRunState, Input, MemorySharing, SourceLink, SourceStatus, StartResult,
};

/// Timeout for a source to notice its closed stream, before its migration is cancelled.
const STREAM_FAILURE_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout for a source to complete or fail its migration; one that another party drives closes its connection then.
const SOURCE_COMPLETION_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

impl Executor<'_> {
    pub(super) fn query_source(&mut self) -> Input {
        let limit = if self.switchover.state().cancels_next() {
            STREAM_FAILURE_TIMEOUT
        } else {
            SOURCE_COMPLETION_TIMEOUT
        };
        let SourceControl::Qemu(source) = &mut self.source else { return Input::Failed };
        let view = source.query_status(self.context.options);
        let is_over = self.since.elapsed() >= limit;
        if matches!(view, SourceStatus::Migrating | SourceStatus::Unknown) && is_over {
            let error = source.not_completed(limit);
            return self.fail(error, Input::TimedOut);
        }
        if view == SourceStatus::Migrating {
            source.await_event(POLL_INTERVAL);
        }
        // A QEMU that waits for the other one may not reply.
        if matches!(view, SourceStatus::Migrating | SourceStatus::Unknown)
            && let Some(error) = self.lost_peer()
        {
            return self.fail(error, Input::TimedOut);
        }
        Input::Source(view)
    }

    /// The reason for which the towline of the other host does not drive the QEMU there any more, to which this one sends.
    fn lost_peer(&mut self) -> Option<Error> {
        let state = self.switchover.state();
        if !state.are_qemus_connected() || !state.awaits_source_outcome() {
            return None;
        }
        received(self.destination_peer.as_mut()?, self.context, PeerSession::glance_at_destination).err()
    }

    pub(super) fn probe_link(&mut self) -> Input {
        let SourceControl::Stream(channel) = &self.source else { return Input::Failed };
        let found = probe_link(channel.as_ref());
        let peer = channel.peer().to_owned();
        match found {
            SourceLink::Open if self.waited() >= SOURCE_COMPLETION_TIMEOUT => {
                self.error = Some(Error::SourceNotDone { peer, waited: SOURCE_COMPLETION_TIMEOUT });
                return Input::TimedOut;
            }
            SourceLink::Open => thread::sleep(POLL_INTERVAL.min(self.waited() / 4)),
            SourceLink::Reset => {
                self.error = Some(Error::SourceReset { peer });
            }
            SourceLink::Closed => {}
        }
        Input::SourceLink(found)
    }

    pub(super) fn query_destination(&mut self) -> Input {
        // First: a QEMU whose main loop waits for a page takes its time to not reply.
        if let Some(input) = self.watch_forwarding_peer() {
            return input;
        }
        let view = self.destination.query_status();
        if let Some(input) = self.watch_memory(view) {
            return input;
        }
        match view {
            DestinationStatus::Loading | DestinationStatus::Unknown | DestinationStatus::LacksMemory(_)
                if self.waited() >= LOADED_TIMEOUT =>
            {
                if let Some(to) = self.destination.qemu() {
                    self.error.get_or_insert(to.qmp.not_completed(LOADED_TIMEOUT));
                }
                return Input::TimedOut;
            }
            DestinationStatus::Unknown
                if self.is_postcopy() && self.destination.qemu().is_some_and(|to| to.qmp.is_blocked()) =>
            {
                return Input::Destination(DestinationStatus::Blocked);
            }
            DestinationStatus::Loading | DestinationStatus::Unknown | DestinationStatus::LacksMemory(_) => {
                thread::sleep(POLL_INTERVAL);
            }
            _ => {}
        }
        Input::Destination(view)
    }

    pub(super) fn start_destination(&mut self) -> Input {
        if let Err(error) = self.check_unchanged() {
            self.error = Some(error);
            return Input::Started(StartResult::NotSent);
        }
        self.cut_over();
        let started = match self.destination.start_guest() {
            Ok(started) => started,
            Err(StartFailure { started, error }) => {
                self.error = Some(*error);
                started
            }
        };
        if started == StartResult::Live {
            self.set_running();
        }
        Input::Started(started)
    }

    /// Refuses to run a guest whose link is down or whose files were replaced, while its source can still run it.
    fn check_unchanged(&mut self) -> Result<(), Error> {
        let state = self.switchover.state();
        let SourceControl::Qemu(source) = &mut self.source else { return Ok(()) };
        match source.check_unchanged() {
            Err(error) if state.has_source_exited() => {
                self.notes.push(format!("{error}; it runs there: raise its link with `set_link`"));
                Ok(())
            }
            checked => checked,
        }
    }

    /// Reports that the source is done with the guest.
    pub(super) fn cut_over(&mut self) {
        if !std::mem::replace(&mut self.is_cut_over, true) {
            self.context.observer.phase(CopyPhase::CutOver);
        }
    }

    pub(super) fn finalize(&mut self) -> Input {
        if !matches!(self.source, SourceControl::Stored) {
            self.cut_over();
        }
        match self.destination.finalize(self.context) {
            Ok(notes) => {
                notes.iter().for_each(|note| self.context.observer.notice(note));
                // Of one host, both may be connected to one device process, which serves the old one until that ends.
                let is_upgrade = self.context.options.is_upgrade();
                let has_source_exited = self.switchover.state().has_source_exited();
                if !is_upgrade {
                    self.attach_vsocks();
                } else if has_source_exited {
                    self.take_over();
                }
                Input::Done
            }
            Err(error) => {
                // Of an upload, which can be cancelled when the switchover cannot.
                self.cancel_handled |= matches!(error, Error::Cancelled);
                self.error.get_or_insert(error);
                match self.destination.query_status() {
                    DestinationStatus::Exited => Input::Destination(DestinationStatus::Exited),
                    _ => Input::NotDone,
                }
            }
        }
    }

    pub(super) fn cancel_migration(&mut self) -> Input {
        let SourceControl::Qemu(source) = &mut self.source else { return Input::Done };
        match source.cancel_migration() {
            Ok(()) => Input::Done,
            Err(error) => {
                tracing::debug!(%error, "the source");
                Input::NotDone
            }
        }
    }

    pub(super) fn restore(&mut self, requested: GuestAction) -> Input {
        let end = if self.error.is_some() { CopyEnd::Failed } else { CopyEnd::Complete };
        let is_asleep = self.switchover.state().guest() == GuestRunState::Suspended;
        let action = if is_asleep { GuestAction::Leave } else { requested };
        let SourceControl::Qemu(source) = &mut self.source else { return Input::Done };
        match source.restore(action, end) {
            Ok(notes) => {
                self.downtime_ms = source.reported_downtime().or(self.downtime_ms);
                self.notes.extend(notes);
                if action == requested {
                    return Input::Done;
                }
                let socket = source.qemu.socket().to_owned();
                self.fail(Error::Asleep { socket }, Input::NotDone)
            }
            Err(error) if source.has_exited() => self.fail(error, Input::Source(SourceStatus::Exited)),
            Err(error) => self.fail(error, Input::NotDone),
        }
    }

    /// Ends a destination in the source's memory before that runs the guest: it may have locks of the drives, and running it would
    /// change the memory. The decision that it is to run the guest is withdrawn by then: with it and without this QEMU a later `resume`
    /// would have to assume that the guest has run there.
    pub(super) fn end_in_shared_memory(&mut self) -> Result<(), Error> {
        if self.switchover.state().request().memory != MemorySharing::Shared {
            return Ok(());
        }
        self.destination.end()?;
        tracing::debug!("ended the new QEMU");
        Ok(())
    }

    /// The old QEMU of an upgrade has exited: the new one gets what that had, while the record of the move still exists.
    fn take_over(&mut self) {
        if let Some(to) = self.destination.qemu() {
            to.publish_sockets();
        }
        self.attach_vsocks();
    }

    /// Attaches devices that were detached at the source.
    fn attach_vsocks(&mut self) {
        if let (SourceControl::Qemu(source), Some(to)) = (&self.source, self.destination.qemu()) {
            self.not_attached = source.vsocks.attach(&mut to.qmp.qemu).err();
        }
    }

    pub(super) fn quit(&mut self) -> Input {
        let SourceControl::Qemu(source) = &mut self.source else { return Input::Done };
        match source.quit() {
            Ok(downtime_ms) => {
                self.downtime_ms = downtime_ms.or(self.downtime_ms);
                if self.context.options.is_upgrade() {
                    self.take_over();
                }
                Input::Done
            }
            Err(error) => {
                self.error = Some(error);
                Input::NotDone
            }
        }
    }
}
