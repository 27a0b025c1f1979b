//! State of one queue in the thread of its worker.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::eventfd;
use crate::kick::Kick;
use crate::log::DirtyLog;
use crate::memory::GuestMemory;
use crate::message::VringAddress;
use crate::record::{InFlightRecord, QueueRecord};
use crate::ring::{Batch, Ring, RingFault, RingSetup};
use crate::session::{Enablement, RingFds};

/// Maximum number of chains that a disabled queue drops in one run.
const DROPPED_PER_RUN: usize = 256;
/// Time within which a frontend enables a ring that it has started. Until then the ring keeps its chains.
const ENABLED_WITHIN: Duration = Duration::from_secs(1);
/// Time within which a frontend sends the dirty log of rings that it has started.
const LOGGED_WITHIN: Duration = Duration::from_secs(1);

/// Outcome of [`QueueSlot::drop_chains`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backlog {
    Empty,
    /// The queue may have more chains.
    Remains,
}

/// Properties of a queue that its device decides.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct QueuePolicy {
    /// Chains are dropped while the queue is disabled.
    pub(super) drops_while_disabled: bool,
    /// Chains are completed in the order in which they became available.
    pub(super) completes_in_order: bool,
}

/// A queue, with its ring while it is started.
#[derive(Debug, Default)]
pub(super) struct QueueSlot {
    /// Number among all queues of the device.
    pub(super) number: usize,
    pub(super) ring: Option<Ring>,
    pub(super) kick: Option<Kick>,
    pub(super) err: Option<OwnedFd>,
    pub(super) enablement: Enablement,
    /// When a started ring that is still in its initial state counts as disabled.
    initial_until: Option<Instant>,
    /// Until when the ring waits for its dirty log.
    log_until: Option<Instant>,
    /// A fault was reported; the ring is not processed until it is started again.
    pub(super) faulted: bool,
    /// `last_avail_idx` of a ring that was abandoned.
    pub(super) abandoned_avail_idx: Option<u16>,
    /// Number of times that the queue was started.
    starts: u64,
    record: Option<QueueRecord>,
    record_lost: bool,
    policy: QueuePolicy,
}

impl QueueSlot {
    pub(super) fn new(number: usize, policy: QueuePolicy, record: Option<&InFlightRecord>) -> Self {
        Self { number, record: record.map(|record| record.queue(number)), policy, ..Self::default() }
    }

    /// Returns true if the worker processes the queue.
    pub(super) fn is_running(&self) -> bool {
        self.is_processed() && self.enablement == Enablement::Enabled
    }

    /// Returns true if chains are popped, by the worker or to be dropped.
    pub(super) fn is_processed(&self) -> bool {
        let pops = match self.enablement {
            Enablement::Initial => false,
            Enablement::Disabled => self.policy.drops_while_disabled,
            Enablement::Enabled => true,
        };
        self.ring.is_some() && pops && !self.faulted && self.log_until.is_none()
    }

    /// Returns the time until a ring in its initial state counts as disabled, and disables one whose time is
    /// over.
    ///
    /// vhost-user requires that a transmit ring that is started and not enabled discards its packets. But
    /// QEMU sends `SET_VRING_KICK` first and then `SET_VRING_ENABLE`, also when it connects again, and the
    /// ring already has chains then.
    pub(super) fn expire_initial(&mut self, now: impl FnOnce() -> Instant) -> Option<Duration> {
        if self.enablement != Enablement::Initial || !self.policy.drops_while_disabled || self.ring.is_none()
        {
            return None;
        }
        let left = self.initial_until?.saturating_duration_since(now());
        if !left.is_zero() {
            return Some(left);
        }
        self.enablement = Enablement::Disabled;
        None
    }

    /// Returns the time until a ring is processed without the dirty log that its frontend has to send: a
    /// process that is killed before would take the marks with it.
    pub(super) fn expire_log_wait(&mut self, now: impl FnOnce() -> Instant) -> Option<Duration> {
        let left = self.log_until?.saturating_duration_since(now());
        let awaited = self.ring.as_ref().is_some_and(Ring::is_log_awaited);
        if awaited && !left.is_zero() {
            return Some(left);
        }
        if awaited {
            tracing::warn!(
                ring = self.number,
                "logging is on and the frontend has sent no log; keeping the marks for it"
            );
        }
        self.log_until = None;
        None
    }

