//! The sizes of virtqueues, which one QEMU enlarges and another one refuses.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Qemu, Version};

/// Entries of virtio-rng's queue, as the device declares them.
const RNG_QUEUE_SIZE: u64 = 8;

impl Version {
    /// Returns true if its virtqueues have more entries than the devices declare: 1024 each in QEMU 10.0.13.
    /// A guest with such a queue is refused by 11.1. The QEMU is started to find out.
    ///
    /// # Errors
    /// QEMU does not start, or cannot be queried.
    pub fn enlarges_virtqueues(self) -> Result<bool> {
        let qemu = Qemu::builder(self).args(["-device", "virtio-rng-pci"]).paused().start()?;
        let listed = qemu.qmp().execute("x-query-virtio", Value::Null)?;
        let queue = json!({ "path": listed[0]["path"], "queue": 0 });
        let status = qemu.qmp().execute("x-query-virtio-queue-status", queue)?;
        let size = status["vring-num"].as_u64().with_context(|| format!("no size: {status}"))?;
        Ok(size > RNG_QUEUE_SIZE)
    }
}
