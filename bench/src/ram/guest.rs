//! The guests: stock QEMU with the lab's smallest guest, and its counter.
//!
//! The first tick is detected within half a millisecond. Reading the counter touches only its own page at the destination.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use towline_lab::{BootSector, Builder, MemoryBackend, Qemu, Version};

use super::bench::Bench;
use crate::counter::Counter;

/// Timeout of filling the guest's memory.
const FILL_WITHIN: Duration = Duration::from_secs(180);
/// Timeout of the first tick after an arrival.
const TICK_WITHIN: Duration = Duration::from_secs(120);
/// The counter of the lab's smallest guest, see its module documentation.
const COUNTER_ADDRESS: u64 = 0x11_0008;
/// Random words that fill a page.
const WORDS_PER_PAGE: u32 = 1024;

/// Kind of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// QEMU's default: a destination's pages are allocated at first touch.
    Cold,
    /// A shared memfd that QEMU touches before it starts.
    Preallocated,
}

/// A guest that has filled its memory. It is stopped except during a save, so that its counting does not use the processors.
pub(super) struct Source {
    pub(super) qemu: Qemu,
    pub(super) counter: Counter,
}

/// A QEMU that waits for the guest.
pub(super) struct Destination {
    pub(super) qemu: Qemu,
    counter: Counter,
    /// Time from the start of the process to the first reply of its monitor.
    pub(super) start_time: Duration,
}

fn builder(bench: &Bench<'_>, memory: Memory) -> Builder {
    let guest = BootSector {
        fill_mib: bench.parameters.data_mib,
        words_per_page: WORDS_PER_PAGE,
        seed: 1,
        uses_popcnt: false,
        sweep_pages: 0,
    };
    let backend = match memory {
        Memory::Cold => MemoryBackend::Default,
        Memory::Preallocated => MemoryBackend::Memfd { prealloc: true },
    };
    let builder = Qemu::builder(Version::V10_0).memory_mib(bench.parameters.memory_mib).boot_sector(guest);
    builder.memory_backend(backend)
}

impl Source {
    pub(super) fn start(bench: &Bench<'_>, memory: Memory) -> Result<Self> {
        eprintln!("ram: filling {} MiB of a guest ({})", bench.parameters.data_mib, memory.as_text());
        let qemu = builder(bench, memory).start()?;
        bench.wait("the guest to fill its memory", FILL_WITHIN, || Ok(qemu.filled()?.then_some(())))?;
        let counter = Counter::at(&qemu, COUNTER_ADDRESS)?;
        let source = Self { qemu, counter };
        source.stop()?;
        Ok(source)
    }

    /// Stops the guest, also after a migration.
    pub(super) fn stop(&self) -> Result<()> {
        if self.qemu.qmp().status()? == "postmigrate" {
            // QEMU requires `cont` before it migrates the guest again.
            self.qemu.qmp().execute("cont", Value::Null)?;
        }
        self.qemu.qmp().execute("stop", Value::Null)?;
        Ok(())
    }

    /// Runs the guest.
    pub(super) fn cont(&self) -> Result<()> {
        self.qemu.qmp().execute("cont", Value::Null)?;
        Ok(())
    }
}

impl Destination {
    /// Starts it, and waits until its monitor responds, with preallocated memory touched.
    pub(super) fn start(bench: &Bench<'_>, memory: Memory) -> Result<Self> {
        let started = Instant::now();
        let qemu = builder(bench, memory).incoming_defer().start()?;
        let start_time = started.elapsed();
        let counter = Counter::at(&qemu, COUNTER_ADDRESS)?;
        Ok(Self { qemu, counter, start_time })
    }

    /// Waits until the guest has counted beyond `past`. Returns the time.
    pub(super) fn first_tick(&self, bench: &Bench<'_>, past: u64) -> Result<Instant> {
        let waited = bench.wait("the guest's first tick at the destination", TICK_WITHIN, || {
            Ok((self.counter.read()? > past).then(Instant::now))
        });
        waited.with_context(|| format!("QEMU wrote: {}", self.qemu.stderr().trim()))
    }

    /// Returns true if the guest has counted beyond `past`.
    pub(super) fn ticks(&self, past: u64) -> Result<bool> {
        Ok(self.counter.read()? > past)
    }
}

impl Memory {
    pub(super) fn as_text(self) -> &'static str {
        match self {
            Self::Cold => "default memory",
            Self::Preallocated => "preallocated memfd",
        }
    }
}
