//! The dirty log: a bitmap of the guest pages that the device wrote, for a frontend that migrates the guest.
//!
//! ```text
//!   ring: mark(address, length) ─► word cache (32 words) ─ once a batch ─► fetch_or into the shared log
//!             └─ no effect while the switch is off
//! ```
//! A page is marked after it is written and before its batch ends, so a frontend that clears the log and then
//! reads the page either reads the new contents or finds the mark later. The session changes switch and log
//! between batches only, and replies to the frontend when every ring has the change.
//!
//! QEMU releases its log when it stops a device's rings. It starts them again with logging on, and only then
//! sends the new log:
//!
//! ```text
//!   SET_FEATURES(LOG_ALL) ─► SET_VRING_KICK … ─► SET_LOG_BASE
//!                            └ the log is awaited ┘
//! ```
//! A ring that starts in between is not processed before the log arrives. A frontend may also keep its log,
//! so this wait has a limit. Marks of a ring that is processed while the log is awaited go to the former log,
//! are kept, and go to the next log too.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use towline_channel::lock::lock;

use crate::memory::MemoryTableError;
use crate::sys::{Area, Mapping};

/// Bytes of guest memory for each bit (`VHOST_LOG_PAGE`).
pub const LOG_PAGE: u64 = 4096;
/// Number of words that a ring gathers before it writes them to the log.
const CACHE_WORDS: usize = 32;
/// Maximum size of a log, for 2^48 bytes of guest addresses.
const LOG_BYTES_MAX: u64 = 1 << 33;
/// Maximum number of words that are kept for the next log: those of 256 GiB of memory.
const KEPT_WORDS_MAX: usize = 1 << 20;

/// The shared log.
#[derive(Debug)]
pub struct DirtyLog {
    words: Area,
    pages: u64,
}

/// State of logging. Shared by the session, which sets it, and the rings.
#[derive(Debug, Clone, Default)]
pub struct LogSwitch(Arc<LogState>);

#[derive(Debug, Default)]
struct LogState {
    /// [`LogMode`].
    mode: AtomicU8,
    /// Marks for the next log: number of a word, and its bits.
    kept: Mutex<BTreeMap<u64, u64>>,
}

/// Where marks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogMode {
    /// Nowhere: the log is off.
    Off,
    /// To the log.
    On,
    /// To the log, if there is one, and to the next one: the frontend may have released this one.
    Awaited,
}

/// Marks of a ring that are not in the log yet.
#[derive(Debug, Default)]
pub(crate) struct DirtyCache {
    pub(crate) switch: LogSwitch,
    log: Option<Arc<DirtyLog>>,
    /// Number of a word, and the bits to set in it.
    words: Vec<(u64, u64)>,
    /// First marked page that is outside the log.
    outside_page: Option<u64>,
}

impl DirtyLog {
    /// Maps a log of `size` bytes.
    ///
    /// # Errors
    /// [`MemoryTableError::TooLarge`] for a log that is larger than any guest needs, or smaller than a word;
    /// otherwise as for regions.
    pub fn map(fd: OwnedFd, offset: u64, size: u64) -> Result<Self, MemoryTableError> {
        let words = size / 8;
        if size > LOG_BYTES_MAX || words == 0 {
            return Err(MemoryTableError::TooLarge { offset, size });
        }
        let mapping = Arc::new(Mapping::guarded(fd, offset, words * 8)?);
        let len = usize::try_from(words * 8).expect("the length is at most LOG_BYTES_MAX");
        let words = Area::new(&mapping, 0, len, 8).ok_or(MemoryTableError::TooLarge { offset, size })?;
        Ok(Self { words, pages: size / 8 * 64 })
    }

    /// Sets bits of a word. Returns false if it is outside the log.
    fn set(&self, word: u64, bits: u64) -> bool {
        let inside = word < self.pages / 64;
        if inside {
            self.words.or_64(usize::try_from(word * 8).expect("the log is mapped"), bits);
        }
        inside
    }
}

impl LogSwitch {
    /// Sets the mode. Marks that were kept are dropped with the log off.
    pub(crate) fn set(&self, mode: LogMode) {
        self.0.mode.store(mode as u8, Ordering::Release);
        if mode == LogMode::Off {
            lock(&self.0.kept).clear();
        }
    }

    /// Returns true while writes are logged.
    pub fn is_on(&self) -> bool {
        self.0.mode.load(Ordering::Acquire) != LogMode::Off as u8
    }

    /// Returns true while a log from the frontend is awaited.
    pub(crate) fn is_awaited(&self) -> bool {
        self.0.mode.load(Ordering::Acquire) == LogMode::Awaited as u8
    }

    /// Keeps marks for the next log. Returns false if there are too many.
    fn keep(&self, words: &[(u64, u64)]) -> bool {
        let mut kept = lock(&self.0.kept);
        words.iter().for_each(|(word, bits)| *kept.entry(*word).or_default() |= bits);
        kept.len() <= KEPT_WORDS_MAX
    }

