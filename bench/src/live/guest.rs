//! The guest: Linux with the lab's agent, in its present QEMU.

use std::time::Duration;

use anyhow::{Result, ensure};
use towline_lab::{Builder, LinuxGuest, Qemu, Version};

use super::parameters::{MIB, Parameters};
use crate::counter::Counter;

/// Timeout of booting, replies, filling and checking.
const WITHIN: Duration = Duration::from_secs(120);

/// A running guest.
pub(super) struct Guest {
    pub(super) qemu: Qemu,
    /// Guest-physical address of its counter.
    tick_address: u64,
    pub(super) counter: Counter,
}

/// A QEMU that waits for the guest.
pub(super) struct Waiting {
    pub(super) qemu: Qemu,
    pub(super) counter: Counter,
}

fn builder(parameters: &Parameters) -> Builder {
    Qemu::builder(Version::V10_0)
        .linux()
        .memory_mib(parameters.memory_mib)
        .processors(2)
        .args(["-name", "debug-threads=on"])
}

impl Guest {
    pub(super) fn boot(parameters: &Parameters) -> Result<Self> {
        eprintln!("live: booting, and filling {} MiB", parameters.data_mib);
        let qemu = builder(parameters).start()?;
        let mut agent = qemu.linux(WITHIN)?;
        agent.fill(parameters.data_mib * MIB, 1)?;
        agent.dirty(parameters.dirty_rate, parameters.dirty_mib * MIB)?;
        let tick_address = agent.tick_address()?;
        Self::at(qemu, tick_address)
    }

    fn at(qemu: Qemu, tick_address: u64) -> Result<Self> {
        let counter = Counter::at(&qemu, tick_address)?;
        Ok(Self { qemu, tick_address, counter })
    }

    /// Starts a QEMU with the same configuration, which waits for the guest.
    pub(super) fn destination(&self, parameters: &Parameters) -> Result<Waiting> {
        let qemu = builder(parameters).incoming_defer().start()?;
        let counter = Counter::at(&qemu, self.tick_address)?;
        Ok(Waiting { qemu, counter })
    }

    /// Has the guest check its memory after its arrival, and count.
    pub(super) fn arrive(&self, destination: Waiting, parameters: &Parameters) -> Result<Self> {
        let mut agent: LinuxGuest = destination.qemu.linux(WITHIN)?;
        let pages = agent.check()?;
        ensure!(pages == parameters.dirty_mib * MIB / 4096, "{pages} pages were checked, expected all");
        agent.wait_ticking(WITHIN)?;
        Ok(Self { qemu: destination.qemu, tick_address: self.tick_address, counter: destination.counter })
    }
}
