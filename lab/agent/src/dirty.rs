//! A load that writes memory at a given rate and detects torn and stale pages.
//!
//! Each page of the range carries its index, its generation, and words that follow from both. A ledger
//! elsewhere in memory holds the generation that each page must have. A page whose words disagree is torn; a
//! consistent page that disagrees with the ledger is stale.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use memmap2::MmapMut;

use crate::pattern::{PAGE_SIZE, mapped, mixed};

/// Interval of the bursts of writes.
const BURST_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum number of pages of each kind that a failed check names.
const PAGES_NAMED_MAX: usize = 8;

/// The range with its ledger, and the thread that writes it.
pub(crate) struct Load {
    range: Arc<Mutex<Range>>,
    stop: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
}

struct Range {
    bytes: MmapMut,
    generations: Vec<u64>,
    next: usize,
}

impl Load {
    /// Writes `length` bytes once, then continues at `rate` bytes per second, round and round.
    pub(crate) fn start(length: usize, rate: u64) -> Result<Self> {
        let (bytes, pages) = (mapped(length)?, length / PAGE_SIZE);
        let mut range = Range { bytes, generations: vec![0; pages], next: 0 };
        for _ in 0..pages {
            range.write_next();
        }
        let range = Arc::new(Mutex::new(range));
        let stop = Arc::<AtomicBool>::default();
        let writer = {
            let (range, stop) = (range.clone(), stop.clone());
            std::thread::Builder::new().name("dirty".into()).spawn(move || write(&range, rate, &stop))?
        };
        Ok(Self { range, stop, writer: Some(writer) })
    }

    /// Pages written since the start, without the first round.
    pub(crate) fn pages_written(&self) -> u64 {
        let range = locked(&self.range);
        range.generations.iter().sum::<u64>() - range.generations.len() as u64
    }

    /// Stops writing; the range stays and can be checked.
    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(writer) = self.writer.take() {
            writer.join().expect("the writer does not panic");
        }
    }

    /// Checks every page, and returns their number. The writer is blocked during the check.
    pub(crate) fn check(&self) -> Result<usize> {
        locked(&self.range).check()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Range {
    fn write_next(&mut self) {
        let index = self.next;
        self.next = (index + 1) % self.generations.len();
        self.generations[index] += 1;
        let generation = self.generations[index];
        let page = &mut self.bytes[index * PAGE_SIZE..][..PAGE_SIZE];
        for (word, value) in page.chunks_exact_mut(8).zip(words(index, generation)) {
            word.copy_from_slice(&value.to_ne_bytes());
        }
    }

    fn check(&self) -> Result<usize> {
        let (mut torn, mut stale) = (Vec::new(), Vec::new());
        for (index, page) in self.bytes.chunks_exact(PAGE_SIZE).enumerate() {
            let found = |at: usize| u64::from_ne_bytes(page[at * 8..][..8].try_into().expect("8 bytes"));
            let generation = found(1);
            let whole = words(index, generation).enumerate().all(|(at, value)| found(at) == value);
            if !whole {
                torn.push(index);
            } else if generation != self.generations[index] {
                stale.push(index);
            }
        }
        let pages = self.generations.len();
        let named = |pages: &[usize]| format!("{:?}", &pages[..pages.len().min(PAGES_NAMED_MAX)]);
        ensure!(
            torn.is_empty() && stale.is_empty(),
            "of {pages} pages {} are torn (first {}) and {} stale (first {})",
            torn.len(),
            named(&torn),
            stale.len(),
            named(&stale)
        );
        Ok(pages)
    }
}

/// The words of a page: its index, its generation, and a sequence that follows from both.
fn words(index: usize, generation: u64) -> impl Iterator<Item = u64> {
    let first = mixed((index as u64) << 32 ^ generation);
    let step = mixed(first) | 1;
    let rest = (2..PAGE_SIZE as u64 / 8).map(move |at| first.wrapping_add(step.wrapping_mul(at)));
    [index as u64, generation].into_iter().chain(rest)
}

fn locked(range: &Mutex<Range>) -> MutexGuard<'_, Range> {
    range.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(range: &Mutex<Range>, rate: u64, stop: &AtomicBool) {
    let mut due_bytes = 0;
    let mut last = Instant::now();
    while !stop.load(Relaxed) {
        let now = Instant::now();
        // After a pause of the whole guest, the bytes due for that time are dropped, not written in one
        // burst.
        let elapsed = now.duration_since(last).min(BURST_INTERVAL * 4);
        last = now;
        due_bytes += u64::try_from(elapsed.as_micros()).expect("at most 40 ms") * rate / 1_000_000;
        while due_bytes >= PAGE_SIZE as u64 && !stop.load(Relaxed) {
            // Locked for one page at a time, so a check never waits long.
            locked(range).write_next();
            due_bytes -= PAGE_SIZE as u64;
            // Bytes beyond the reachable rate are not carried over either.
            if last.elapsed() > BURST_INTERVAL * 4 {
                due_bytes = 0;
            }
        }
        std::thread::sleep(BURST_INTERVAL);
    }
}
