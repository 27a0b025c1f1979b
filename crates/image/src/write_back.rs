//! Syncs a file while it is written, so its last sync is short.
//!
//! The source of a guest measures the rate at which its memory is stored by its own blocked sends. The page
//! cache would block none of them: the source would measure the rate of memory, stop its guest, and keep it
//! stopped until everything is on the disk. So the unsynced bytes are limited to those that the disk writes
//! in [`SYNC_TIME`], at the rate measured last: one thread syncs, the others go on until the limit is reached
//! again.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use towline_channel::lock::lock;

/// Intended time of one sync of an image file, hence of the last one before its guest may run on.
pub const SYNC_TIME: Duration = Duration::from_millis(50);
/// Minimum and maximum number of bytes that are synced together.
const STEP_BYTES_MIN: u64 = 256 << 10;
const STEP_BYTES_MAX: u64 = 64 << 20;

/// Part of a file that is in the page cache only.
#[derive(Debug, Default)]
pub(crate) struct WriteBack {
    unsynced: AtomicU64,
    /// Bytes that are synced together, by the last measurement.
    step: AtomicU64,
    syncing: Mutex<()>,
}

impl WriteBack {
    /// Counts bytes that were written through the page cache; syncs them if there are many.
    pub(crate) fn written(&self, file: &File, bytes: u64) -> io::Result<()> {
        let unsynced = self.unsynced.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let step = self.step.load(Ordering::Relaxed).max(STEP_BYTES_MIN);
        if unsynced < step {
            return Ok(());
        }
        let _syncing = match self.syncing.try_lock() {
            Err(TryLockError::WouldBlock) if unsynced < 2 * step => return Ok(()),
            Err(_) => lock(&self.syncing),
            Ok(guard) => guard,
        };
        // Another thread may have synced them since.
        if self.unsynced.load(Ordering::Relaxed) < step {
            return Ok(());
        }
        let (bytes, begun) = (self.unsynced.swap(0, Ordering::Relaxed), Instant::now());
        file.sync_data()?;
        self.step.store(next_step(step, bytes, begun.elapsed()), Ordering::Relaxed);
        Ok(())
    }
}

/// Number of bytes that take [`SYNC_TIME`] at the measured rate, at most twice the previous number: a cache
/// of the disk may have taken the last ones.
fn next_step(step: u64, bytes: u64, took: Duration) -> u64 {
    let fits = bytes as f64 * SYNC_TIME.as_secs_f64() / took.as_secs_f64().max(1e-9);
    (fits as u64).min(2 * step).clamp(STEP_BYTES_MIN, STEP_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_sync_time_at_the_measured_rate() {
        const MIB: u64 = 1 << 20;
        // 40 MiB/s.
        assert_eq!(next_step(8 * MIB, 8 * MIB, Duration::from_millis(200)), 2 * MIB);
        // A fast disk, whose rate is adopted step by step.
        assert_eq!(next_step(MIB, MIB, Duration::from_micros(1)), 2 * MIB);
        assert_eq!(next_step(STEP_BYTES_MAX, STEP_BYTES_MAX, Duration::ZERO), STEP_BYTES_MAX);
        assert_eq!(next_step(MIB, MIB, Duration::from_secs(10)), STEP_BYTES_MIN);
    }

    #[test]
    fn at_most_a_step_stays_unsynced_by_one_thread() {
        let (file, write_back) = (tempfile::tempfile().unwrap(), WriteBack::default());
        for _ in 0..100 {
            write_back.written(&file, STEP_BYTES_MIN / 3).unwrap();
            let step = write_back.step.load(Ordering::Relaxed).max(STEP_BYTES_MIN);
            assert!(write_back.unsynced.load(Ordering::Relaxed) < step);
        }
    }
}
