//! The session's handles to the threads of the workers.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_channel::guard::faults as memory_faults;

use super::slot::{QueuePolicy, QueueSlot};
use super::thread::{WorkerCommand, WorkerThread};
use crate::device::Device;
use crate::eventfd::Eventfd;
use crate::hangup::Hangup;
use crate::kick::Kick;
use crate::log::DirtyLog;
use crate::mailbox::{self, Wake as _};
use crate::memory::GuestMemory;
use crate::message::VringAddress;
use crate::orphaned_threads::OrphanedThreads;
use crate::record::InFlightRecord;
use crate::ring::{Batch, RingFault, RingSetup};
use crate::session::{CANCELLED_WITHIN, Enablement, RingFds, Rings, SessionError};

/// Time limit for a thread to end. A thread that waits in the kernel for the frontend's pages may never end.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Interval at which a wait for a reply checks for cancellation.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// All threads of a device.
pub(crate) struct WorkerPool {
    workers: Vec<WorkerHandle>,
    queues_per_worker: usize,
    cancel: Option<Cancel>,
}

/// The pool's end of a thread.
struct WorkerHandle {
    index: usize,
    /// `None` ends the thread.
    commands: Option<Sender<WorkerCommand>>,
    wake: Arc<Eventfd>,
    /// Disconnected when the thread has ended.
    ended: Receiver<Infallible>,
    thread: Option<JoinHandle<()>>,
    /// Receives the thread if it does not end.
    orphans: Arc<OrphanedThreads>,
}

impl WorkerPool {
    /// Starts the threads, which record their chains in flight if there is a record.
    pub(crate) fn new(
        device: &dyn Device,
        record: Option<&InFlightRecord>,
        hangup: &Arc<Hangup>,
        orphans: &Arc<OrphanedThreads>,
    ) -> Result<Self, SessionError> {
        let (count, each) = (device.queue_count(), device.queues_per_worker().max(1));
        let start = |index: usize| {
            let queues = index * each..count.min((index + 1) * each);
            let slot = |queue| {
                let policy = QueuePolicy {
                    drops_while_disabled: device.drops_while_disabled(queue),
                    completes_in_order: device.completes_in_order(),
                };
                QueueSlot::new(queue, policy, record)
            };
            WorkerHandle::start(index, device, queues.map(slot).collect(), hangup, orphans)
        };
        let workers = (0..count.div_ceil(each)).map(start).collect::<Result<_, _>>()?;
        Ok(Self { workers, queues_per_worker: each, cancel: None })
    }

    /// Has the worker of a ring execute `command`, which gets the ring's number within the worker. Returns
    /// its reply.
    fn call<T: Send + 'static>(
        &self,
        ring: usize,
        command: impl FnOnce(&mut WorkerThread, usize) -> T + Send + 'static,
    ) -> Result<T, SessionError> {
        let (worker, queue) = (&self.workers[ring / self.queues_per_worker], ring % self.queues_per_worker);
        let reply = worker.send(move |thread| command(thread, queue))?;
        worker.receive(&reply, self.cancel.as_ref())
    }

    /// Has all workers execute `command` at the same time, and waits for the replies of all.
    fn call_all(
        &self,
        command: impl Fn(&mut WorkerThread) -> Result<(), SessionError> + Clone + Send + 'static,
    ) -> Result<(), SessionError> {
        let sent = self.workers.iter().map(|worker| Ok((worker, worker.send(command.clone())?)));
        for (worker, reply) in sent.collect::<Result<Vec<_>, SessionError>>()? {
            worker.receive(&reply, self.cancel.as_ref())??;
        }
        Ok(())
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        // All threads end at the same time, instead of one after the other.
        self.workers.iter_mut().for_each(WorkerHandle::close);
        let deadline = Instant::now() + END_WITHIN;
        self.workers.iter_mut().for_each(|worker| worker.join(deadline));
    }
}

impl Rings for WorkerPool {
    fn set_cancel(&mut self, cancel: &Cancel) {
        self.cancel = Some(cancel.clone());
    }

