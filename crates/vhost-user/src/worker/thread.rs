//! The thread of one worker.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use rustix::io::Errno;
use towline_channel::guard::faults as memory_faults;

use super::cpu_budget::CpuBudget;
use super::queues::Queues;
use super::slot::{Backlog, QueueSlot};
use crate::device::{BackendError, Next, Worker};
use crate::eventfd::Eventfd;
use crate::hangup::Hangup;
use crate::kick::{self, Kick};
use crate::mailbox::{self, Mailbox};
use crate::memory::GuestMemory;
use crate::poll::{PollFlags, PollSet};
use crate::ring::{Batch, Ring, RingFault, RingSetup};
use crate::session::{RingFds, SessionError};

/// Time limit for chains in flight when their queue is stopped.
const DRAIN_WITHIN: Duration = Duration::from_secs(1);

/// Executed by the thread between two batches. It sends its own reply.
pub(super) type WorkerCommand = Box<dyn FnOnce(&mut WorkerThread) + Send>;

/// State of the thread. Queues are counted within the worker.
pub(super) struct WorkerThread {
    pub(super) worker: Box<dyn Worker>,
    pub(super) slots: Vec<QueueSlot>,
    /// Chains that a disabled queue drops.
    pub(super) discard_batch: Batch,
    pub(super) commands: Receiver<WorkerCommand>,
    pub(super) wake: Arc<Eventfd>,
    /// Ends the connection when the guest's memory is lost.
    pub(super) hangup: Arc<Hangup>,
    /// Shortest time until a ring leaves its initial state without a request, or stops waiting for its log.
    pub(super) state_left: Option<Duration>,
    /// Faults of guest memory in this process up to the last check.
    pub(super) memory_faults: u64,
    /// Last field, so the pool's end disconnects when all else of the thread is dropped.
    pub(super) _alive: Sender<Infallible>,
}

impl WorkerThread {
    /// Serves the queues until the pool closes the mailbox. Chains that are completed afterwards are not
    /// published: the frontend has already read the used index.
    pub(super) fn run(mut self) {
        let mut budget = CpuBudget::new();
        loop {
            let next = self.run_once();
            budget.count_run();
            self.check_memory();
            let signalled = self.wait(next);
            if self.process_commands(signalled) == Mailbox::Closed {
                return;
            }
        }
    }

    /// Runs the worker once and publishes what it completed.
    fn run_once(&mut self) -> Next {
        let left =
            |slot: &mut QueueSlot| [slot.expire_initial(Instant::now), slot.expire_log_wait(Instant::now)];
        self.state_left = self.slots.iter_mut().flat_map(left).flatten().min();
        let rings = self.slots.iter_mut().filter_map(QueueSlot::processed_ring);
        rings.for_each(Ring::suppress_notification);
        let mut next = self.worker.run(&mut Queues::new(&mut self.slots));
        for slot in &mut self.slots {
            let drops = slot.is_processed() && !slot.is_running();
            if drops && slot.drop_chains(&mut self.discard_batch) == Backlog::Remains {
                next = Next::Again;
            }
            if let Some(ring) = &mut slot.ring {
                ring.publish();
            }
        }
        // A worker that runs again anyway needs no kick, which costs the driver a system call.
        if next == Next::Wait {
            next = self.enable_notifications();
        }
        self.slots.iter_mut().for_each(QueueSlot::report_fault);
        next
    }

    /// Enables kicks of all rings, and checks each for chains that were made available in the meantime.
    fn enable_notifications(&mut self) -> Next {
        let mut next = Next::Wait;
        for ring in self.slots.iter_mut().filter_map(QueueSlot::processed_ring) {
            if ring.enable_notification_and_recheck() {
                next = Next::Again;
            }
        }
        next
    }

