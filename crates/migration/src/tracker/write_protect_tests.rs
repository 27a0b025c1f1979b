//! Reports of the kernel for memory of every kind, on a kernel with support; elsewhere skipped.

use super::*;
use crate::sys::{HUGE_PAGE_BYTES, RamMapping};
use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use towline_channel::{Channel, ChannelExt, IoBuf, SendFlags, UnixChannel};

const PAGE: usize = 4096;

/// The tracker, or why not.
fn tracker(test: &str) -> Option<WriteProtect> {
    match WriteProtect::of_shared() {
        Ok(tracker) => Some(tracker),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {error}");
            None
        }
    }
}

/// Huge pages that are there for a test, if the machine lets it.
struct HugePages {
    before: String,
}

impl HugePages {
    const PATH: &str = "/proc/sys/vm/nr_hugepages";

    fn reserve(test: &str, pages: usize) -> Option<Self> {
        let before = std::fs::read_to_string(Self::PATH).unwrap_or_default();
        let wanted = before.trim().parse().unwrap_or(0) + pages;
        let set = std::fs::write(Self::PATH, wanted.to_string());
        let this = Self { before };
        let reason = match RamMapping::huge(pages * HUGE_PAGE_BYTES) {
            Ok(_) => return Some(this),
            Err(error) => {
                format!("{pages} huge pages cannot be allocated: {error}; {} set: {set:?}", Self::PATH)
            }
        };
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
        None
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::PATH, &self.before);
    }
}

fn memfd(length: usize) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, length as u64).unwrap();
    file
}