    fn start(
        &mut self,
        ring: usize,
        setup: RingSetup,
        memory: &Arc<GuestMemory>,
        fds: RingFds,
    ) -> Result<Option<RingFault>, SessionError> {
        let memory = Arc::clone(memory);
        self.call(ring, |thread, queue| thread.start(queue, setup, memory, fds).err())
    }

    fn stop(&mut self, ring: usize) -> Result<Option<u16>, SessionError> {
        self.call(ring, WorkerThread::stop)?
    }

    fn enable(&mut self, ring: usize, enablement: Enablement) -> Result<(), SessionError> {
        self.call(ring, move |thread, queue| thread.slots[queue].enablement = enablement)
    }

    fn set_kick(&mut self, ring: usize, fd: OwnedFd) -> Result<(), SessionError> {
        self.call(ring, |thread, queue| thread.slots[queue].kick = Some(Kick::new(fd)))
    }

    fn set_call(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        self.call(ring, |thread, queue| {
            if let Some(ring) = &mut thread.slots[queue].ring {
                ring.set_call(fd);
            }
        })
    }

    fn set_err(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        self.call(ring, |thread, queue| thread.slots[queue].err = fd)
    }

    fn set_address(&mut self, ring: usize, address: VringAddress) -> Result<(), SessionError> {
        self.call(ring, move |thread, queue| thread.slots[queue].remap(None, Some(address)))
    }

    fn set_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), SessionError> {
        let memory = Arc::clone(memory);
        self.call_all(move |thread| thread.set_memory(&memory))
    }

    fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), SessionError> {
        let log = log.cloned();
        self.call_all(move |thread| {
            thread.slots.iter_mut().for_each(|slot| slot.set_log(log.as_ref()));
            Ok(())
        })
    }

    fn quiesce(&mut self) -> Result<(), SessionError> {
        self.call_all(|_| Ok(()))
    }
}

impl WorkerHandle {
    fn start(
        index: usize,
        device: &dyn Device,
        slots: Vec<QueueSlot>,
        hangup: &Arc<Hangup>,
        orphans: &Arc<OrphanedThreads>,
    ) -> Result<Self, SessionError> {
        let failed = |source| SessionError::Thread { index, source };
        let worker = device.worker(index).map_err(|reason| SessionError::Worker { index, reason })?;
        let wake = Arc::new(Eventfd::new().map_err(failed)?);
        let (commands, received) = channel();
        let (alive, ended) = channel();
        let thread = WorkerThread {
            worker,
            slots,
            discard_batch: Batch::new(),
            commands: received,
            wake: Arc::clone(&wake),
            hangup: Arc::clone(hangup),
            state_left: None,
            memory_faults: memory_faults(),
            _alive: alive,
        };
        let name = format!("{}-{index}", device.name());
        let thread = std::thread::Builder::new().name(name).spawn(|| thread.run()).map_err(failed)?;
        let orphans = Arc::clone(orphans);
        Ok(Self { index, commands: Some(commands), wake, ended, thread: Some(thread), orphans })
    }

    /// Has the thread end, without waiting for it.
    fn close(&mut self) {
        self.commands = None;
        self.wake.signal();
    }