    /// Waits for events, which nothing else in the thread does. Returns true if the mailbox was signalled.
    fn wait(&mut self, next: Next) -> bool {
        let mut fds = PollSet::new();
        fds.add(&*self.wake, PollFlags::IN);
        let mut kicks = Vec::new();
        // Until a paused kick descriptor is polled again, or a ring's state changes without a request.
        let mut longest = self.state_left;
        for (queue, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.is_processed()) {
            match slot.kick.as_ref().map(|kick| kick.poll_fd(Instant::now)) {
                Some(Ok(kick)) => {
                    kicks.push(queue);
                    fds.add(kick, PollFlags::IN);
                }
                Some(Err(left)) => longest = Some(longest.map_or(left, |least| least.min(left))),
                None => {}
            }
        }
        self.worker.poll(&mut fds);
        let timeout = if next == Next::Again { Some(Duration::ZERO) } else { longest };
        let timeout = timeout.map(|left| Timespec::try_from(left).expect("a few seconds at most"));
        match poll(fds.as_mut_slice(), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => tracing::error!(%errno, "poll failed"),
        }
        let events: Vec<PollFlags> = fds.events().collect();
        self.worker.on_ready(&events[1 + kicks.len()..]);
        for (queue, events) in kicks.into_iter().zip(&events[1..]) {
            let slot = &mut self.slots[queue];
            if let Some(ring) = &mut slot.ring {
                kick::handle_events(&mut slot.kick, *events, ring.load_avail_idx(), slot.number);
                ring.add_kicks(slot.kick.as_mut().map_or(0, Kick::take_count));
            }
        }
        events[0].contains(PollFlags::IN)
    }

    /// Ends the session of a guest whose memory had a fault.
    fn check_memory(&mut self) {
        let faults = memory_faults();
        if std::mem::replace(&mut self.memory_faults, faults) == faults {
            return;
        }
        for slot in &mut self.slots {
            slot.report_lost_record();
            if slot.fault_if_memory_lost() {
                self.hangup.memory_lost();
            }
        }
    }

    fn process_commands(&mut self, signalled: bool) -> Mailbox {
        let mut commands: Vec<WorkerCommand> = Vec::new();
        let wake = signalled.then_some(&*self.wake);
        let mailbox = mailbox::process(&self.commands, wake, |command| commands.push(command));
        commands.into_iter().for_each(|command| command(self));
        mailbox
    }
}

/// Commands of the session.
impl WorkerThread {
    pub(super) fn start(
        &mut self,
        queue: usize,
        setup: RingSetup,
        memory: Arc<GuestMemory>,
        fds: RingFds,
    ) -> Result<(), RingFault> {
        let fresh = self.slots[queue].start(setup, memory, fds)?;
        self.worker.started(queue, fresh);
        Ok(())
    }

    pub(super) fn stop(&mut self, queue: usize) -> Result<Option<u16>, SessionError> {
        let slot = &self.slots[queue];
        // Whether an abandoned ring has chains in flight is not known.
        if slot.abandoned_avail_idx.is_some() || slot.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0) {
            let deadline = Instant::now() + DRAIN_WITHIN;
            let drained = self.worker.drain(queue, &mut Queues::new(&mut self.slots), deadline);
            drained.map_err(|reason| self.keep_in_flight(queue, reason))?;
        }
        let slot = &mut self.slots[queue];
        (slot.kick, slot.err) = (None, None);
        let (number, ring) = (slot.number, slot.ring.take());
        let abandoned = slot.abandoned_avail_idx.take();
        self.worker.stopped(queue);
        let Some(ring) = ring else { return Ok(abandoned) };
        let stop = ring.stop();
        if stop.incomplete > 0 {
            let (ring, chains) = (number, stop.incomplete);
            tracing::warn!(ring, chains, "stopped with chains in flight; returning them with length 0");
        }
        Ok(Some(stop.base))
    }

    pub(super) fn set_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), SessionError> {
        let deadline = Instant::now() + DRAIN_WITHIN;
        let released = self.worker.release(&mut Queues::new(&mut self.slots), deadline);
        self.discard_batch.clear();
        released.map_err(|reason| self.keep_in_flight(0, reason))?;
        self.slots.iter_mut().for_each(|slot| slot.remap(Some(memory), None));
        Ok(())
    }

    /// Drops the rings without stopping them, because chains may still be accessed: none returns to the
    /// guest, and records and used indices show which are in flight.
    fn keep_in_flight(&mut self, queue: usize, reason: BackendError) -> SessionError {
        self.slots.iter_mut().for_each(|slot| slot.ring = None);
        SessionError::ChainsInUse { ring: self.slots[queue].number, reason }
    }
}
