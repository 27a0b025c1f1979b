//! Live memory with threads that write in it while it is sent: the state at the stop arrives.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use common::*;
use fastrand::Rng;
use towline_migration::outgoing::{self, Unconverged};
use towline_migration::tracker::{DirtyLogReader, DirtyLogTracker, DirtyTracker, WriteProtect};
use towline_migration::{Error, LiveBlock, Memory, RamMapping, SourceMemory, Span, TrackerError};
use towline_protocol::{BlockIndex, PageRef};

const BLOCKS: [(&str, u64); 2] = [("pc.bios", 3), ("pc.ram", 1200)];

/// The tracker, or why not.
fn write_protect(test: &str) -> Option<WriteProtect> {
    match WriteProtect::of_shared() {
        Ok(tracker) => Some(tracker),
        Err(error) => {
            let _ = writeln!(io::stderr(), "SKIPPED {test}: {error}");
            None
        }
    }
}

/// Memory that stays mapped: the engine's threads outlive no test, but the compiler cannot know.
fn anonymous(pages: u64) -> Span<'static> {
    Box::leak(Box::new(RamMapping::anonymous(pages as usize * PAGE).unwrap())).span()
}

fn shared(pages: u64) -> Span<'static> {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, pages * PAGE as u64).unwrap();
    Box::leak(Box::new(RamMapping::shared(file.as_fd(), 0, pages as usize * PAGE).unwrap())).span()
}

/// vCPUs of a kind: threads that count in random pages until they are stopped.
#[derive(Default)]
struct Vcpus {
    is_over: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stops: AtomicU32,
    starts: AtomicU32,
    counts: AtomicU64,
}

