//! CPU time from the kernel's accounting.

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

/// Ticks of a second in `/proc` (`USER_HZ`, 100 on every supported Linux).
const TICKS_PER_SECOND: f64 = 100.0;
/// Indices of the busy times in the line `cpu` of `/proc/stat`.
const BUSY: [usize; 6] = [0, 1, 2, 5, 6, 7];

/// CPU time in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// Time of the backend.
    pub backend: f64,
    /// Time of this process.
    pub own: f64,
    /// Time of the whole machine.
    pub machine: f64,
}

impl Usage {
    /// Reads the present times.
    ///
    /// # Errors
    /// The backend has exited.
    pub fn now(backend: Option<u32>) -> Result<Self> {
        Ok(Self {
            backend: backend.map(process).transpose()?.unwrap_or(0.0),
            own: of_process(),
            machine: machine()?,
        })
    }

    /// Returns the time since then.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            backend: self.backend - before.backend,
            own: self.own - before.own,
            machine: self.machine - before.machine,
        }
    }
}

/// Returns the CPU time of this process in seconds.
pub fn of_process() -> f64 {
    seconds(ClockId::ProcessCPUTime)
}

/// Returns the CPU time of the calling thread in seconds.
pub fn of_thread() -> f64 {
    seconds(ClockId::ThreadCPUTime)
}

fn seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the time of all threads of a process.
fn process(pid: u32) -> Result<f64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).context("the backend has exited")?;
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
