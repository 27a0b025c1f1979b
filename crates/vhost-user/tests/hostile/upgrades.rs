//! Live upgrades: a device changes its process. Both processes are threads here.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use towline_channel::UnixChannel;
use towline_frontend::wire::protocol;
use towline_frontend::{Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions};
use towline_vhost_user::{
    AbortedUpgrade, BackendError, Batch, Cancel, Device, FrontendSource, InFlightRecord, Next, Queues,
    ServeError, Service, UpgradeError, UpgradeOffer, Worker, live_upgrade,
};

use crate::backend::{Log, WITHIN};

/// Time to drain a queue: less than the second that `Worker::drain` has.
const DRAINED_AFTER: Duration = Duration::from_millis(400);

/// A device that completes chains only when their queue is drained, like zero-copy sends without a completion.
#[derive(Default)]
struct SlowDevice {
    popped: Arc<AtomicUsize>,
}

struct SlowWorker {
    popped: Arc<AtomicUsize>,
    batch: Batch,
}

impl Device for SlowDevice {
    fn name(&self) -> &str {
        "slow"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(SlowWorker { popped: Arc::clone(&self.popped), batch: Batch::new() }))
    }
}

impl Worker for SlowWorker {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        if self.batch.is_empty()
            && let Some(ring) = queues.ring(0)
        {
            self.popped.fetch_add(ring.pop(&mut self.batch, 1), Ordering::Relaxed);
        }
        Next::Wait
    }

    fn drain(
        &mut self,
        queue: usize,
        queues: &mut Queues<'_>,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        assert!(Instant::now() + DRAINED_AFTER < deadline);
        std::thread::sleep(DRAINED_AFTER);
        let ring = queues.started_ring(queue).expect("a queue is drained before it is stopped");
        self.batch.chains().for_each(|chain| ring.complete(chain, 0));
        Ok(())
    }
}

/// A device whose hardware reads chains, and cannot be stopped while `in_use` is set.
#[derive(Default)]
struct StuckDevice {
    in_use: Arc<AtomicBool>,
    popped: Arc<AtomicUsize>,
}

struct StuckWorker {
    in_use: Arc<AtomicBool>,
    popped: Arc<AtomicUsize>,
    batch: Batch,
}

impl Device for StuckDevice {
    fn name(&self) -> &str {
        "stuck"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        let (in_use, popped) = (Arc::clone(&self.in_use), Arc::clone(&self.popped));
        Ok(Box::new(StuckWorker { in_use, popped, batch: Batch::new() }))
    }
}

impl Worker for StuckWorker {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        if self.batch.is_empty()
            && let Some(ring) = queues.ring(0)
        {
            self.popped.fetch_add(ring.pop(&mut self.batch, 1), Ordering::Relaxed);
        }
        Next::Wait
    }

    fn drain(&mut self, queue: usize, queues: &mut Queues<'_>, _: Instant) -> Result<(), BackendError> {
        if self.in_use.load(Ordering::Relaxed) {
            return Err(BackendError::new("the card still reads"));
        }
        let ring = queues.started_ring(queue).expect("a queue is drained before it is stopped");
        self.batch.chains().for_each(|chain| ring.complete(chain, 0));
        Ok(())
    }
}

impl StuckDevice {
    /// Waits until as many chains were popped.
    fn wait_popped(&self, wanted: usize) {
        let until = Instant::now() + WITHIN;
        while self.popped.load(Ordering::Relaxed) < wanted {
            assert!(Instant::now() < until, "the chain is not popped");
            std::thread::yield_now();
        }
    }
}

/// Serves until the token is cancelled, then hands the device over.
fn serve_and_upgrade(
    mut service: Service,
    device: &Arc<dyn Device>,
    record: &InFlightRecord,
    cancel: &Cancel,
    to: UnixStream,
) -> Result<(), Box<AbortedUpgrade>> {
    let ended = service.serve(device, record, cancel).unwrap_err();
    assert!(matches!(ended, ServeError::Channel(towline_channel::Error::Cancelled)), "{ended}");
    live_upgrade(service, device, &[], record, &UnixChannel::new(to.into(), "the new process").unwrap())
}

fn request(from: UnixStream) -> Result<UpgradeOffer, UpgradeError> {
    UpgradeOffer::request(Box::new(UnixChannel::new(from.into(), "the old process").unwrap()))
}