    /// Moves the marks that were kept to the log. Those outside it wait for a longer one.
    pub(crate) fn write_kept(&self, log: &DirtyLog) {
        lock(&self.0.kept).retain(|word, bits| !log.set(*word, *bits));
    }
}

impl DirtyCache {
    pub(crate) fn new(switch: LogSwitch, log: Option<Arc<DirtyLog>>) -> Self {
        Self { switch, log, ..Self::default() }
    }

    /// Returns true if the log's memory was replaced by zeros after a fault.
    pub(crate) fn is_lost(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.words.mapping().is_lost())
    }

    /// Replaces the log, after writing the gathered marks to the former one.
    pub(crate) fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.write_to_log();
        self.log = log;
    }

    /// Marks `len` written bytes at a guest address.
    pub(crate) fn mark(&mut self, guest: u64, len: u64) {
        if len == 0 || !self.switch.is_on() {
            return;
        }
        let (first, last) = (guest / LOG_PAGE, guest.saturating_add(len - 1) / LOG_PAGE);
        for page in first..=last {
            self.mark_page(page);
        }
    }

    fn mark_page(&mut self, page: u64) {
        if self.log.as_ref().is_none_or(|log| page >= log.pages) && !self.switch.is_awaited() {
            self.outside_page.get_or_insert(page);
            return;
        }
        let (word, bit) = (page / 64, 1 << (page % 64));
        // Usually the word of the previous page.
        match self.words.iter_mut().rev().find(|(known, _)| *known == word) {
            Some((_, bits)) => *bits |= bit,
            None => {
                if self.words.len() == CACHE_WORDS {
                    self.write_to_log();
                }
                self.words.push((word, bit));
            }
        }
    }

    /// Writes the gathered marks to the log. Returns the first page that was marked and is outside the log,
    /// once.
    pub(crate) fn flush(&mut self) -> Option<u64> {
        self.write_to_log();
        self.outside_page.take()
    }

    /// Sets the gathered bits in the log, where the frontend can read and clear them. A page outside the log
    /// stays recorded for [`Self::flush`].
    fn write_to_log(&mut self) {
        if let Some((word, _)) = self.words.first()
            && self.switch.is_awaited()
            && !self.switch.keep(&self.words)
        {
            self.outside_page.get_or_insert(word * 64);
        }
        for (word, bits) in self.words.drain(..) {
            if let Some(log) = &self.log {
                log.set(word, bits);
            }
        }
        #[cfg(feature = "testing")]
        crate::testing::log_flushed();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn cache(pages: u64) -> (DirtyCache, File) {
        let fd = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, pages / 8).unwrap();
        let log = DirtyLog::map(fd.try_clone().unwrap(), 0, pages / 8).unwrap();
        let switch = LogSwitch::default();
        switch.set(LogMode::On);
        (DirtyCache::new(switch, Some(Arc::new(log))), fd.into())
    }

    fn marked(file: &mut File) -> Vec<u64> {
        use std::io::Seek as _;
        file.rewind().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        let bit = |page: &u64| bytes[usize::try_from(page / 8).unwrap()] & (1 << (page % 8)) != 0;
        (0..bytes.len() as u64 * 8).filter(bit).collect()
    }

    #[test]
    fn pages_are_marked_when_the_batch_ends() {
        let (mut cache, mut file) = cache(128);
        cache.mark(4095, 2);
        cache.mark(70 * LOG_PAGE, 1);
        cache.mark(9 * LOG_PAGE, 0);
        assert_eq!(marked(&mut file), [0u64; 0]);
        assert_eq!(cache.flush(), None);
        assert_eq!(marked(&mut file), [0, 1, 70]);
    }

    #[test]
    fn an_overflowing_cache_loses_no_page() {
        let (mut cache, mut file) = cache(64 * 100);
        let pages: Vec<u64> = (0..100).map(|word| word * 64 + word % 64).collect();
        pages.iter().for_each(|page| cache.mark(page * LOG_PAGE, 1));
        cache.flush();
        assert_eq!(marked(&mut file), pages);
    }

    #[test]
    fn no_page_is_marked_while_the_log_is_off() {
        let (mut cache, mut file) = cache(64);
        cache.switch.set(LogMode::Off);
        cache.mark(0, 1);
        cache.flush();
        assert_eq!(marked(&mut file), [0u64; 0]);
    }

    #[test]
    fn a_page_outside_the_log_is_reported_after_an_overflow_and_a_change_of_the_log() {
        let (mut cache, _file) = cache(64 * 100);
        cache.mark(64 * 100 * LOG_PAGE, 1);
        (0..100).for_each(|word| cache.mark(word * 64 * LOG_PAGE, 1));
        let log = cache.log.clone();
        cache.set_log(log);
        assert_eq!(cache.flush(), Some(6400));
        assert_eq!(cache.flush(), None);
    }

    #[test]
    fn a_page_outside_the_log_is_reported_once() {
        let (mut cache, _file) = cache(64);
        cache.mark(63 * LOG_PAGE, 2 * LOG_PAGE);
        assert_eq!(cache.flush(), Some(64));
        assert_eq!(cache.flush(), None);
    }
}
