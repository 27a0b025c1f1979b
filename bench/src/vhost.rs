//! Parts that the benchmarks of vhost-user devices share.
//!
//! ```text
//!   backend (a process) ◄── socket, rings ── towline_frontend's drivers in this process: no guest, nothing emulated
//!      └─ its CPU time from /proc/PID/task/*/schedstat;  this process's from its clock;  the machine's from /proc/stat
//! ```
//! A figure is of a window after a warm-up: counters and clocks are read at its ends, while everything runs.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use towline_channel::Cancel;
use towline_frontend::{Frontend, wait_any};
use towline_lab::Towline as Process;

use crate::machine::{all_seconds, own_seconds, thread_seconds};

/// Time before a window, in which rings fill, socket buffers grow and memory is touched.
const WARM_UP: Duration = Duration::from_millis(300);
/// Extension of a window in which nothing was done.
const DONE_WITHIN: Duration = Duration::from_secs(10);
/// Timeout of listening.
const START_WITHIN: Duration = Duration::from_secs(30);
/// Interval of checks that a backend is still running.
const START_STEP: Duration = Duration::from_millis(100);
/// Interval of checks that something was done.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Connects to the socket of a backend, once that exists.
pub(crate) fn connect(backend: &mut Process, socket: &Path) -> Result<Frontend> {
    let until = Instant::now() + START_WITHIN;
    loop {
        backend.check()?;
        match Frontend::connect(socket, START_STEP) {
            Ok(frontend) => return Ok(frontend),
            Err(error) if Instant::now() > until => return Err(error.into()),
            Err(_) => {}
        }
    }
}

/// Shared state of the threads of a measurement.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// Units done: bytes, frames, transactions.
    pub(crate) units: AtomicU64,
    /// True while latencies are recorded.
    pub(crate) measuring: AtomicBool,
    /// True when applications have to end.
    pub(crate) stop: AtomicBool,
    /// True when guests have to end, after the applications.
    pub(crate) power_off: AtomicBool,
}

impl Signals {
    /// Adds units.
    pub(crate) fn add(&self, units: u64) {
        self.units.fetch_add(units, Ordering::Relaxed);
    }

    /// Returns true if applications have to end.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Result of a window. CPU time is in percent of one processor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// Length in seconds.
    pub(crate) seconds: f64,
    /// Number of units.
    pub(crate) units: f64,
    pub(crate) backend_percent: f64,
    /// Of this process.
    pub(crate) own_percent: f64,
    pub(crate) machine_percent: f64,
}

impl Window {
    /// Returns the units per second.
    pub(crate) fn rate(&self) -> f64 {
        self.units / self.seconds
    }

    /// Returns the backend's CPU time for each unit, in seconds.
    pub(crate) fn backend_seconds(&self) -> f64 {
        self.backend_percent / 100.0 / self.rate()
    }
}

/// Measures a window after a warm-up, with the CPU time of this backend's process.
///
/// # Errors
/// It was cancelled, or nothing was done.
pub(crate) fn window(
    signals: &Signals,
    pid: Option<u32>,
    length: Duration,
    cancel: &Cancel,
) -> Result<Window> {
    // Of the backend, this process and the machine, in seconds.
    let spent = || -> Result<[f64; 3]> {
        let backend = pid.map(|pid| thread_seconds(pid, "")).transpose()?.unwrap_or_default();
        Ok([backend, own_seconds(), all_seconds()?])
    };
    let done = || signals.units.load(Ordering::Relaxed);
    sleep(WARM_UP, cancel)?;
    let (before, units_before, begun) = (spent()?, done(), Instant::now());
    signals.measuring.store(true, Ordering::Relaxed);
    sleep(length, cancel)?;
    // On a busy machine a window lasts until something was done.
    while done() == units_before && begun.elapsed() < length + DONE_WITHIN {
        sleep(POLL_INTERVAL, cancel)?;
    }
    signals.measuring.store(false, Ordering::Relaxed);
    let (units, seconds) = (done() - units_before, begun.elapsed().as_secs_f64());
    let after = spent()?;
    ensure!(units > 0, "nothing was done in {seconds:.1} s");
    let percent = |index: usize| 100.0 * (after[index] - before[index]) / seconds;
    Ok(Window {
        seconds,
        units: units as f64,
        backend_percent: percent(0),
        own_percent: percent(1),
        machine_percent: percent(2),
    })
}

fn sleep(length: Duration, cancel: &Cancel) -> Result<()> {
    wait_any(&[cancel.as_fd()], length)?;
    Ok(cancel.check()?)
}
