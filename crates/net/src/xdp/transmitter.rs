//! The transmitting half of a queue pair with AF_XDP: sends by a TX queue if one can be bound, otherwise by
//! the tap.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use towline_vhost_user::{BackendError, Batch, GuestMemory, Next, Ring};

use super::orphans::{FREE_INTERVAL, OrphanState, OrphanedChains};
use super::references::PageCrossing;
use super::timer::{CompletionProgress, CompletionTimer};
use super::tx_queue::{DrainScope, TxError, TxQueue, TxRun};
use super::{Xdp, is_temporary, suits};
use crate::device::Shared;
use crate::lock::lock;
use crate::statistics::{BatchCounters, CopyReason, DropReason, TransmitMode};
use crate::tap::TapContext;
use crate::timer::Timer;
use crate::transmit::Transmitter;

/// Interval of attempts to bind, after an error that may be temporary.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of the first attempt while the queue is busy, during which the guest waits.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of frames in flight when the connection ends.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a queue to become free after its socket was closed with chains in flight, while the guest
/// waits for them.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(1);

/// See the module.
pub(crate) struct XdpTransmitter {
    pair: usize,
    xdp: Arc<Xdp>,
    shared: Arc<Shared>,
    batch: Batch,
    queue: Option<TxQueue>,
    orphaned: OrphanedChains,
    timer: CompletionTimer,
    failure: Option<BindFailure>,
    /// The last warning, which is not repeated.
    last_warning: String,
}

/// A failed attempt to bind a queue.
struct BindFailure {
    memory: Weak<GuestMemory>,
    /// Time of the next attempt; `None` if it is not worthwhile before guest memory changes.
    retry_at: Option<Instant>,
}

impl XdpTransmitter {
    /// # Errors
    /// Frames of the previous connection may still be sent.
    pub(crate) fn new(pair: usize, xdp: Arc<Xdp>, shared: Arc<Shared>) -> Result<Self, BackendError> {
        xdp.wait_for_previous_process(pair);
        xdp.check_orphaned(pair)?;
        Ok(Self {
            pair,
            xdp,
            shared,
            batch: Batch::new(),
            queue: None,
            orphaned: OrphanedChains::new(),
            timer: CompletionTimer::new()?,
            failure: None,
            last_warning: String::new(),
        })
    }

    /// Sends a limited number of frames, by AF_XDP or by `transmitter`.
    pub(crate) fn run(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        counted: &mut BatchCounters,
        transmitter: &mut Transmitter,
    ) -> Next {
        self.timer.clear();
        self.inherit(Some(ring), counted);
        let orphans = if self.orphaned.inherited {
            // The first attempt to bind, which waits, shows more than a check.
            self.orphaned.check(|| Err(io::ErrorKind::WouldBlock.into()))
        } else {
            self.check_orphans(Some(&mut *ring), counted)
        };
        if orphans != OrphanState::None {
            self.timer.arm_at(self.orphaned.next_check);
        }
        if orphans != OrphanState::InFlight {
            self.ensure_queue(ring, counted);
        }
        let Some(queue) = &mut self.queue else {
            let before = counted.since.packets;
            let next = transmitter.run(ring, tap, None, counted);
            counted.add_copies(CopyReason::Tap, counted.since.packets - before);
            return next;
        };
        transmitter.blocked = false;
        let before = queue.in_flight.descriptors;
        match queue.run(ring, tap, counted, &mut self.batch) {
            Ok(TxRun { next, tap_full }) => {
                transmitter.blocked = tap_full;
                let left = queue.in_flight.descriptors;
                counted.since.pending = queue.in_flight.heads.into();
                if left > 0 {
                    self.timer.arm(if left < before {
                        CompletionProgress::Some
                    } else {
                        CompletionProgress::None
                    });
                }
                next
            }
            Err(error) => {
                self.fail(Some(ring), counted, &error);
                Next::Again
            }
        }
    }

    /// Processes completions while the ring or the link does not run.
    pub(crate) fn reap_while_stopped(&mut self, mut ring: Option<&mut Ring>, counted: &mut BatchCounters) {
        self.timer.clear();
        self.inherit(ring.as_deref_mut(), counted);
        if self.check_orphans(ring.as_deref_mut(), counted) != OrphanState::None {
            self.timer.arm_at(self.orphaned.next_check);
        }
        let Some(queue) = &mut self.queue else { return };
        match queue.wake_up().and_then(|()| queue.reap(ring.as_deref_mut())) {
            Ok(progress) => {
                counted.since.pending = queue.in_flight.heads.into();
                if queue.in_flight.descriptors > 0 {
                    self.timer.arm(progress);
                }
            }
            Err(error) => self.fail(ring.as_deref(), counted, &error),
        }
    }

