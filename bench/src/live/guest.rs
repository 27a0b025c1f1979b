//! The guest: Linux with the lab's agent, at the QEMU where it runs at the moment.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use towline_lab::{Builder, LinuxGuest, Qemu, Version};

use super::{MIB, Parameters};
use crate::counter::Counter;

/// How long it may take to boot, to answer, to fill and to check.
const WITHIN: Duration = Duration::from_secs(120);

/// A guest that runs.
pub(super) struct Guest {
    pub(super) qemu: Qemu,
    /// Where its counter lies, guest-physical.
    tick_address: u64,
    pub(super) counter: Counter,
}

/// A QEMU that waits for it.
pub(super) struct Waiting {
    pub(super) qemu: Qemu,
    pub(super) counter: Counter,
}

fn builder(parameters: &Parameters) -> Builder {
    Qemu::builder(Version::V10_0).linux().memory_mib(parameters.memory_mib).processors(2)
}

impl Guest {
    pub(super) fn boot(parameters: &Parameters) -> Result<Self> {
        eprintln!("live: booting, and filling {} MiB", parameters.data_mib);
        let qemu = builder(parameters).start()?;
        let mut agent = qemu.linux(WITHIN)?;
        agent.fill(parameters.data_mib * MIB, 1)?;
        agent.dirty(parameters.dirty_rate, parameters.dirty_mib * MIB)?;
        let info = agent.info()?;
        let address = info.iter().find(|(key, _)| key == "tick_address").map(|(_, value)| value.as_str());
        let address = address.context("the agent does not say where it counts")?;
        let tick_address = match address.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16)?,
            None => address.parse()?,
        };
        Self::at(qemu, tick_address)
    }

    fn at(qemu: Qemu, tick_address: u64) -> Result<Self> {
        let counter = Counter::at(&qemu, tick_address)?;
        Ok(Self { qemu, tick_address, counter })
    }

    /// A QEMU of the same kind.
    pub(super) fn destination(&self, parameters: &Parameters) -> Result<Waiting> {
        let qemu = builder(parameters).incoming_defer().start()?;
        let counter = Counter::at(&qemu, self.tick_address)?;
        Ok(Waiting { qemu, counter })
    }

    /// The guest has arrived there: it checks what it has written and counts on.
    pub(super) fn arrive(&self, there: Waiting, parameters: &Parameters) -> Result<Self> {
        let mut agent: LinuxGuest = there.qemu.linux(WITHIN)?;
        let pages = agent.check()?;
        ensure!(pages == parameters.dirty_mib * MIB / 4096, "{pages} pages were checked");
        agent.wait_ticking(WITHIN)?;
        Ok(Self { qemu: there.qemu, tick_address: self.tick_address, counter: there.counter })
    }
}