#[test]
fn a_live_upgrade_is_refused_while_chains_are_in_use_and_works_later() {
    let _log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("listen.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let stuck = Arc::<StuckDevice>::default();
    stuck.in_use.store(true, Ordering::Relaxed);
    let device: Arc<dyn Device> = stuck.clone();
    let tokens = [(); 2].map(|()| Cancel::new().unwrap());
    let ends = [(); 2].map(|()| UnixStream::pair().unwrap());
    let [(first_old, first_new), (second_old, second_new)] = ends;
    let (served, [first, second]) = (Arc::clone(&device), tokens.clone());
    let old = std::thread::spawn(move || {
        let record = InFlightRecord::new(1).unwrap();
        let service = Service::new(FrontendSource::from_fd(OwnedFd::from(listener)).unwrap());
        let aborted = serve_and_upgrade(service, &served, &record, &first, first_old).unwrap_err();
        let AbortedUpgrade { service, error } = *aborted;
        assert!(error.to_string().contains("the card still reads"), "{error}");
        serve_and_upgrade(service, &served, &record, &second, second_old)
            .map_err(|aborted| aborted.error.to_string())
    });
    let memory = Arc::new(MemoryArena::new(1 << 20).unwrap());
    let connect = || {
        let mut frontend = Frontend::new(UnixStream::connect(&path).unwrap()).unwrap();
        let features = frontend.negotiate(0, 0, protocol::REPLY_ACK).unwrap().features;
        frontend.set_mem_table(Some(&memory)).unwrap();
        (frontend, features)
    };
    let (mut frontend, features) = connect();
    let mut queue = Queue::new(&memory, 0, QueueOptions { size: 16, features }).unwrap();
    frontend.start(&queue, 0).unwrap();
    let buffer = QueueBuffer { guest: memory.alloc(8, 8), len: 8 };
    assert!(queue.add(&[], &[buffer], 7));
    queue.publish();
    stuck.wait_popped(1);
    tokens[0].cancel();
    let refused = request(first_new).unwrap_err().to_string();
    for part in ["the card still reads", "then request the device again"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert!(queue.pop_used().unwrap().is_none(), "the chain is completed while the card reads it");

    // The frontend connects to the same process again, whose device can be stopped now.
    let (mut frontend, _) = connect();
    stuck.in_use.store(false, Ordering::Relaxed);
    frontend.start(&queue, queue.last_used_idx()).unwrap();
    stuck.wait_popped(2);
    tokens[1].cancel();
    let accepted = request(second_new).map(|offer| offer.accept(&device, |_| None));
    assert_eq!(old.join().unwrap(), Ok(()));
    let (_service, _record) = accepted.unwrap().unwrap();
    assert_eq!(queue.pop_used().unwrap().map(|used| used.token), Some(7));
}

#[test]
fn a_live_upgrade_waits_for_a_queue_that_is_being_drained() {
    let _log = Log::new();
    let (near, far) = UnixStream::pair().unwrap();
    let (old_end, new_end) = UnixStream::pair().unwrap();
    let popped = Arc::<AtomicUsize>::default();
    let device: Arc<dyn Device> = Arc::new(SlowDevice { popped: Arc::clone(&popped) });
    let (cancel, record) = (Cancel::new().unwrap(), InFlightRecord::new(1).unwrap());
    let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
    let mut service = Service::new(FrontendSource::Connected(Box::new(channel)));
    let (served, token) = (Arc::clone(&device), cancel.clone());
    let old = std::thread::spawn(move || {
        let ended = service.serve(&served, &record, &token).unwrap_err();
        assert!(matches!(ended, ServeError::Channel(towline_channel::Error::Cancelled)), "{ended}");
        let to = UnixChannel::new(old_end.into(), "the new process").unwrap();
        live_upgrade(service, &served, &[], &record, &to).map_err(|aborted| aborted.error.to_string())
    });
    let mut frontend = Frontend::new(near).unwrap();
    let features = frontend.negotiate(0, 0, protocol::REPLY_ACK).unwrap().features;
    let memory = Arc::new(MemoryArena::new(1 << 20).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut queue = Queue::new(&memory, 0, QueueOptions { size: 16, features }).unwrap();
    frontend.start(&queue, 0).unwrap();
    let buffer = QueueBuffer { guest: memory.alloc(8, 8), len: 8 };
    assert!(queue.add(&[], &[buffer], 7));
    queue.publish();
    let until = Instant::now() + WITHIN;
    while popped.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < until, "the chain is not popped");
        std::thread::yield_now();
    }
    // What a new process does by connecting: serving ends, and the rings of its session are stopped with the same token.
    cancel.cancel();
    let offer = UpgradeOffer::request(Box::new(UnixChannel::new(new_end.into(), "the old process").unwrap()));
    let accepted = offer.map(|offer| offer.accept(&device, |_| None));
    assert_eq!(old.join().unwrap(), Ok(()));
    let (_service, _record) = accepted.unwrap().unwrap();
    assert_eq!(queue.pop_used().unwrap().map(|used| used.token), Some(7));
}
