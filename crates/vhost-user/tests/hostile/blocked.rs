//! Frontends that make threads of the backend wait: the process can be ended, and the threads belong to one
//! connection only.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_channel::UnixChannel;
use towline_frontend::wire::{RequestCode, encode_u32_pair, protocol};
use towline_frontend::{Error, Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions};
use towline_vhost_user::{Cancel, Device, FrontendSource, ServeError, serve};

use crate::backend::{Log, WITHIN};

/// A backend that serves one connection on a thread.
struct OneSession {
    near: UnixStream,
    cancel: Cancel,
    thread: JoinHandle<Result<(), ServeError>>,
}

impl OneSession {
    fn start() -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        let cancel = Cancel::new().unwrap();
        let token = cancel.clone();
        let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
        let thread = std::thread::spawn(move || {
            let device: Arc<dyn Device> = Arc::new(crate::harness::Echo);
            serve(&channel, &device, &token)
        });
        Self { near, cancel, thread }
    }
}

/// Starts the ring of a session whose worker blocks: in a write to an eventfd that the frontend filled and
/// made blocking again.
fn block_worker(stream: UnixStream) -> (Frontend, Queue) {
    let mut frontend = Frontend::new(stream).unwrap();
    let features = frontend.negotiate(0, 0, protocol::REPLY_ACK).unwrap().features;
    let memory = Arc::new(MemoryArena::new(1 << 20).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut queue = Queue::new(&memory, 0, QueueOptions { size: 16, features }).unwrap();
    frontend.start(&queue, 0).unwrap();
    // Almost the maximum of the counter, so a write blocks.
    rustix::io::write(queue.call_fd(), &(u64::MAX - 2).to_ne_bytes()).unwrap();
    while rustix::io::write(queue.call_fd(), &1u64.to_ne_bytes()).is_ok() {}
    rustix::io::ioctl_fionbio(queue.call_fd(), false).unwrap();
    queue.enable_callback(1);
    let buffer = QueueBuffer { guest: memory.alloc(8, 8), len: 8 };
    assert!(queue.add(&[buffer], &[], 0));
    queue.publish();
    // The worker signals after it has published.
    let until = Instant::now() + WITHIN;
    while queue.pop_used().unwrap().is_none() {
        assert!(Instant::now() < until, "the chain is not completed");
        std::thread::yield_now();
    }
    (frontend, queue)
}

#[test]
fn a_blocked_worker_does_not_keep_the_process_from_ending() {
    let _log = Log::new();
    let OneSession { near, cancel, thread: backend } = OneSession::start();
    let (mut frontend, queue) = block_worker(near);
    frontend.send_unacked(RequestCode::GET_VRING_BASE, &encode_u32_pair(0, 0), &[]).unwrap();
    cancel.cancel();
    let begun = Instant::now();
    let error = backend.join().unwrap().unwrap_err();
    assert!(begun.elapsed() < WITHIN, "{:?}", begun.elapsed());
    assert!(!matches!(error, ServeError::Queues { .. }), "{error}");
    // Unblock the worker, so this test leaks no thread.
    rustix::io::read(queue.call_fd(), &mut [0; 8]).unwrap();
    let _: Option<Error> = frontend.stop(0).err();
}

/// Number of threads of this process with the name of the test device's only worker.
fn workers() -> usize {
    let names = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim_end() == "echo-0").count()
}

#[test]
fn a_frontend_leaves_behind_the_threads_of_one_connection_only() {
    let _log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let cancel = Cancel::new().unwrap();
    let token = cancel.clone();
    let backend = std::thread::spawn(move || {
        let device: Arc<dyn Device> = Arc::new(crate::harness::Echo);
        FrontendSource::from_fd(listener.into()).unwrap().serve(&device, &token)
    });
    let (frontend, queue) = block_worker(UnixStream::connect(&path).unwrap());
    drop(frontend);
    // Each attempt is refused, without threads, while the first one's worker blocks.
    for _ in 0..3 {
        let mut refused = Frontend::connect(&path, WITHIN).unwrap();
        assert!(refused.negotiate(0, 0, protocol::REPLY_ACK).is_err(), "served beside an orphaned thread");
    }
    assert_eq!(workers(), 1);
    rustix::io::read(queue.call_fd(), &mut [0; 8]).unwrap();
    let until = Instant::now() + WITHIN;
    while Frontend::connect(&path, WITHIN).unwrap().negotiate(0, 0, protocol::REPLY_ACK).is_err() {
        assert!(Instant::now() < until, "a frontend is still refused");
    }
    cancel.cancel();
    assert!(backend.join().unwrap().is_err());
}

#[test]
fn a_message_that_is_sent_byte_by_byte_does_not_keep_the_process_from_ending() {
    let _log = Log::new();
    let OneSession { near, cancel, thread: backend } = OneSession::start();
    // A table of memory whose payload comes slowly.
    let header = [5u32, 1, 8].map(u32::to_le_bytes).concat();
    for byte in header.iter().chain(&[0; 4]) {
        (&near).write_all(&[*byte]).unwrap();
    }
    cancel.cancel();
    let until = Instant::now() + Duration::from_secs(5);
    while !backend.is_finished() {
        assert!(Instant::now() < until, "the session waits for the rest of a message");
        std::thread::sleep(Duration::from_millis(10));
    }
    let error = backend.join().unwrap().unwrap_err();
    let cancelled = matches!(error, ServeError::Channel(towline_channel::Error::Cancelled));
    assert!(cancelled || error.to_string().contains("the rest of a message"), "{error}");
}
