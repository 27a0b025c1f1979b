//! The running rings of a session, as it uses them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use towline_channel::Cancel;

use super::error::SessionError;
use crate::log::DirtyLog;
use crate::memory::GuestMemory;
use crate::message::VringAddress;
use crate::ring::{RingFault, RingSetup};

/// Time that a thread has for a command once its session is cancelled, by a signal. Draining a queue, the
/// longest command, takes a second at most.
pub(crate) const CANCELLED_WITHIN: Duration = Duration::from_secs(3);
/// Maximum number of queues of a device: one byte on the wire.
pub const QUEUES_MAX: usize = 256;

/// The running rings, as the session uses them. A call has taken effect when it returns.
pub(crate) trait Rings {
    /// Cancels waiting calls when `cancel` is cancelled.
    fn set_cancel(&mut self, cancel: &Cancel) {
        let _ = cancel;
    }
    /// Starts a ring. Returns its fault if it cannot be started, which is not an error of the session.
    fn start(
        &mut self,
        ring: usize,
        setup: RingSetup,
        memory: &Arc<GuestMemory>,
        fds: RingFds,
    ) -> Result<Option<RingFault>, SessionError>;
    /// Drains and stops a ring. Returns the available index at which it resumes; `None` if it was not
    /// started.
    fn stop(&mut self, ring: usize) -> Result<Option<u16>, SessionError>;
    fn enable(&mut self, ring: usize, enablement: Enablement) -> Result<(), SessionError>;
    fn set_kick(&mut self, ring: usize, fd: OwnedFd) -> Result<(), SessionError>;
    fn set_call(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError>;
    fn set_err(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError>;
    fn set_address(&mut self, ring: usize, address: VringAddress) -> Result<(), SessionError>;
    fn set_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), SessionError>;
    fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), SessionError>;
    /// Waits until every batch that has begun is published.
    fn quiesce(&mut self) -> Result<(), SessionError>;
}

/// State of a ring as set by `SET_VRING_ENABLE`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Enablement {
    /// The frontend has neither enabled nor disabled the ring so far. It may enable it right after its start.
    #[default]
    Initial,
    Disabled,
    Enabled,
}

/// Eventfds with which a ring starts.
#[derive(Debug)]
pub(crate) struct RingFds {
    pub(crate) kick: OwnedFd,
    pub(crate) err: Option<OwnedFd>,
}