    /// Sends a command. Its reply arrives in the returned channel, which disconnects if the thread panics.
    fn send<T: Send + 'static>(
        &self,
        command: impl FnOnce(&mut WorkerThread) -> T + Send + 'static,
    ) -> Result<Receiver<T>, SessionError> {
        let (sender, reply) = channel();
        let command: WorkerCommand = Box::new(move |thread| {
            // A session that was cancelled does not receive it.
            let _ = sender.send(command(thread));
        });
        let sent = self.commands.as_ref().is_some_and(|queue| mailbox::send(queue, &*self.wake, command));
        if sent { Ok(reply) } else { Err(SessionError::WorkerPanicked { index: self.index }) }
    }

    /// Waits for a reply. Once the session is cancelled the wait has a limit, since a thread may wait in the
    /// kernel for pages that never arrive.
    fn receive<T>(&self, reply: &Receiver<T>, cancel: Option<&Cancel>) -> Result<T, SessionError> {
        let index = self.index;
        let began = Instant::now();
        loop {
            match reply.recv_timeout(CANCEL_INTERVAL) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Disconnected) => return Err(SessionError::WorkerPanicked { index }),
                Err(RecvTimeoutError::Timeout)
                    if began.elapsed() >= CANCELLED_WITHIN && cancel.is_some_and(Cancel::is_cancelled) =>
                {
                    return Err(SessionError::Cancelled { index });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Waits once until the thread has ended.
    fn join(&mut self, deadline: Instant) {
        if let Some(thread) = self.thread.take() {
            self.orphans.join(thread, &self.ended, deadline.saturating_duration_since(Instant::now()));
        }
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.close();
        self.join(Instant::now() + END_WITHIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{BackendError, Next, Worker};
    use crate::worker::Queues;

    /// A device of three queues, two of which share a worker.
    struct Idle;

    impl Device for Idle {
        fn name(&self) -> &str {
            "idle"
        }

        fn queue_count(&self) -> usize {
            3
        }

        fn queues_per_worker(&self) -> usize {
            2
        }

        fn features(&self) -> u64 {
            0
        }

        fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
            Ok(Box::new(Idle))
        }
    }

    impl Worker for Idle {
        fn run(&mut self, _: &mut Queues<'_>) -> Next {
            Next::Wait
        }
    }

    /// Three workers that do not end while the lock is held.
    struct Stuck(Arc<std::sync::Mutex<()>>);

    impl Device for Stuck {
        fn name(&self) -> &str {
            "stuck"
        }

        fn queue_count(&self) -> usize {
            3
        }

        fn queues_per_worker(&self) -> usize {
            1
        }

        fn features(&self) -> u64 {
            0
        }

        fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
            Ok(Box::new(Stuck(Arc::clone(&self.0))))
        }
    }

    impl Worker for Stuck {
        fn run(&mut self, _: &mut Queues<'_>) -> Next {
            Next::Wait
        }
    }

    impl Drop for Stuck {
        fn drop(&mut self) {
            drop(self.0.lock());
        }
    }

    #[test]
    fn workers_that_do_not_end_have_one_deadline() {
        let lock = Arc::new(std::sync::Mutex::new(()));
        let device = Stuck(Arc::clone(&lock));
        let pool = WorkerPool::new(&device, None, &Arc::default(), &Arc::default()).unwrap();
        let held = lock.lock().unwrap();
        let began = Instant::now();
        drop(pool);
        let took = began.elapsed();
        drop(held);
        assert!(took >= END_WITHIN && took < 2 * END_WITHIN, "{took:?}");
    }

    fn pool() -> WorkerPool {
        WorkerPool::new(&Idle, None, &Arc::default(), &Arc::default()).unwrap()
    }

    #[test]
    fn a_command_is_executed_by_the_worker_of_its_ring() {
        let pool = pool();
        for (ring, queue, slots) in [(0, 0, 2), (1, 1, 2), (2, 0, 1)] {
            let reply =
                pool.call(ring, |thread, queue| (thread.slots[queue].number, queue, thread.slots.len()));
            assert_eq!(reply.unwrap(), (ring, queue, slots));
        }
    }

    #[test]
    fn a_panic_is_the_reply_to_this_command_and_later_ones() {
        let pool = pool();
        let panicked = pool.call(2, |_, _| -> usize { panic!("of a test") });
        assert!(matches!(panicked, Err(SessionError::WorkerPanicked { index: 1 })), "{panicked:?}");
        let later = pool.call(2, |_, queue| queue);
        assert!(matches!(later, Err(SessionError::WorkerPanicked { index: 1 })), "{later:?}");
        assert_eq!(pool.call(0, |_, queue| queue).unwrap(), 0, "the other worker runs on");
    }

    #[test]
    fn cancellation_ends_the_wait_for_a_blocked_worker() {
        let mut pool = pool();
        let cancel = Cancel::new().unwrap();
        pool.set_cancel(&cancel);
        // Dropped before the pool, which ends the command.
        let (_unblock, blocked) = channel::<()>();
        cancel.cancel();
        let cancelled = pool.call(0, move |_, _| blocked.recv());
        assert!(matches!(cancelled, Err(SessionError::Cancelled { index: 0 })), "{cancelled:?}");
    }
}
