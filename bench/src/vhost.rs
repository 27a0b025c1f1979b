//! Shared by the benchmarks of vhost-user devices: backend processes, their cost, and measured windows.
//!
//! ```text
//!   Backend (a process) ◄── socket, rings ── towline_frontend's drivers in this process: no guest, nothing emulated
//!      └─ its CPU time from /proc/PID/task/*/schedstat;  this process's from its clock;  the machine's from /proc/stat
//! ```
//! A figure is of a window after a warm-up: counters and clocks are read at its ends, while everything runs.

pub mod backend;
pub mod cpu;
pub mod latency;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use towline_channel::Cancel;

use backend::Backend;
use cpu::Usage;

/// Time before a window, in which rings fill, socket buffers grow and memory is touched.
const WARM_UP: Duration = Duration::from_millis(300);
/// Extension of a window in which nothing was done.
const DONE_WITHIN: Duration = Duration::from_secs(10);
/// Interval of checks for cancellation.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Shared state of the threads of a measurement.
#[derive(Debug, Default)]
pub struct Signals {
    /// Units done: bytes, frames, transactions.
    pub units: AtomicU64,
    /// True while latencies are recorded.
    pub measuring: AtomicBool,
    /// True when applications have to end.
    pub stop: AtomicBool,
    /// True when guests have to end, after the applications.
    pub power_off: AtomicBool,
}

impl Signals {
    /// Adds units.
    pub fn add(&self, units: u64) {
        self.units.fetch_add(units, Ordering::Relaxed);
    }

    /// Returns true if applications have to end.
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Result of a window.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Length in seconds.
    pub seconds: f64,
    /// Number of units.
    pub units: f64,
    /// CPU time of the backend and this process, in percent of one processor.
    pub cpu_percent: f64,
    /// The backend's part of it.
    pub backend_percent: f64,
    /// CPU time of the whole machine, in percent of one processor.
    pub machine_percent: f64,
}

impl Window {
    /// Returns the units per second.
    pub fn rate(&self) -> f64 {
        self.units / self.seconds
    }
}

/// Measures a window after a warm-up.
///
/// # Errors
/// It was cancelled, nothing was done, or the backend exited.
pub fn window(
    signals: &Signals,
    backend: Option<&mut Backend>,
    length: Duration,
    cancel: &Cancel,
) -> Result<Window> {
    let pid = backend.as_ref().map(|backend| backend.pid());
    let measured = window_of(signals, pid, length, cancel);
    if let Some(backend) = backend {
        backend.check()?;
    }
    measured
}

/// Measures a window after a warm-up, with the CPU time of this backend's process.
///
/// # Errors
/// As [`window`].
pub fn window_of(signals: &Signals, pid: Option<u32>, length: Duration, cancel: &Cancel) -> Result<Window> {
    sleep(WARM_UP, cancel)?;
    let before = (Usage::now(pid)?, signals.units.load(Ordering::Relaxed), Instant::now());
    signals.measuring.store(true, Ordering::Relaxed);
    sleep(length, cancel)?;
    // On a busy machine a window lasts until something was done.
    while signals.units.load(Ordering::Relaxed) == before.1 && before.2.elapsed() < length + DONE_WITHIN {
        sleep(POLL_INTERVAL, cancel)?;
    }
    signals.measuring.store(false, Ordering::Relaxed);
    let (units, seconds) =
        (signals.units.load(Ordering::Relaxed) - before.1, before.2.elapsed().as_secs_f64());
    let spent = Usage::now(pid)?.since(&before.0);
    ensure!(units > 0, "nothing was done in {seconds:.1} s");
    let percent = |spent: f64| 100.0 * spent / seconds;
    Ok(Window {
        seconds,
        units: units as f64,
        cpu_percent: percent(spent.backend + spent.own),
        backend_percent: percent(spent.backend),
        machine_percent: percent(spent.machine),
    })
}

fn sleep(length: Duration, cancel: &Cancel) -> Result<()> {
    let until = Instant::now() + length;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        cancel.check()?;
        std::thread::sleep(left.min(POLL_INTERVAL));
    }
    Ok(())
}
