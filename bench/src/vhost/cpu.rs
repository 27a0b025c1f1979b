//! CPU time, from the kernel.

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

/// Ticks of a second in `/proc` (`USER_HZ`, which is 100 on every Linux that we run on).
const TICKS_PER_SECOND: f64 = 100.0;
/// In `/proc/stat`: which numbers behind `cpu` are time in which somebody worked.
const BUSY: [usize; 6] = [0, 1, 2, 5, 6, 7];

/// Seconds of CPU time so far.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// Of the backend.
    pub backend: f64,
    /// Of this process.
    pub own: f64,
    /// Of everybody.
    pub machine: f64,
}

impl Usage {
    /// Up to this moment.
    ///
    /// # Errors
    /// The backend is gone.
    pub fn now(backend: Option<u32>) -> Result<Self> {
        let own = clock_gettime(ClockId::ProcessCPUTime);
        Ok(Self {
            backend: backend.map(process).transpose()?.unwrap_or(0.0),
            own: own.tv_sec as f64 + own.tv_nsec as f64 / 1e9,
            machine: machine()?,
        })
    }

    /// From then on.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            backend: self.backend - before.backend,
            own: self.own - before.own,
            machine: self.machine - before.machine,
        }
    }
}

/// Of all threads that a process has.
fn process(pid: u32) -> Result<f64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).context("the backend is gone")?;
    let mut nanoseconds = 0.0;
    for task in tasks {
        // A thread may end meanwhile.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let first = text.split_whitespace().next().unwrap_or("0");
        nanoseconds += first.parse::<f64>().with_context(|| format!("`{text}` in schedstat"))?;
    }
    Ok(nanoseconds / 1e9)
}

fn machine() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let numbers: Vec<f64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|number| number.parse().ok())
        .collect();
    Ok(BUSY.iter().filter_map(|index| numbers.get(*index)).sum::<f64>() / TICKS_PER_SECOND)
}