    /// Replaces the dirty log, for which the ring waits no longer.
    pub(super) fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) {
        self.log_until = None;
        if let Some(ring) = &mut self.ring {
            ring.set_log(log.cloned());
        }
    }

    /// The ring, if its chains are popped.
    pub(super) fn processed_ring(&mut self) -> Option<&mut Ring> {
        if self.is_processed() { self.ring.as_mut() } else { None }
    }

    /// Starts the ring. Returns true if its driver has not used it before.
    pub(super) fn start(
        &mut self,
        setup: RingSetup,
        memory: Arc<GuestMemory>,
        fds: RingFds,
    ) -> Result<bool, RingFault> {
        self.starts += 1;
        self.initial_until = Some(Instant::now() + ENABLED_WITHIN);
        self.log_until = setup.switch.is_awaited().then(|| Instant::now() + LOGGED_WITHIN);
        self.kick = Some(Kick::new(fds.kick));
        self.err = fds.err;
        self.faulted = false;
        // Distinguishes chains of this ring from those of its predecessors and of other rings.
        let epoch = self.number as u64 | self.starts << 16;
        let mut ring = Ring::new(setup, memory, epoch).inspect_err(|fault| self.report(fault))?;
        let resumed =
            self.record.clone().and_then(|record| ring.resume(record, self.policy.completes_in_order));
        if let Some(chains @ 1..) = resumed {
            tracing::info!(
                ring = self.number,
                chains,
                "chains were in flight in the previous process or connection"
            );
        }
        // The previous process may have died between a batch and its notification.
        ring.call_driver();
        let fresh = ring.is_fresh();
        self.ring = Some(ring);
        Ok(fresh)
    }

    /// Translates the ring's addresses again. A ring outside guest memory is abandoned.
    pub(super) fn remap(&mut self, memory: Option<&Arc<GuestMemory>>, address: Option<VringAddress>) {
        let Some(ring) = &mut self.ring else { return };
        let memory = memory.unwrap_or(ring.memory());
        let address = address.unwrap_or(ring.address());
        if let Err(fault) = ring.remap(Arc::clone(memory), address) {
            self.report(&fault);
            self.abandoned_avail_idx = self.ring.take().map(Ring::abandon);
        }
    }

    /// Reports a new fault of the ring.
    pub(super) fn report_fault(&mut self) {
        if let Some(fault) = self.ring.as_ref().and_then(Ring::fault)
            && !self.faulted
        {
            self.report(fault);
            self.faulted = true;
        }
    }

    /// Faults the ring if its memory is lost. Returns true if it is.
    pub(super) fn fault_if_memory_lost(&mut self) -> bool {
        let lost = self.ring.as_ref().is_some_and(Ring::has_lost_memory);
        // The zeros in the place of the memory may have faulted it already.
        if lost && !std::mem::replace(&mut self.faulted, true) {
            log_fault(self.number, &RingFault::MemoryLost);
        }
        lost
    }

    /// Reports a record that is lost. The ring continues: this process knows its chains.
    pub(super) fn report_lost_record(&mut self) {
        if self.record.as_ref().is_some_and(QueueRecord::is_lost)
            && !std::mem::replace(&mut self.record_lost, true)
        {
            tracing::error!(
                ring = self.number,
                "the record of descriptors in flight was truncated; if this process ends now, its successor may lose some"
            );
        }
    }

    /// Completes chains of a disabled queue without reading them.
    pub(super) fn drop_chains(&mut self, batch: &mut Batch) -> Backlog {
        let Some(ring) = &mut self.ring else { return Backlog::Empty };
        ring.set_notification(true);
        let popped = ring.pop(batch, DROPPED_PER_RUN);
        for chain in batch.chains() {
            ring.complete(chain, 0);
        }
        let remains = popped == DROPPED_PER_RUN || batch.is_full();
        // The batch would keep the memory mapped.
        batch.clear();
        if remains { Backlog::Remains } else { Backlog::Empty }
    }

    fn report(&self, fault: &RingFault) {
        log_fault(self.number, fault);
        if let Some(err) = &self.err {
            // If this fails the log still has the fault.
            let _ = eventfd::signal(err.as_fd());
        }
    }
}

fn log_fault(ring: usize, fault: &RingFault) {
    tracing::error!(ring, %fault, "the ring is broken; not processing it until its driver is reset");
}