    /// Waits for the chains in flight of a ring that is about to be stopped. At the deadline the socket is
    /// closed, and the rest is completed once the network card can no longer read it.
    ///
    /// # Errors
    /// The network card may still read some, after [`CLOSED_TIMEOUT`].
    pub(crate) fn drain(
        &mut self,
        mut ring: Option<&mut Ring>,
        counted: &mut BatchCounters,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        self.inherit(ring.as_deref_mut(), counted);
        if let Some(queue) = &mut self.queue {
            match queue.drain(ring.as_deref_mut(), deadline, DrainScope::Chains) {
                Ok(true) => counted.since.pending = 0,
                Ok(false) => {
                    let frames = queue.in_flight.heads;
                    tracing::warn!(
                        pair = self.pair,
                        frames,
                        "closing an AF_XDP socket with frames in flight"
                    );
                    self.close_queue(counted);
                }
                Err(error) => self.fail(ring.as_deref(), counted, &error),
            }
        }
        self.wait_for_orphans(ring, counted)
    }

    /// Waits for all frames in flight, and unpins guest memory, which is about to change.
    ///
    /// # Errors
    /// As [`XdpTransmitter::drain`].
    pub(crate) fn release(
        &mut self,
        mut ring: Option<&mut Ring>,
        counted: &mut BatchCounters,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        self.batch.clear();
        self.inherit(ring.as_deref_mut(), counted);
        if let Some(queue) = &mut self.queue {
            if let Err(error) = queue.drain(ring.as_deref_mut(), deadline, DrainScope::Everything) {
                tracing::warn!(pair = self.pair, %error, "AF_XDP");
            }
            self.close_queue(counted);
        }
        self.xdp.release_memory();
        self.wait_for_orphans(ring, counted)
    }

    /// The timer to poll, while completions are expected.
    pub(crate) fn timer(&self) -> Option<&Timer> {
        self.timer.armed()
    }

    /// Binds a queue for the ring's memory, unless there is one or the next attempt is not due.
    fn ensure_queue(&mut self, ring: &mut Ring, counted: &mut BatchCounters) {
        let memory = Arc::clone(ring.memory());
        if self.queue.as_ref().is_some_and(|queue| queue.is_of(&memory)) {
            return;
        }
        self.close_queue(counted);
        let same = |failure: &BindFailure| std::ptr::eq(failure.memory.as_ptr(), Arc::as_ptr(&memory));
        if let Some(failure) = self.failure.as_ref().filter(|failure| same(failure))
            && failure.retry_at.is_none_or(|retry_at| Instant::now() < retry_at)
        {
            return;
        }
        let features = self.shared.features.load(Relaxed);
        if !suits(self.xdp.copy_mode, self.xdp.zero_copy_send, features) {
            let reason = "the guest's driver has offloads, which a tap takes as they are; start the guest with csum=off, or \
                          use --zero-copy-send on";
            self.record_failure(&memory, Retry::Never, reason);
            return;
        }
        // At first, the queue may be busy with our own previous socket, or that of the previous process.
        let inherited = std::mem::take(&mut self.orphaned.inherited);
        let first = self.failure.is_none() && (self.orphaned.heads.is_empty() || inherited);
        let busy_timeout = if first { BUSY_TIMEOUT } else { Duration::ZERO };
        let started = Instant::now();
        match self.xdp.bind(self.pair, self.shared.taps.queues().len(), &memory, busy_timeout) {
            Ok(None) => {}
            Ok(Some(queue)) => {
                let took_ms = started.elapsed().as_millis();
                tracing::info!(
                    pair = self.pair, interface = self.xdp.name(), mode = ?queue.mode(), took_ms, "AF_XDP"
                );
                self.set_mode(queue.mode());
                (self.queue, self.failure) = (Some(queue), None);
                self.last_warning.clear();
                // The queue was free, or it could not have been bound.
                self.complete_orphans(Some(ring), counted);
            }
            Err(error) => {
                self.record_failure(&memory, retry_after(&error), &format!("{error}{}", hint(&error)));
            }
        }
    }

    /// Closes a queue that failed; frames go by the tap until the next attempt.
    fn fail(&mut self, ring: Option<&Ring>, counted: &mut BatchCounters, error: &TxError) {
        let memory = ring.map_or_else(Arc::default, |ring| Arc::clone(ring.memory()));
        self.close_queue(counted);
        let retry = match error {
            TxError::Invalid { crossing: PageCrossing::WithinHugePages, .. } => {
                self.xdp.pages_scattered.store(true, Relaxed);
                Retry::Later
            }
            TxError::MemoryRemoved | TxError::Invalid { .. } => Retry::Never,
            _ => Retry::Later,
        };
        self.record_failure(&memory, retry, &error.to_string());
    }

