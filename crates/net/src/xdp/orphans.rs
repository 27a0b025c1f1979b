//! Chains in flight of AF_XDP sockets that were closed: the network card may read them until their queue is
//! free.
//!
//! Nothing reports that a queue is free. It is determined by binding a socket, which takes a lock of the
//! whole network namespace, so the checks become rarer.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use towline_vhost_user::{BackendError, ChainHead};

use super::Xdp;
use super::socket::wait_until_free;

/// Time limit for the queue of a process that was killed.
const PREVIOUS_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of the first checks, and of those that are waited for.
pub(super) const FREE_INTERVAL: Duration = Duration::from_millis(5);
/// The longest interval.
const FREE_INTERVAL_MAX: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug)]
pub(super) struct OrphanedChains {
    pub(super) heads: Vec<ChainHead>,
    /// True if the first attempt to bind determines if the previous process's queue is free.
    pub(super) inherited: bool,
    /// Time of the next check if the queue is free.
    pub(super) next_check: Instant,
    /// Interval to the check after that.
    interval: Duration,
}

/// State of these chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OrphanState {
    /// No orphans.
    None,
    /// The queue is free: they can be completed.
    Free,
    /// Orphans that may still be read.
    InFlight,
    /// As `InFlight`, and only another bound socket will show that they are not.
    Unknown,
}

impl OrphanedChains {
    pub(super) fn new() -> Self {
        Self { heads: Vec::new(), inherited: false, next_check: Instant::now(), interval: FREE_INTERVAL }
    }

    /// Adds the chains of a socket that was closed just now.
    pub(super) fn add(&mut self, heads: impl IntoIterator<Item = ChainHead>) {
        self.heads.extend(heads);
        self.check_soon();
    }

    /// Adds chains of a previous process or connection.
    pub(super) fn inherit(&mut self, heads: Vec<ChainHead>) {
        self.add(heads);
        self.inherited = true;
    }

    /// Schedules the next check at once, and the one after it soon.
    pub(super) fn check_soon(&mut self) {
        (self.next_check, self.interval) = (Instant::now(), FREE_INTERVAL);
    }

    /// Checks if the queue is free, less and less often.
    pub(super) fn check(&mut self, is_free: impl FnOnce() -> io::Result<bool>) -> OrphanState {
        if self.heads.is_empty() {
            return OrphanState::None;
        }
        let now = Instant::now();
        if now < self.next_check {
            return OrphanState::InFlight;
        }
        self.next_check = now + self.interval;
        self.interval = (self.interval * 2).min(FREE_INTERVAL_MAX);
        match is_free() {
            Ok(true) => OrphanState::Free,
            Ok(false) => OrphanState::InFlight,
            Err(_) => OrphanState::Unknown,
        }
    }
}

impl Xdp {
    /// Before the first connection, waits until the queue of a process that was killed is free, for
    /// [`PREVIOUS_TIMEOUT`] at most, as a queue that another program uses looks the same.
    pub(super) fn wait_for_previous_process(&self, pair: usize) {
        if self.unused[pair].swap(false, Relaxed)
            && let Err(error) = wait_until_free(self.queue(pair), PREVIOUS_TIMEOUT)
        {
            tracing::warn!(pair, interface = self.name(), %error, "the queue of AF_XDP is in use");
        }
    }

    /// Refuses a new connection while frames of the previous one may still be sent. The restarted ring may
    /// contain their chains again, which would be completed while the network card still reads them.
    pub(super) fn check_orphaned(&self, pair: usize) -> Result<(), BackendError> {
        if !self.orphaned[pair].load(Relaxed) {
            return Ok(());
        }
        let name = self.name();
        match self.is_free(pair) {
            Ok(true) => {}
            Ok(false) => {
                return Err(BackendError::temporary(format!(
                    "{name} may still send frames of the previous connection: its queue is busy; check the link and the driver \
                     of {name}, and that no other program uses the queue"
                )));
            }
            // Without the right to open a socket this is never known. Other errors may be temporary.
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {
                return Err(BackendError::temporary(format!(
                    "cannot determine if {name} still sends frames of the previous connection: {error}"
                )));
            }
            Err(error) => {
                tracing::warn!(pair, %error, "cannot determine if frames of the previous connection are still in flight");
            }
        }
        self.orphaned[pair].store(false, Relaxed);
        Ok(())
    }
}
