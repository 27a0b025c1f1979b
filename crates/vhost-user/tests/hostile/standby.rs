//! Two frontends of one device, as when the QEMU of a guest is replaced: one at a time has running rings.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_channel::{Address, Listener};
use towline_frontend::wire::{RequestCode, feature, protocol};
use towline_frontend::{Error, Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions};
use towline_vhost_user::{BackendError, Cancel, Device, FrontendSource, ServeError, Worker};

use crate::backend::{SIZE, WITHIN};
use crate::harness::Echo;

/// A device that serves two frontends.
#[derive(Default)]
struct Shared {
    /// Features that were acknowledged last.
    acknowledged: AtomicU64,
}

impl Device for Shared {
    fn name(&self) -> &str {
        "shared"
    }

    fn queue_count(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        3
    }

    fn allows_standby(&self) -> bool {
        true
    }

    fn acknowledge(&self, features: u64) -> Result<(), BackendError> {
        self.acknowledged.store(features & 3, SeqCst);
        Ok(())
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(Echo))
    }
}

/// A served device, and the rings of its guest.
struct Scene {
    directory: tempfile::TempDir,
    device: Arc<Shared>,
    cancel: Cancel,
    server: Option<JoinHandle<Result<(), ServeError>>>,
    memory: Arc<MemoryArena>,
    rings: Vec<Queue>,
    buffers: u64,
    count: u64,
}

const FEATURES: u64 = feature::VERSION_1 | feature::PROTOCOL_FEATURES;

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&Address::Unix(directory.path().join("socket"))).unwrap();
        let (device, cancel) = (Arc::<Shared>::default(), Cancel::new().unwrap());
        let (served, ends): (Arc<dyn Device>, _) = (device.clone(), cancel.clone());
        let server = std::thread::spawn(move || FrontendSource::Listen(listener).serve(&served, &ends));
        let memory = Arc::new(MemoryArena::new(1 << 20).unwrap());
        let options = QueueOptions { size: SIZE, features: FEATURES };
        let rings = (0..2).map(|index| Queue::new(&memory, index, options).unwrap()).collect();
        let buffers = memory.alloc(8192, 4096);
        Self { directory, device, cancel, server: Some(server), memory, rings, buffers, count: 0 }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("socket")
    }

    /// Starts the rings of this frontend where they were stopped.
    fn start(&self, frontend: &mut Frontend, bases: [u16; 2]) -> Result<(), Error> {
        frontend.set_mem_table(Some(&self.memory))?;
        self.rings.iter().zip(bases).try_for_each(|(ring, base)| frontend.start(ring, base))
    }

    /// Both rings echo.
    #[track_caller]
    fn echo(&mut self) {
        for ring in &mut self.rings {
            self.count += 1;
            let (out, back) = (self.buffers, self.buffers + 4096);
            self.memory.write(out, &self.count.to_le_bytes());
            assert!(ring.add(
                &[QueueBuffer { guest: out, len: 8 }],
                &[QueueBuffer { guest: back, len: 8 }],
                self.count
            ));
            ring.publish();
            ring.wait(WITHIN).unwrap();
            assert_eq!(ring.pop_used().unwrap().unwrap().token, self.count);
            assert_eq!(self.memory.bytes(back, 8), self.count.to_le_bytes());
        }
    }

    fn acknowledged(&self) -> u64 {
        self.device.acknowledged.load(SeqCst)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.cancel.cancel();
        let outcome = self.server.take().unwrap().join();
        if !std::thread::panicking() {
            assert!(matches!(outcome, Ok(Err(ServeError::Channel(_)))), "{outcome:?}");
        }
    }
}

/// A frontend that has negotiated protocol features only.
fn connect(path: &Path) -> Frontend {
    let mut frontend = Frontend::connect(path, WITHIN).unwrap();
    let refused = frontend.negotiate(0, 3, protocol::REPLY_ACK);
    if let Err(error) = refused {
        assert!(matches!(error, Error::Reply { .. }), "{error}");
    }
    frontend
}

fn stop(frontend: &mut Frontend) -> [u16; 2] {
    [0, 1].map(|ring| frontend.stop(ring).unwrap())
}

