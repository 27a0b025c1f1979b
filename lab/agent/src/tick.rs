//! A counter that shows that the guest runs.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result};

/// Interval of the counter, unless another one is set.
const INTERVAL: Duration = Duration::from_millis(5);
const PAGE_SIZE: u64 = 4096;
/// Bits of a pagemap entry that hold the frame number (Documentation/admin-guide/mm/pagemap.rst).
const FRAME_MASK: u64 = (1 << 55) - 1;

/// The counter, stepped by a separate thread.
pub(crate) struct Tick {
    counter: Arc<AtomicU64>,
    interval_ms: Arc<AtomicU64>,
}

impl Tick {
    pub(crate) fn start() -> Result<Self> {
        let counter = Arc::new(AtomicU64::new(1));
        let stepped = counter.clone();
        let interval_ms = Arc::new(AtomicU64::new(INTERVAL.as_millis() as u64));
        let slept = interval_ms.clone();
        std::thread::Builder::new().name("tick".into()).spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(slept.load(Relaxed)));
                stepped.fetch_add(1, Relaxed);
            }
        })?;
        Ok(Self { counter, interval_ms })
    }

    /// Steps the counter at this interval, from its next step on.
    pub(crate) fn set_interval(&self, milliseconds: u64) {
        self.interval_ms.store(milliseconds, Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.counter.load(Relaxed)
    }

    /// Guest-physical address of the counter, for the host to read without the agent.
    pub(crate) fn physical_address(&self) -> Result<u64> {
        let address = &raw const *self.counter as u64;
        let mut pagemap = File::open("/proc/self/pagemap")?;
        pagemap.seek(SeekFrom::Start(address / PAGE_SIZE * 8))?;
        let mut entry = [0; 8];
        pagemap.read_exact(&mut entry).context("no entry in the pagemap")?;
        Ok((u64::from_ne_bytes(entry) & FRAME_MASK) * PAGE_SIZE + address % PAGE_SIZE)
    }
}
