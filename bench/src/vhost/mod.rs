//! What the benches of vhost-user devices share: backends as processes, what they cost, and windows of measured time.
//!
//! ```text
//!   Backend (a process) ◄── socket, rings ── towline_frontend's drivers in this process: no guest, nothing emulated
//!      └─ its CPU time from /proc/PID/task/*/schedstat;  ours from our own clock;  everybody's from /proc/stat
//! ```
//! A figure is of a window behind a warm-up: counters and clocks are read at both its ends, while everything runs.

pub mod backend;
pub mod cpu;
pub mod latency;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use towline_channel::Cancel;

use backend::Backend;
use cpu::Usage;

/// Before a window: rings fill, sockets' buffers grow, memory is touched.
const WARM_UP: Duration = Duration::from_millis(300);
/// How long a window waits for something to be done at all, beyond its length.
const DONE_WITHIN: Duration = Duration::from_secs(10);
/// How often a window looks whether it was cancelled.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// What threads of one measurement share.
#[derive(Debug, Default)]
pub struct Signals {
    /// Units done: bytes, frames, transactions.
    pub units: AtomicU64,
    /// Latencies count now.
    pub measuring: AtomicBool,
    /// Applications end.
    pub stop: AtomicBool,
    /// Applications have ended; now guests do, who answered them.
    pub power_off: AtomicBool,
}

impl Signals {
    /// More units.
    pub fn add(&self, units: u64) {
        self.units.fetch_add(units, Ordering::Relaxed);
    }

    /// Whether applications end.
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// What a window gave.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Its length in seconds.
    pub seconds: f64,
    /// Units that were done.
    pub units: f64,
    /// CPU time of the backend and this process, in percent of one processor.
    pub cpu_percent: f64,
    /// The backend's part of it.
    pub backend_percent: f64,
    /// CPU time of the whole machine, in percent of one processor.
    pub machine_percent: f64,
}

impl Window {
    /// Units a second.
    pub fn rate(&self) -> f64 {
        self.units / self.seconds
    }
}

/// Warms up, and measures.
///
/// # Errors
/// It was cancelled, nothing was done, or the backend died.
pub fn window(
    signals: &Signals,
    backend: Option<&mut Backend>,
    length: Duration,
    cancel: &Cancel,
) -> Result<Window> {
    sleep(WARM_UP, cancel)?;
    let pid = backend.as_ref().map(|backend| backend.pid());
    let before = (Usage::now(pid)?, signals.units.load(Ordering::Relaxed), Instant::now());
    signals.measuring.store(true, Ordering::Relaxed);
    sleep(length, cancel)?;
    // On a machine that is busy with others, a window lasts until something was done.
    while signals.units.load(Ordering::Relaxed) == before.1 && before.2.elapsed() < length + DONE_WITHIN {
        sleep(LOOK_INTERVAL, cancel)?;
    }
    signals.measuring.store(false, Ordering::Relaxed);
    let (units, seconds) =
        (signals.units.load(Ordering::Relaxed) - before.1, before.2.elapsed().as_secs_f64());
    if let Some(backend) = backend {
        backend.check()?;
    }
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
        std::thread::sleep(left.min(LOOK_INTERVAL));
    }
    Ok(())
}