#[track_caller]
fn assert_refused(outcome: &Result<(), Error>) {
    assert!(matches!(outcome, Err(Error::Reply { .. })), "{outcome:?}");
}

#[test]
fn a_second_frontend_starts_the_rings_once_they_are_stopped() {
    let mut scene = Scene::new();
    let mut old = connect(&scene.path());
    old.set_features(FEATURES | 1).unwrap();
    scene.start(&mut old, [0, 0]).unwrap();
    scene.echo();
    // The second frontend gets replies, and nothing of the device.
    let mut new = connect(&scene.path());
    assert_ne!(new.number(RequestCode::GET_FEATURES).unwrap(), 0);
    assert_refused(&new.set_features(FEATURES | 2));
    assert_eq!(scene.acknowledged(), 1);
    scene.echo();
    let bases = stop(&mut old);
    new.set_features(FEATURES | 2).unwrap();
    assert_eq!(scene.acknowledged(), 2);
    scene.start(&mut new, bases).unwrap();
    scene.echo();
    // The first one can no longer interfere.
    assert_refused(&old.set_features(FEATURES));
    assert_refused(&scene.start(&mut old, bases));
    scene.echo();
    // The switchover is given up: the first one has its rings again, with the features that it has
    // negotiated.
    let bases = stop(&mut new);
    scene.start(&mut old, bases).unwrap();
    assert_eq!(scene.acknowledged(), 1);
    scene.echo();
}

#[test]
fn the_second_frontend_has_the_device_of_the_first_one_that_ends() {
    let mut scene = Scene::new();
    let mut old = connect(&scene.path());
    scene.start(&mut old, [0, 0]).unwrap();
    scene.echo();
    // A frontend that ends before it has the device leaves the first one alone; the next one takes its place.
    drop(connect(&scene.path()));
    let mut new = connect(&scene.path());
    scene.echo();
    let bases = stop(&mut old);
    scene.start(&mut old, bases).unwrap();
    scene.echo();
    let bases = stop(&mut old);
    drop(old);
    new.set_features(FEATURES).unwrap();
    scene.start(&mut new, bases).unwrap();
    scene.echo();
    let mut last = connect(&scene.path());
    let bases = stop(&mut new);
    drop(new);
    last.set_features(FEATURES).unwrap();
    scene.start(&mut last, bases).unwrap();
    scene.echo();
}

#[test]
fn an_invalid_second_frontend_ends_alone() {
    let mut scene = Scene::new();
    let mut old = connect(&scene.path());
    scene.start(&mut old, [0, 0]).unwrap();
    for _ in 0..3 {
        let mut bad = connect(&scene.path());
        bad.send(&[0xff; 12], RequestCode("any", 1), &[]).unwrap();
        assert!(bad.number(RequestCode::GET_FEATURES).is_err());
        scene.echo();
        // A part of a message does not delay requests of the first one.
        let mut slow = connect(&scene.path());
        slow.send(&[1, 0], RequestCode("any", 1), &[]).unwrap();
        let begun = Instant::now();
        for _ in 0..200 {
            old.number(RequestCode::GET_FEATURES).unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "each waited: {:?}", begun.elapsed());
        scene.echo();
        drop(slow);
    }
}

#[test]
fn a_second_frontend_that_sends_byte_by_byte_does_not_delay_the_first() {
    let scene = Scene::new();
    let mut owner = connect(&scene.path());
    scene.start(&mut owner, [0; 2]).unwrap();
    let slow = std::os::unix::net::UnixStream::connect(scene.path()).unwrap();
    let sends = std::thread::spawn(move || {
        // The header of a table of memory, and as many bytes as it may have.
        let header = [5u32, 1, 264].map(u32::to_le_bytes).concat();
        let bytes = header.into_iter().chain([0; 264]);
        for byte in bytes {
            if (&slow).write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let begun = Instant::now();
    // Until its connection is closed, as the rest of a message has ten seconds.
    while !sends.is_finished() {
        let asked = Instant::now();
        owner.number(RequestCode::GET_FEATURES).unwrap();
        assert!(asked.elapsed() < Duration::from_secs(5), "the first one waited");
    }
    sends.join().unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(9), "{:?}", begun.elapsed());
}
