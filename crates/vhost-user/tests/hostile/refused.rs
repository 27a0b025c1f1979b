//! Devices that take no connection for some time, or take some time to end one.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_channel::UnixChannel;
use towline_frontend::Frontend;
use towline_vhost_user::{
    Address, Cancel, Device, Frontends, Next, Queues, Record, Refusal, ServeError, Service, Worker, serve,
};

use crate::backend::{Log, WITHIN};

/// How long a connection is watched that nobody closes.
const WATCHED: Duration = Duration::from_millis(300);

#[derive(Default)]
struct Leaving {
    free: AtomicBool,
    /// How often it was asked for a worker.
    asked: AtomicU64,
}

struct Idle;

impl Device for Leaving {
    fn name(&self) -> &str {
        "leaving"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, Refusal> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.free.load(Ordering::Relaxed) {
            true => Ok(Box::new(Idle)),
            false => Err(Refusal::for_now("a card still reads")),
        }
    }
}

impl Worker for Idle {
    fn run(&mut self, _: &mut Queues<'_>) -> Next {
        Next::Wait
    }
}

struct Backend {
    device: Arc<Leaving>,
    cancel: Cancel,
    thread: JoinHandle<Result<(), ServeError>>,
}

impl Backend {
    fn start(frontends: Frontends) -> Self {
        let (device, cancel) = (Arc::<Leaving>::default(), Cancel::new().unwrap());
        let (served, token) = (Arc::clone(&device), cancel.clone());
        let serve = move || {
            let device: Arc<dyn Device> = served;
            Service::new(frontends).serve(&device, &Record::new(1)?, &token)
        };
        Self { device, cancel, thread: std::thread::spawn(serve) }
    }

    fn end(self) {
        self.cancel.cancel();
        let outcome = self.thread.join().unwrap();
        assert!(
            matches!(outcome, Err(ServeError::Channel(towline_channel::Error::Cancelled))),
            "{outcome:?}"
        );
    }
}

#[track_caller]
fn is_closed(stream: &mut UnixStream) {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "its frontend waits, with its guest");
}

fn is_served(stream: UnixStream) {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    Frontend::new(stream).unwrap().negotiate(0, 0, 0).unwrap();
}

#[test]
fn connections_are_closed_until_the_device_takes_one() {
    let log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("listen.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let backend = Backend::start(Frontends::from_fd(OwnedFd::from(listener)).unwrap());
    (0..3).for_each(|_| is_closed(&mut UnixStream::connect(&path).unwrap()));
    backend.device.free.store(true, Ordering::Relaxed);
    is_served(UnixStream::connect(&path).unwrap());
    assert_eq!(log.count("a card still reads"), 1);
    backend.end();
}

#[test]
fn a_frontend_that_listens_is_connected_to_each_second() {
    let log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("frontend.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let began = Instant::now();
    let backend = Backend::start(Frontends::Connect(Address::Unix(path)));
    (0..3).for_each(|_| is_closed(&mut listener.accept().unwrap().0));
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    backend.device.free.store(true, Ordering::Relaxed);
    is_served(listener.accept().unwrap().0);
    assert_eq!(log.count("a card still reads"), 1);
    backend.end();
}

#[test]
fn the_only_connection_is_kept() {
    let _log = Log::new();
    let (mut near, far) = UnixStream::pair().unwrap();
    let backend = Backend::start(Frontends::from_fd(far.into()).unwrap());
    near.set_read_timeout(Some(WATCHED)).unwrap();
    while backend.device.asked.load(Ordering::Relaxed) < 2 {
        assert_eq!(near.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    backend.device.free.store(true, Ordering::Relaxed);
    is_served(near);
    backend.thread.join().unwrap().unwrap();
}

/// A device each of whose workers ends when all of them do.
struct Together(Arc<Barrier>);

impl Device for Together {
    fn name(&self) -> &str {
        "together"
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

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, Refusal> {
        Ok(Box::new(Part(Arc::clone(&self.0))))
    }
}

struct Part(Arc<Barrier>);

impl Worker for Part {
    fn run(&mut self, _: &mut Queues<'_>) -> Next {
        Next::Wait
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.0.wait();
    }
}

#[test]
fn workers_end_at_the_same_time() {
    let log = Log::new();
    let (near, far) = UnixStream::pair().unwrap();
    let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
    let device: Arc<dyn Device> = Arc::new(Together(Arc::new(Barrier::new(3))));
    let backend = std::thread::spawn(move || serve(&channel, &device, &Cancel::new().unwrap()));
    is_served(near);
    backend.join().unwrap().unwrap();
    assert_eq!(log.count("a worker does not end"), 0, "each waits for the one before");
}
