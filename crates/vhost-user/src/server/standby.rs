//! A second frontend beside the one that has the device: the next QEMU of a guest whose QEMU is replaced.
//!
//! ```text
//!   owner    rings run ── GET_VRING_BASE: stopped ──┐                       ┌─► standby, until it disconnects or starts its rings
//!   standby  negotiates ── SET_FEATURES, … ─────────┴─ no ring runs: owner ─┘
//!                              └─ a ring of the owner runs: refused
//! ```
//! Requests are served one after the other, so the rings of both never run at the same time. A frontend that
//! gets the device (back) has it with the features that it negotiated. If the owner disconnects, the standby
//! is the owner.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use towline_channel::{Cancel, Channel};

use super::{FrontendSource, Service, descriptor_error};
use crate::connection::{ConnectionResources, FrontendConnection, MESSAGE_WITHIN, Peer};
use crate::device::Device;
use crate::record::InFlightRecord;
use crate::serve_error::ServeError;
use crate::session::SessionError;

/// Time limit of an `accept` with a pending connection.
const ACCEPT_WITHIN: Duration = Duration::from_secs(1);
/// Interval after a standby could not be accepted.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit for sending a reply to a standby, during which requests of the owner wait. Its socket has room
/// for many.
const STANDBY_REPLY_WITHIN: Duration = Duration::from_millis(10);

/// Connection to serve next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrontendEvent {
    Owner,
    Standby,
    Connecting,
    Cancelled,
    Timeout,
}

impl Service {
    /// Returns true if a second frontend is accepted.
    pub(super) fn allows_standby(&self, device: &dyn Device) -> bool {
        let pollable = self.connection.as_ref().is_some_and(|connection| connection.as_fd().is_some());
        pollable && device.allows_standby() && self.listener().is_some()
    }

    fn listener(&self) -> Option<BorrowedFd<'_>> {
        match &self.frontends {
            Some(FrontendSource::Listen(listener)) => listener.as_fd(),
            Some(FrontendSource::Inherited(socket)) => Some(socket.as_fd()),
            _ => None,
        }
    }

    /// Serves the connected frontend until it disconnects, and a second one at the same time.
    pub(super) fn serve_pair(
        &mut self,
        device: &Arc<dyn Device>,
        record: &InFlightRecord,
        cancel: &Cancel,
    ) -> Result<(), ServeError> {
        let frontends = self.connection.iter_mut().chain(&mut self.standby);
        frontends.for_each(|frontend| frontend.set_cancel(cancel));
        // A standby could not be accepted before this time.
        let mut retry_at: Option<Instant> = None;
        loop {
            match self.next_event(cancel, retry_at)? {
                FrontendEvent::Owner => {
                    let Some(owner) = &mut self.connection else { return Ok(()) };
                    if owner.serve_request(None)? == Peer::Disconnected {
                        return Ok(());
                    }
                }
                FrontendEvent::Standby => self.serve_standby()?,
                FrontendEvent::Connecting => match self.accept_standby(device, record, cancel) {
                    Ok(()) => retry_at = None,
                    Err(error) => {
                        tracing::warn!(%error, device = device.name(), "a second frontend cannot be served");
                        retry_at = Some(Instant::now() + RETRY_INTERVAL);
                    }
                },
                FrontendEvent::Cancelled => return Err(towline_channel::Error::Cancelled.into()),
                FrontendEvent::Timeout if self.standby.is_some() => {
                    tracing::warn!(
                        "the second frontend has not completed its message; closing its connection"
                    );
                    self.close_standby();
                }
                FrontendEvent::Timeout => retry_at = None,
            }
        }
    }

    /// Waits for a request of either, the owner's first: the end of its connection precedes what the standby
    /// does then.
    fn next_event(&self, cancel: &Cancel, retry_at: Option<Instant>) -> Result<FrontendEvent, ServeError> {
        let mut fds: Vec<(FrontendEvent, BorrowedFd<'_>)> = Vec::with_capacity(3);
        fds.extend(
            self.connection.as_ref().and_then(FrontendConnection::as_fd).map(|fd| (FrontendEvent::Owner, fd)),
        );
        match &self.standby {
            Some(standby) => fds.extend(standby.as_fd().map(|fd| (FrontendEvent::Standby, fd))),
            None if retry_at.is_none() => {
                fds.extend(self.listener().map(|fd| (FrontendEvent::Connecting, fd)));
            }
            None => {}
        }
        fds.push((FrontendEvent::Cancelled, cancel.as_fd()));
        let mut polled: Vec<_> =
            fds.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        // A connection can be retried only without a standby.
        let until = self.standby.as_ref().map_or(retry_at, FrontendConnection::complete_until);
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec::try_from(left).expect("a few seconds at most"));
        retry_on_intr(|| poll(&mut polled, timeout.as_ref())).map_err(descriptor_error)?;
        let ready = fds.iter().zip(&polled).find(|(_, polled)| !polled.revents().is_empty());
        Ok(ready.map_or(FrontendEvent::Timeout, |((event, _), _)| *event))
    }

    /// Serves a request of the standby, which has the device then if it concerns the device.
    ///
    /// # Errors
    /// The error of the request, if the standby has become the owner.
    fn serve_standby(&mut self) -> Result<(), ServeError> {
        let (Some(owner), Some(standby)) = (&self.connection, &mut self.standby) else { return Ok(()) };
        let mut claimed = false;
        let served = standby.serve_request(Some(&mut || {
            claimed = !owner.is_running();
            if claimed { Ok(()) } else { Err(SessionError::OtherFrontend) }
        }));
        if claimed {
            standby.set_reply_timeout(MESSAGE_WITHIN)?;
            std::mem::swap(&mut self.connection, &mut self.standby);
            tracing::info!("the second frontend has the device now");
            return served.map(drop);
        }
        match served {
            Ok(Peer::Connected) => return Ok(()),
            Ok(Peer::Disconnected) => tracing::debug!("the second frontend has disconnected"),
            Err(error) => tracing::warn!(%error, "the connection of the second frontend ended"),
        }
        self.close_standby();
        Ok(())
    }

    fn close_standby(&mut self) {
        if let Some(standby) = self.standby.take() {
            standby.close(&self.orphans);
        }
    }

    fn accept_standby(
        &mut self,
        device: &Arc<dyn Device>,
        record: &InFlightRecord,
        cancel: &Cancel,
    ) -> Result<(), ServeError> {
        let channel: Box<dyn Channel> = match &self.frontends {
            Some(FrontendSource::Listen(listener)) => {
                match listener.accept(Instant::now() + ACCEPT_WITHIN, cancel) {
                    // It is gone already.
                    Err(towline_channel::Error::Timeout { .. }) => return Ok(()),
                    accepted => accepted?,
                }
            }
            Some(FrontendSource::Inherited(socket)) => Box::new(super::accept(socket, cancel)?),
            _ => return Ok(()),
        };
        let resources = ConnectionResources::new(&*channel, device, Some(record), &self.orphans)?;
        let mut standby = FrontendConnection::new(channel, device, resources);
        standby.set_cancel(cancel);
        standby.set_reply_timeout(STANDBY_REPLY_WITHIN)?;
        tracing::info!(device = device.name(), "a second frontend has connected");
        self.standby = Some(standby);
        Ok(())
    }
}