    fn record_failure(&mut self, memory: &Arc<GuestMemory>, retry: Retry, reason: &str) {
        let retry_at = (retry == Retry::Later).then(|| Instant::now() + RETRY_INTERVAL);
        self.failure = Some(BindFailure { memory: Arc::downgrade(memory), retry_at });
        if self.last_warning != reason {
            tracing::warn!(pair = self.pair, "AF_XDP is not used, frames go by the tap: {reason}");
            reason.clone_into(&mut self.last_warning);
        }
    }

    /// Takes over the chains that were in flight in the previous process, or connection. The network card may
    /// still read them, or has sent them: they are not sent again, and used once the queue is free.
    fn inherit(&mut self, ring: Option<&mut Ring>, counted: &mut BatchCounters) {
        let heads = ring.map(Ring::take_resubmitted).unwrap_or_default();
        if heads.is_empty() {
            return;
        }
        tracing::info!(
            pair = self.pair,
            frames = heads.len(),
            "not sending frames again that were in flight before"
        );
        self.orphaned.inherit(heads);
        counted.since.pending = self.orphaned.heads.len() as u64;
    }

    /// Closes the socket. Its chains stay in flight until the queue is free.
    fn close_queue(&mut self, counted: &mut BatchCounters) {
        let Some(queue) = self.queue.take() else { return };
        self.set_mode(TransmitMode::Tap);
        self.orphaned.add(queue.close());
        counted.since.pending = self.orphaned.heads.len() as u64;
    }

    /// Checks if the queue of a closed socket is free, and then completes its chains.
    fn check_orphans(&mut self, ring: Option<&mut Ring>, counted: &mut BatchCounters) -> OrphanState {
        let is_free = || {
            self.xdp.is_free(self.pair).inspect_err(|error| {
                tracing::debug!(pair = self.pair, %error, "cannot determine if the queue is free");
            })
        };
        match self.orphaned.check(is_free) {
            OrphanState::Free => {
                self.complete_orphans(ring, counted);
                OrphanState::None
            }
            state => state,
        }
    }

    /// Completes the chains of closed sockets, which the network card no longer reads.
    fn complete_orphans(&mut self, ring: Option<&mut Ring>, counted: &mut BatchCounters) {
        let heads = std::mem::take(&mut self.orphaned.heads);
        let Some(ring) = ring.filter(|_| !heads.is_empty()) else { return };
        counted.since.pending = 0;
        for head in heads {
            counted.add_drop(DropReason::Refused);
            ring.complete_head(head);
        }
        ring.publish();
    }

    /// Waits until the chains of closed sockets are complete.
    fn wait_for_orphans(
        &mut self,
        mut ring: Option<&mut Ring>,
        counted: &mut BatchCounters,
    ) -> Result<(), BackendError> {
        let interval = Timespec { tv_sec: 0, tv_nsec: FREE_INTERVAL.subsec_nanos().into() };
        let deadline = Instant::now() + CLOSED_TIMEOUT;
        self.orphaned.check_soon();
        while self.check_orphans(ring.as_deref_mut(), counted) != OrphanState::None {
            if Instant::now() >= deadline {
                let (frames, name) = (self.orphaned.heads.len(), self.xdp.name());
                return Err(BackendError::new(format!(
                    "{name} may still send {frames} frames: its queue is busy {} s after the socket was closed; check the link \
                     and the driver of {name}, and that no other program uses the queue",
                    CLOSED_TIMEOUT.as_secs()
                )));
            }
            let _ = poll(&mut [], Some(&interval));
            self.orphaned.check_soon();
        }
        Ok(())
    }

    fn set_mode(&self, mode: TransmitMode) {
        *lock(&self.shared.modes[self.pair]) = mode;
    }
}

impl Drop for XdpTransmitter {
    fn drop(&mut self) {
        // The rings are gone already; their frames are still sent.
        if let Some(queue) = &mut self.queue
            && let Err(error) = queue.drain(None, Instant::now() + END_TIMEOUT, DrainScope::Everything)
        {
            tracing::debug!(%error, "AF_XDP");
        }
        let in_flight = self.queue.as_ref().is_some_and(|queue| queue.in_flight.heads > 0);
        if in_flight || !self.orphaned.heads.is_empty() {
            self.xdp.orphaned[self.pair].store(true, Relaxed);
        }
        self.xdp.release_memory();
        // The mode is not reset: statistics that are read now describe the past.
    }
}

/// Time of the next attempt to bind a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// After [`RETRY_INTERVAL`].
    Later,
    /// When guest memory has changed.
    Never,
}

fn retry_after(error: &io::Error) -> Retry {
    if is_temporary(error) { Retry::Later } else { Retry::Never }
}

/// Remedy for an error of binding.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOBUFS | libc::ENOMEM) => {
            "; the guest's memory is pinned: raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity)"
        }
        Some(libc::EINVAL) => {
            "; does the interface have a queue of this number? A virtio card needs iommu_platform=on for zero-copy"
        }
        Some(libc::EFAULT) => "; memory in a file on disk cannot be pinned, use a memfd",
        _ => "",
    }
}
