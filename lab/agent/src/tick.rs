//! A counter that shows that the guest runs.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result};

/// Interval of the counter in milliseconds, unless another one is set.
const INTERVAL_MS: u64 = 5;
const PAGE_SIZE: u64 = 4096;
/// Bits of a pagemap entry that hold the frame number (Documentation/admin-guide/mm/pagemap.rst).
const FRAME_MASK: u64 = (1 << 55) - 1;

/// The counter, stepped by a separate thread.
pub(crate) struct Tick {
    counter: AtomicU64,
    /// In milliseconds.
    interval: AtomicU64,
}

impl Tick {
    pub(crate) fn start() -> Result<Arc<Self>> {
        let interval = AtomicU64::new(INTERVAL_MS);
        let tick = Arc::new(Self { counter: AtomicU64::new(1), interval });
        let stepped = tick.clone();
        std::thread::Builder::new().name("tick".into()).spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(stepped.interval.load(Relaxed)));
                stepped.counter.fetch_add(1, Relaxed);
            }
        })?;
        Ok(tick)
    }

    /// Steps the counter at this interval, from its next step on.
    pub(crate) fn set_interval(&self, milliseconds: u64) {
        self.interval.store(milliseconds, Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.counter.load(Relaxed)
    }

    /// Guest-physical address of the counter, for the host to read without the agent.
    pub(crate) fn physical_address(&self) -> Result<u64> {
        let address = &raw const self.counter as u64;
        let mut pagemap = File::open("/proc/self/pagemap")?;
        pagemap.seek(SeekFrom::Start(address / PAGE_SIZE * 8))?;
        let mut entry = [0; 8];
        pagemap.read_exact(&mut entry).context("no entry in the pagemap")?;
        Ok((u64::from_ne_bytes(entry) & FRAME_MASK) * PAGE_SIZE + address % PAGE_SIZE)
    }
}