fn start(tracker: &WriteProtect, memory: &[Span<'_>]) -> BTreeSet<(usize, usize)> {
    let mut untouched = BTreeSet::new();
    let mut report = |page: PageRef, length: u64| pages(&mut untouched, page, length);
    tracker.start(memory, &mut report).unwrap();
    untouched
}

fn harvest(tracker: &WriteProtect, memory: &[Span<'_>]) -> Vec<(usize, usize)> {
    let mut written = BTreeSet::new();
    tracker.harvest(memory, &mut |page, length| pages(&mut written, page, length)).unwrap();
    written.into_iter().collect()
}

fn pages(set: &mut BTreeSet<(usize, usize)>, page: PageRef, length: u64) {
    let (first, count) = (page.offset as usize / PAGE, length as usize / PAGE);
    set.extend((first..first + count).map(|number| (page.block.index(), number)));
}

#[test]
fn only_what_is_written_is_reported_once() {
    let Some(tracker) = tracker("only_what_is_written_is_reported_once") else { return };
    let file = memfd(64 * PAGE);
    let regions =
        [RamMapping::anonymous(64 * PAGE).unwrap(), RamMapping::shared(file.as_fd(), 0, 64 * PAGE).unwrap()];
    let memory: Vec<_> = regions.iter().map(RamMapping::span).collect();
    memory.iter().for_each(|span| span.write(0, &[1; 20 * PAGE]));
    let untouched = start(&tracker, &memory);
    assert_eq!(untouched, (20..64).map(|page| (0, page)).collect(), "of shared memory it is not known");
    assert_eq!(harvest(&tracker, &memory), []);
    for (block, span) in memory.iter().enumerate() {
        // Touched before, never touched, read only, and read before it is written.
        span.write(3 * PAGE + 5, &[2]);
        span.word(30 * PAGE).store(1, Ordering::Relaxed);
        assert_eq!(span.word(40 * PAGE).load(Ordering::Relaxed), 0);
        assert_eq!(span.word(50 * PAGE).load(Ordering::Relaxed), 0);
        span.word(50 * PAGE).store(1, Ordering::Relaxed);
        let mut written = harvest(&tracker, &memory);
        // A page of private memory that was made by reading it is taken for written; it never hurts.
        written.retain(|&page| page != (0, 40));
        assert_eq!(written, [(block, 3), (block, 30), (block, 50)]);
        assert_eq!(harvest(&tracker, &memory), []);
    }
    tracker.stop(&memory).unwrap();
    let error = tracker.harvest(&memory, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, TrackerError::NotStarted), "{error}");
}

#[test]
fn it_can_stop_and_start_again() {
    let Some(tracker) = tracker("it_can_stop_and_start_again") else { return };
    let region = RamMapping::anonymous(8 * PAGE).unwrap();
    let memory = [region.span()];
    for round in 0..3 {
        let untouched = start(&tracker, &memory);
        assert_eq!(untouched, (round..8).map(|page| (0, page)).collect());
        memory[0].write(round * PAGE, &[1]);
        if round != 1 {
            tracker.stop(&memory).unwrap();
            tracker.stop(&memory).unwrap();
        }
        memory[0].write(0, &[1]);
    }
    let other = WriteProtect::new().unwrap();
    start(&tracker, &memory);
    let error = other.start(&memory, &mut |_, _| {}).unwrap_err();
    assert!(
        matches!(&error, TrackerError::Register { block: 0, source, .. }
        if source.raw_os_error() == Some(libc::EBUSY)),
        "{error}"
    );
    drop(tracker);
    start(&other, &memory);
}

#[test]
fn system_calls_write_too() {
    let Some(tracker) = tracker("system_calls_write_too") else { return };
    let file = memfd(16 * PAGE);
    for region in [RamMapping::anonymous(16 * PAGE), RamMapping::shared(file.as_fd(), 0, 16 * PAGE)] {
        let region = region.unwrap();
        let memory = [region.span()];
        memory[0].write(0, &[1; 16 * PAGE]);
        start(&tracker, &memory);
        let (one, other) = UnixChannel::pair().unwrap();
        one.send_all(&[IoBuf::from(&[7; 6000])], SendFlags::empty()).unwrap();
        other.recv_exact(&mut [memory[0].io_buf_mut(2 * PAGE, 6000)]).unwrap();
        assert_eq!(harvest(&tracker, &memory), [(0, 2), (0, 3)], "{}", one.peer());
        tracker.stop(&memory).unwrap();
    }
}

#[test]
fn another_mapping_is_not_seen_and_therefore_refused() {
    let Some(of_shared) = tracker("another_mapping_is_not_seen_and_therefore_refused") else { return };
    let file = memfd(8 * PAGE);
    let map = || RamMapping::shared(file.as_fd(), 0, 8 * PAGE).unwrap();
    let (ours, theirs) = (map(), map());
    let memory = [ours.span()];
    let error = WriteProtect::new().unwrap().start(&memory, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, TrackerError::Shared { block: 0 }), "{error}");
    start(&of_shared, &memory);
    theirs.span().write(PAGE, &[1]);
    ours.span().write(3 * PAGE, &[1]);
    assert_eq!(harvest(&of_shared, &memory), [(0, 3)]);
    assert_eq!(ours.span().word(PAGE).load(Ordering::Relaxed), 1, "though the content is there");
}

#[test]
fn huge_pages_are_reported_whole() {
    let test = "huge_pages_are_reported_whole";
    let Some(tracker) = tracker(test) else { return };
    let Some(_reserved) = HugePages::reserve(test, 4) else { return };
    let region = RamMapping::huge(4 * HUGE_PAGE_BYTES).unwrap();
    let memory = [region.span()];
    memory[0].write(0, &[1]);
    memory[0].write(3 * HUGE_PAGE_BYTES, &[1]);
    start(&tracker, &memory);
    assert_eq!(harvest(&tracker, &memory), []);
    // A page that was present, an absent one, and one that was only read.
    memory[0].write(3 * HUGE_PAGE_BYTES + 9 * PAGE, &[1]);
    memory[0].write(HUGE_PAGE_BYTES + PAGE, &[1]);
    assert_eq!(memory[0].word(2 * HUGE_PAGE_BYTES).load(Ordering::Relaxed), 0);
    let whole = |page: usize| (page * 512..(page + 1) * 512).map(|page| (0, page));
    let written: Vec<_> = whole(1).chain(whole(3)).collect();
    assert_eq!(harvest(&tracker, &memory), written);
    assert_eq!(harvest(&tracker, &memory), []);
}
