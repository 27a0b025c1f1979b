//! A backend with two rings, a driver for each, and the backend's log.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use towline_channel::UnixChannel;
use towline_frontend::wire::{feature, protocol};
use towline_frontend::{Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions, wait_any};
use towline_vhost_user::{Cancel, Device, ServeError, serve};

use crate::harness::Echo;

pub(crate) const WITHIN: Duration = Duration::from_secs(60);
pub(crate) const SIZE: u16 = 16;
const NEEDED: u64 = protocol::REPLY_ACK | protocol::LOG_SHMFD | protocol::MEM_SLOTS;

/// A backend in a thread, and its guest.
pub(crate) struct Pair {
    pub(crate) frontend: Frontend,
    pub(crate) memory: Arc<MemoryArena>,
    pub(crate) features: u64,
    pub(crate) rings: [Queue; 2],
    backend: Option<JoinHandle<Result<(), ServeError>>>,
    buffers: u64,
    count: u64,
}

impl Pair {
    /// A pair with negotiated features and both rings running.
    pub(crate) fn start() -> Self {
        Self::with(feature::EVENT_IDX | feature::INDIRECT)
    }

    pub(crate) fn with(wished: u64) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
        let backend = std::thread::spawn(move || {
            let device: Arc<dyn Device> = Arc::new(Echo);
            serve(&channel, &device, &Cancel::new().unwrap())
        });
        let mut frontend = Frontend::new(near).unwrap();
        let features = frontend.negotiate(0, wished, NEEDED).unwrap().features;
        let memory = Arc::new(MemoryArena::with_regions(1 << 20, 2).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let queue = |index| Queue::new(&memory, index, QueueOptions { size: SIZE, features }).unwrap();
        let rings = [queue(0), queue(1)];
        for ring in &rings {
            frontend.start(ring, 0).unwrap();
        }
        let buffers = memory.alloc(8192, 4096);
        Self { frontend, memory, features, rings, backend: Some(backend), buffers, count: 0 }
    }

    /// The second ring echoes a buffer.
    #[track_caller]
    pub(crate) fn other_echoes(&mut self) {
        self.echo(1);
    }

    /// A ring echoes a buffer.
    #[track_caller]
    pub(crate) fn echo(&mut self, ring: usize) {
        self.count += 1;
        let (out, back) = (self.buffers, self.buffers + 4096);
        self.memory.write(out, &self.count.to_le_bytes());
        let ring = &mut self.rings[ring];
        assert!(ring.add(
            &[QueueBuffer { guest: out, len: 8 }],
            &[QueueBuffer { guest: back, len: 8 }],
            self.count
        ));
        ring.publish();
        ring.wait(WITHIN).unwrap();
        let used = ring.pop_used().unwrap().unwrap();
        assert_eq!((used.token, used.len), (self.count, 8));
        assert_eq!(self.memory.bytes(back, 8), self.count.to_le_bytes());
    }

    /// Waits until the backend reports a fault of the first ring.
    #[track_caller]
    pub(crate) fn wait_fault(&self) {
        assert!(wait_any(&[self.rings[0].err_fd()], WITHIN).unwrap(), "the fault is not reported");
    }

    /// The guest resets its device: the first ring is stopped and started at other addresses.
    #[track_caller]
    pub(crate) fn reset_first(&mut self) {
        self.frontend.stop(0).unwrap();
        let options = QueueOptions { size: SIZE, features: self.features };
        self.rings[0] = Queue::new(&self.memory, 0, options).unwrap();
        self.frontend.start(&self.rings[0], 0).unwrap();
        self.echo(0);
    }

    /// Waits until the backend closes the connection.
    pub(crate) fn wait_closed_by_backend(mut self) -> Result<(), ServeError> {
        let backend = self.backend.take().unwrap();
        let until = std::time::Instant::now() + WITHIN;
        while !backend.is_finished() {
            assert!(std::time::Instant::now() < until, "the backend does not close the connection");
            std::thread::yield_now();
        }
        backend.join().unwrap()
    }

    pub(crate) fn end(mut self) -> Result<(), ServeError> {
        self.frontend.stream().shutdown(std::net::Shutdown::Both).unwrap();
        self.backend.take().unwrap().join().unwrap()
    }
}

/// The log of this process. Tests that read it run one after the other.
pub(crate) struct Log(MutexGuard<'static, ()>);

#[derive(Clone)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

static TURN: Mutex<()> = Mutex::new(());
static LINES: OnceLock<Lines> = OnceLock::new();

impl Log {
    pub(crate) fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let lines = LINES.get_or_init(|| {
            let lines = Lines(Arc::default());
            let writer = lines.clone();
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
            lines
        });
        lines.0.lock().unwrap().clear();
        Self(turn)
    }

    /// Number of lines that contain this text.
    pub(crate) fn count(&self, text: &str) -> usize {
        let _ = &self.0;
        let lines = LINES.get().unwrap().0.lock().unwrap();
        String::from_utf8_lossy(&lines).lines().filter(|line| line.contains(text)).count()
    }
}
