//! Devices that refuse connections temporarily, or take time to end one.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_channel::UnixChannel;
use towline_frontend::Frontend;
use towline_frontend::wire::{RequestCode, encode_u64s, protocol};
use towline_vhost_user::{
    Address, BackendError, Cancel, Device, FrontendSource, InFlightRecord, Next, Queues, ServeError, Service,
    Worker, serve,
};

use crate::backend::{Log, WITHIN};

/// Time for which a connection is expected to stay open.
const STAYS_OPEN: Duration = Duration::from_millis(300);

#[derive(Default)]
struct Unavailable {
    available: AtomicBool,
    /// Number of workers requested.
    requests: AtomicU64,
}

struct Idle;

impl Device for Unavailable {
    fn name(&self) -> &str {
        "unavailable"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        if !self.available.load(Ordering::Relaxed) {
            return Err(BackendError::temporary("a card still reads"));
        }
        Ok(Box::new(Idle))
    }
}

impl Worker for Idle {
    fn run(&mut self, _: &mut Queues<'_>) -> Next {
        Next::Wait
    }
}

struct Backend {
    device: Arc<Unavailable>,
    cancel: Cancel,
    thread: JoinHandle<Result<(), ServeError>>,
}

impl Backend {
    fn start(frontends: FrontendSource) -> Self {
        let (device, cancel) = (Arc::<Unavailable>::default(), Cancel::new().unwrap());
        let (served, token) = (Arc::clone(&device), cancel.clone());
        let serve = move || {
            let device: Arc<dyn Device> = served;
            Service::new(frontends).serve(&device, &InFlightRecord::new(1)?, &token)
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
fn assert_closed(stream: &mut UnixStream) {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection is not closed");
}

fn assert_served(stream: UnixStream) {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    Frontend::new(stream).unwrap().negotiate(0, 0, 0).unwrap();
}

#[test]
fn connections_are_closed_until_the_device_accepts_one() {
    let log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("listen.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let backend = Backend::start(FrontendSource::from_fd(OwnedFd::from(listener)).unwrap());
    (0..3).for_each(|_| assert_closed(&mut UnixStream::connect(&path).unwrap()));
    backend.device.available.store(true, Ordering::Relaxed);
    assert_served(UnixStream::connect(&path).unwrap());
    assert_eq!(log.count("a card still reads"), 1);
    backend.end();
}

#[test]
fn a_listening_frontend_is_connected_to_every_second() {
    let log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("frontend.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let began = Instant::now();
    let backend = Backend::start(FrontendSource::Connect(Address::Unix(path)));
    (0..3).for_each(|_| assert_closed(&mut listener.accept().unwrap().0));
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    backend.device.available.store(true, Ordering::Relaxed);
    assert_served(listener.accept().unwrap().0);
    assert_eq!(log.count("a card still reads"), 1);
    backend.end();
}

#[test]
fn the_only_possible_connection_stays_open() {
    let _log = Log::new();
    let (mut near, far) = UnixStream::pair().unwrap();
    let backend = Backend::start(FrontendSource::from_fd(far.into()).unwrap());
    near.set_read_timeout(Some(STAYS_OPEN)).unwrap();
    while backend.device.requests.load(Ordering::Relaxed) < 2 {
        assert_eq!(near.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    backend.device.available.store(true, Ordering::Relaxed);
    assert_served(near);
    backend.thread.join().unwrap().unwrap();
}

/// A device whose workers end only together.
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

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
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
fn workers_end_concurrently() {
    let log = Log::new();
    let (near, far) = UnixStream::pair().unwrap();
    let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
    let device: Arc<dyn Device> = Arc::new(Together(Arc::new(Barrier::new(3))));
    let backend = std::thread::spawn(move || serve(&channel, &device, &Cancel::new().unwrap()));
    assert_served(near);
    backend.join().unwrap().unwrap();
    assert_eq!(log.count("a thread does not end"), 0, "a worker waited for another to end");
}

/// QEMU requests no acknowledgement of it.
#[test]
fn an_announcement_that_fails_does_not_end_the_connection() {
    const RARP: u64 = 1 << 2;
    let log = Log::new();
    let (near, far) = UnixStream::pair().unwrap();
    let frontends = FrontendSource::from_fd(far.into()).unwrap();
    let device: Arc<dyn Device> = Arc::new(crate::harness::Echo);
    let backend = std::thread::spawn(move || frontends.serve(&device, &Cancel::new().unwrap()));
    let mut frontend = Frontend::new(near).unwrap();
    frontend.negotiate(0, 0, RARP | protocol::REPLY_ACK).unwrap();
    let mac = encode_u64s(&[0x5634_1200_5452]);
    frontend.send_unacked(RequestCode::SEND_RARP, &mac, &[]).unwrap();
    assert!(frontend.number(RequestCode::GET_FEATURES).is_ok(), "the connection is served on");
    assert_eq!(log.count("the guest is not announced"), 1);
    assert!(
        frontend.request(RequestCode::SEND_RARP, &mac, &[]).is_err(),
        "it is refused, if that is asked for"
    );
    drop(frontend);
    backend.join().unwrap().unwrap();
}
