//! The small guest in its QEMU: filled memory, and the counter.

use std::time::Duration;

use anyhow::{Result, bail};

use super::boot_sector::{BootSector, PAGE_SIZE};
use super::{Guest, Qemu};
use crate::wait::wait_until;

const READY_ADDRESS: u64 = 0x11_0000;
const READY: u64 = u64::from_le_bytes(*b"EADYRAND");

impl Qemu {
    /// Reads the small guest's counter.
    pub fn counter(&self) -> Result<u64> {
        self.read_u64(BootSector::COUNTER_ADDRESS)
    }

    /// Returns true if the small guest has filled its memory.
    pub fn filled(&self) -> Result<bool> {
        Ok(self.read_u64(READY_ADDRESS)? == READY)
    }

    /// Waits until the small guest has filled its memory and its counter advances; returns the counter.
    pub fn wait_counting(&self, within: Duration) -> Result<u64> {
        wait_until("guest that has filled its memory", within, || Ok(self.filled()?.then_some(())))?;
        let before = self.counter()?;
        wait_until(&format!("guest that counts on from {before}"), within, || {
            let now = self.counter()?;
            Ok((now > before).then_some(now))
        })
    }

    /// Checks the small guest's filled range: every page as written, the sweep in order. The guest must be
    /// stopped. The error names the first page that is torn or stale. Returns the first bytes of the sweep's pages.
    pub fn check_filled(&self) -> Result<Vec<u8>> {
        let Guest::BootSector(guest) = &self.guest else { bail!("this QEMU runs {:?}", self.guest) };
        guest.check(&self.read_memory(BootSector::FILL_ADDRESS, guest.pages() * PAGE_SIZE)?)
    }
}