impl Vcpus {
    fn run(
        self: &Arc<Self>,
        spans: &[Span<'static>],
        threads: u64,
        written: impl Fn(usize, usize) + Clone + Send + 'static,
    ) {
        for seed in 0..threads {
            let (vcpus, spans, written) = (Arc::clone(self), spans.to_vec(), written.clone());
            let work = move || {
                let mut rng = Rng::with_seed(seed);
                while !vcpus.is_over.load(Ordering::Relaxed) {
                    let block = rng.usize(0..spans.len());
                    let offset = rng.usize(0..spans[block].length() / 8) * 8;
                    spans[block].word(offset).fetch_add(1, Ordering::Relaxed);
                    written(block, offset);
                    vcpus.counts.fetch_add(1, Ordering::Relaxed);
                }
            };
            self.threads.lock().unwrap().push(thread::spawn(work));
        }
    }

    fn stop(&self) {
        self.stops.fetch_add(1, Ordering::Relaxed);
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.lock().unwrap().drain(..).for_each(|thread| thread.join().unwrap());
    }
}

fn live(
    spans: &[Span<'static>],
    tracker: impl DirtyTracker + 'static,
    vcpus: &Arc<Vcpus>,
) -> Arc<SourceMemory<'static>> {
    let block = |(&(name, _), &span): (&(&'static str, u64), &Span<'static>)| LiveBlock { name, span };
    let blocks: Vec<_> = BLOCKS.iter().zip(spans).map(block).collect();
    let (stopper, starter) = (Arc::clone(vcpus), Arc::clone(vcpus));
    let memory = SourceMemory::new(configuration(MACHINES[0]), &blocks, tracker).unwrap().with_hooks(
        move || {
            stopper.stop();
            Ok(())
        },
        move || {
            starter.starts.fetch_add(1, Ordering::Relaxed);
            Ok(())
        },
    );
    memory.set_device_state(device_state(1));
    Arc::new(memory)
}

/// Compares byte by byte.
fn differs(spans: &[Span<'_>], sink: &Memory) -> Option<String> {
    let (mut a, mut b) = (vec![0; PAGE], vec![0; PAGE]);
    for (block, span) in spans.iter().enumerate() {
        for offset in (0..span.length()).step_by(PAGE) {
            span.read(offset, &mut a);
            sink.read(at(block, offset as u64), &mut b);
            if a != b {
                return Some(format!("page {} of block {block}", offset / PAGE));
            }
        }
    }
    None
}

#[test]
fn a_guest_that_hammers_its_memory_arrives_as_it_was_when_it_stopped() {
    let test = "a_guest_that_hammers_its_memory_arrives_as_it_was_when_it_stopped";
    for lanes in [0, 1, 4] {
        for (kind, map) in [("anonymous", anonymous as fn(u64) -> Span<'static>), ("memfd", shared)] {
            let Some(tracker) = write_protect(test) else { return };
            let spans: Vec<_> = BLOCKS.iter().map(|&(_, pages)| map(pages)).collect();
            let vcpus = Arc::<Vcpus>::default();
            let guest = live(&spans, tracker, &vcpus);
            vcpus.run(&spans, 2, |_, _| {});
            let sink = empty(MACHINES[0], &BLOCKS);
            let outcome =
                migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default());
            outcome.expect_success();
            assert_eq!(differs(&spans, &sink), None, "{kind}, {lanes} lanes");
            assert!(outcome.source.statistics.dirty_sync_count > 1);
            assert!(vcpus.counts.load(Ordering::Relaxed) > 0);
            let (stops, starts) = (vcpus.stops.load(Ordering::Relaxed), vcpus.starts.load(Ordering::Relaxed));
            assert_eq!((stops, starts), (1, 0));
        }
    }
}

/// A dirty log in software, as KVM's is in the kernel.
#[derive(Debug)]
struct Log {
    words: Vec<Vec<AtomicU64>>,
    is_on: AtomicBool,
    /// Number of further times that it can be read.
    left: AtomicU32,
}

impl Log {
    fn new(spans: &[Span<'_>], left: u32) -> Arc<Self> {
        let words = |span: &Span<'_>| (0..span.length() / PAGE).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { words: spans.iter().map(words).collect(), is_on: false.into(), left: left.into() })
    }

    fn mark(&self, block: usize, offset: usize) {
        let page = offset / PAGE;
        self.words[block][page / 64].fetch_or(1 << (page % 64), Ordering::Release);
    }
}

/// The tests read it while it is used.
struct Shared(Arc<Log>);

impl DirtyLogReader for Shared {
    fn start(&self) -> io::Result<()> {
        self.0.is_on.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn fetch_and_clear(&self, block: BlockIndex, words: &mut [u64]) -> io::Result<()> {
        let left = self.0.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map_err(|_| io::Error::other("the log is gone"))?;
        for (word, own) in words.iter_mut().zip(&self.0.words[block.index()]) {
            *word = own.swap(0, Ordering::Acquire);
        }
        // A page that is always written, so no migration ends before its last pass.
        self.0.mark(block.index(), 0);
        Ok(())
    }

    fn stop(&self) -> io::Result<()> {
        self.0.is_on.store(false, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn a_guest_is_tracked_by_a_dirty_log() {
    for lanes in [0, 2] {
        let spans: Vec<_> = BLOCKS.iter().map(|&(_, pages)| anonymous(pages)).collect();
        let (vcpus, log) = (Arc::<Vcpus>::default(), Log::new(&spans, u32::MAX));
        let guest = live(&spans, DirtyLogTracker::new(Shared(Arc::clone(&log))), &vcpus);
        let marker = Arc::clone(&log);
        vcpus.run(&spans, 2, move |block, offset| marker.mark(block, offset));
        let sink = empty(MACHINES[0], &BLOCKS);
        let outcome = migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default());
        outcome.expect_success();
        assert_eq!(differs(&spans, &sink), None, "{lanes} lanes");
        assert!(!log.is_on.load(Ordering::Relaxed));
    }
}

#[test]
fn a_tracker_that_fails_ends_the_migration() {
    // Of two blocks: at the start, after the first pass, and when the guest is stopped, after a second: the
    // first had no page with content.
    for (left, stops) in [(1, 0), (2, 0), (3, 0), (6, 1)] {
        let spans: Vec<_> = BLOCKS.iter().map(|&(_, pages)| anonymous(pages)).collect();
        let (vcpus, log) = (Arc::<Vcpus>::default(), Log::new(&spans, left));
        let guest = live(&spans, DirtyLogTracker::new(Shared(Arc::clone(&log))), &vcpus);
        let sink = empty(MACHINES[0], &BLOCKS);
        let one_pass = outgoing::Options { downtime_limit: WATCHDOG, ..options() };
        let outcome = migrate_over(vec![link(Kind::Unix, 2)], &guest, &sink, one_pass, &Arc::default());
        let error = match outcome.source.result.unwrap_err() {
            Error::Guest(error) => error.to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(error, format!("the dirty log of block {} cannot be read: the log is gone", left % 2));
        assert!(outcome.destination.result.is_err() && !sink.is_committed());
        let (stopped, started) = (vcpus.stops.load(Ordering::Relaxed), vcpus.starts.load(Ordering::Relaxed));
        assert_eq!((stopped, started), (stops, stops), "{left}");
        assert!(!log.is_on.load(Ordering::Relaxed));
    }
}

#[test]
fn a_guest_that_cannot_converge_continues_at_its_source() {
    let spans: Vec<_> = BLOCKS.iter().map(|&(_, pages)| anonymous(pages)).collect();
    spans.iter().for_each(|span| span.write(0, b"not zero"));
    let (vcpus, log) = (Arc::<Vcpus>::default(), Log::new(&spans, u32::MAX));
    let guest = live(&spans, DirtyLogTracker::new(Shared(Arc::clone(&log))), &vcpus);
    let sink = empty(MACHINES[0], &BLOCKS);
    let give_up = outgoing::Options { unconverged: Unconverged::GiveUp, ..options() };
    let outcome = migrate_over(vec![link(Kind::Unix, 2)], &guest, &sink, give_up, &Arc::default());
    let Error::CannotConverge(verdict) = outcome.source.result.unwrap_err() else { panic!() };
    assert_eq!(
        (verdict.left, verdict.downtime_limit),
        (2 * PAGE as u64, give_up.downtime_limit),
        "{verdict}"
    );
    assert_eq!(vcpus.stops.load(Ordering::Relaxed), 0, "the guest was never stopped");
    assert!(outcome.destination.result.is_err() && !sink.is_committed());
    assert!(!log.is_on.load(Ordering::Relaxed));
}

#[test]
fn writes_that_a_tracker_cannot_see_are_marked() {
    let Some(tracker) = write_protect("writes_that_a_tracker_cannot_see_are_marked") else { return };
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1203 * PAGE as u64).unwrap();
    let map = |offset: u64, pages: u64| {
        let region = RamMapping::shared(file.as_fd(), offset * PAGE as u64, pages as usize * PAGE).unwrap();
        Box::leak(Box::new(region)).span()
    };
    let spans = [map(0, 3), map(3, 1200)];
    let theirs = map(3, 1200);
    let device = Arc::<Mutex<Option<Arc<SourceMemory<'static>>>>>::default();
    let written = Arc::clone(&device);
    let block = |number: usize| LiveBlock { name: BLOCKS[number].0, span: spans[number] };
    let stop = move || {
        // A device's last write, through its own mapping.
        theirs.write(77 * PAGE + 1, b"device");
        written.lock().unwrap().as_ref().unwrap().mark_dirty(at(1, 77 * PAGE as u64 + 1), 6);
        Ok(())
    };
    let memory = SourceMemory::new(configuration(MACHINES[0]), &[block(0), block(1)], tracker).unwrap();
    let memory = Arc::new(memory.with_hooks(stop, || Ok(())));
    memory.set_device_state(device_state(1));
    *device.lock().unwrap() = Some(Arc::clone(&memory));
    let sink = empty(MACHINES[0], &BLOCKS);
    migrate_over(vec![link(Kind::Unix, 2)], &memory, &sink, options(), &Arc::default()).expect_success();
    assert_eq!(differs(&spans, &sink), None);
    *device.lock().unwrap() = None;
}

#[test]
fn untouched_memory_is_neither_sent_nor_allocated() {
    let Some(tracker) = write_protect("untouched_memory_is_neither_sent_nor_allocated") else { return };
    let spans: Vec<_> = BLOCKS.iter().map(|&(_, pages)| anonymous(pages)).collect();
    spans[1].write(100 * PAGE, &[1; 2 * PAGE]);
    let guest = live(&spans, tracker, &Arc::default());
    let sink = empty(MACHINES[0], &BLOCKS);
    let outcome = migrate_over(vec![link(Kind::Unix, 2)], &guest, &sink, options(), &Arc::default());
    outcome.expect_success();
    assert_eq!(differs_where_touched(&spans, &sink), None);
    let statistics = outcome.source.statistics;
    assert_eq!((statistics.normal, statistics.duplicate), (2, 1201));
    let mut untouched = 0;
    let again = WriteProtect::new().unwrap();
    again.start(&spans, &mut |_, length| untouched += length / PAGE as u64).unwrap();
    assert_eq!(untouched, 1201);
}

fn differs_where_touched(spans: &[Span<'_>], sink: &Memory) -> Option<usize> {
    let (mut a, mut b) = (vec![0; 2 * PAGE], vec![0; 2 * PAGE]);
    spans[1].read(100 * PAGE, &mut a);
    sink.read(at(1, 100 * PAGE as u64), &mut b);
    a.iter().zip(&b).position(|(a, b)| a != b)
}

/// A copy that is kept by copying what each harvest reports, while threads write. `TOWLINE_SEEDS` as in
/// `random.rs`.
#[test]
fn no_write_is_lost() {
    let seeds = std::env::var("TOWLINE_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    for seed in 0..seeds {
        let Some(tracker) = write_protect("no_write_is_lost") else { return };
        let mut rng = Rng::with_seed(seed);
        let map = if rng.bool() { anonymous } else { shared };
        let spans: Vec<_> = (0..rng.usize(1..4)).map(|_| map(rng.u64(1..600))).collect();
        for span in &spans {
            (0..rng.usize(0..200)).for_each(|_| span.write(rng.usize(0..span.length()), &[rng.u8(..)]));
        }
        let vcpus = Arc::<Vcpus>::default();
        vcpus.run(&spans, rng.u64(1..4), |_, _| {});
        let mut copy: Vec<_> = spans.iter().map(|span| vec![0; span.length()]).collect();
        let mut known_zero = Vec::new();
        tracker.start(&spans, &mut |page, length| known_zero.push((page, length))).unwrap();
        for (span, copy) in spans.iter().zip(&mut copy) {
            span.read(0, copy);
        }
        for (page, length) in known_zero {
            let start = page.offset as usize;
            copy[page.block.index()][start..start + length as usize].fill(0);
        }
        let rounds = rng.usize(1..30);
        for round in 0..=rounds {
            if round == rounds {
                vcpus.stop();
            }
            let mut report = |page: PageRef, length: u64| {
                let (start, end) = (page.offset as usize, (page.offset + length) as usize);
                spans[page.block.index()].read(start, &mut copy[page.block.index()][start..end]);
            };
            tracker.harvest(&spans, &mut report).unwrap();
        }
        for (block, span) in spans.iter().enumerate() {
            let mut now = vec![0; span.length()];
            span.read(0, &mut now);
            let lost = now.iter().zip(&copy[block]).position(|(now, copy)| now != copy);
            assert_eq!(lost.map(|byte| byte / PAGE), None, "seed {seed}: a page of block {block}");
        }
    }
}

#[test]
fn a_guest_that_cannot_be_tracked_is_not_sent() {
    struct Refuses;
    impl DirtyTracker for Refuses {
        fn start(&self, _: &[Span<'_>], _: &mut dyn FnMut(PageRef, u64)) -> Result<(), TrackerError> {
            Err(TrackerError::Shared { block: 1 })
        }
        fn harvest(&self, _: &[Span<'_>], _: &mut dyn FnMut(PageRef, u64)) -> Result<(), TrackerError> {
            Err(TrackerError::NotStarted)
        }
        fn stop(&self, _: &[Span<'_>]) -> Result<(), TrackerError> {
            Ok(())
        }
    }
    let spans: Vec<_> = BLOCKS.iter().map(|&(_, pages)| anonymous(pages)).collect();
    let vcpus = Arc::<Vcpus>::default();
    let guest = live(&spans, Refuses, &vcpus);
    let sink = empty(MACHINES[0], &BLOCKS);
    let outcome = migrate_over(vec![link(Kind::Unix, 0)], &guest, &sink, options(), &Arc::default());
    let error = outcome.source.result.unwrap_err().to_string();
    assert!(error.starts_with("block 1 is mapped shared: writes through other mappings"), "{error}");
    assert_eq!(outcome.source.statistics.transferred, 0);
    assert_eq!(vcpus.stops.load(Ordering::Relaxed), 0);
}

#[test]
fn blocks_that_cannot_be_are_refused() {
    let refused = |blocks: &[LiveBlock<'static>]| {
        let log = |_: BlockIndex, _: &mut [u64]| Ok(());
        SourceMemory::new(configuration(MACHINES[0]), blocks, DirtyLogTracker::new(log))
            .unwrap_err()
            .to_string()
    };
    let span = anonymous(2);
    let block = LiveBlock { name: "pc.ram", span };
    let text = refused(&[block, block]);
    assert!(text.starts_with("block \"pc.ram\" is one too many"), "{text}");
}
