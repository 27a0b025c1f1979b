//! Waiting for a condition, never for a time.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Interval between two evaluations of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Evaluates `condition` until it returns a value, and fails with `what` after `within`.
pub fn wait_until<T>(
    what: &str,
    within: Duration,
    mut condition: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {:.1} s", within.as_secs_f64());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until an agent has removed a disk that it made: its QEMU, with which `ps` no longer lists the guest, ends before that.
pub fn wait_removed(disk: &Path, within: Duration) -> Result<()> {
    wait_until(&format!("the removal of {}", disk.display()), within, || {
        Ok((!disk.try_exists()?).then_some(()))
    })
}
