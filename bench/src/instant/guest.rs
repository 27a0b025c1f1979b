//! The stored guest, and QEMUs that wait for it.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use towline_lab::{Qemu, Towline};

use super::{Bench, MIB, WITHIN};
use crate::counter::Counter;

/// A Linux in its image.
pub(super) struct Stored {
    pub(super) path: PathBuf,
    /// How far it had counted.
    pub(super) tick: u64,
    /// Where it counts, guest-physical.
    tick_address: u64,
    /// Of its data.
    hash: String,
}

/// A QEMU that waits.
pub(super) struct Waiting {
    pub(super) qemu: Qemu,
    pub(super) counter: Counter,
}

impl Stored {
    /// Boots it, fills it, stores it and ends it.
    pub(super) fn make(bench: &Bench<'_>) -> Result<Self> {
        eprintln!("instant: booting {} MiB, and filling {} MiB", bench.memory_mib, bench.data_mib());
        let source = bench.builder().start()?;
        let mut agent = source.linux(WITHIN)?;
        agent.fill(bench.data_mib() * MIB, 1)?;
        let hash = agent.hash()?;
        let info = agent.info()?;
        let address = info.iter().find(|(key, _)| key == "tick_address").map(|(_, value)| value.as_str());
        let address = address.context("the agent does not say where it counts")?;
        let tick_address = match address.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16)?,
            None => address.parse()?,
        };
        drop(agent);
        let path = bench.image();
        let from = format!("qmp:{}", source.qmp_path().display());
        let to = format!("file:{}", path.display());
        Towline::start(&bench.parameters.towline, ["copy", &from, &to])?.wait_done(WITHIN)?;
        // It ran until it was stored, and stands still since.
        let tick = Counter::at(&source, tick_address)?.read()?;
        Ok(Self { path, tick, tick_address, hash })
    }

    fn working_set(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".working-set.json");
        path.into()
    }

    /// The next restore is the first of its kind.
    pub(super) fn forget_working_set(&self) -> Result<()> {
        match std::fs::remove_file(self.working_set()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The next restore knows what one before it needed; one is made for that.
    pub(super) fn know_working_set(&self, bench: &Bench<'_>) -> Result<()> {
        if self.working_set().is_file() {
            return Ok(());
        }
        let waiting = Waiting::start(bench, self)?;
        let (image, to) =
            (self.path.display().to_string(), format!("qmp:{}", waiting.qemu.qmp_path().display()));
        let arguments = ["copy", "--postcopy", "--postcopy-preempt", &image, &to];
        Towline::start(&bench.parameters.towline, arguments)?.wait_done(WITHIN)?;
        Ok(())
    }

    /// Its data are what they were.
    pub(super) fn prove(&self, qemu: &Qemu) -> Result<()> {
        let found = qemu.linux(WITHIN)?.hash()?;
        ensure!(found == self.hash, "the guest's data hash to {found}, before they did to {}", self.hash);
        Ok(())
    }
}

impl Waiting {
    pub(super) fn start(bench: &Bench<'_>, stored: &Stored) -> Result<Self> {
        let qemu = bench.builder().incoming_defer().start()?;
        let counter = Counter::at(&qemu, stored.tick_address)?;
        Ok(Self { qemu, counter })
    }

    /// Has QEMU count how long its processors wait for pages.
    pub(super) fn count_waits(&self, on: bool) -> Result<()> {
        let capabilities = json!({ "capabilities": [{ "capability": "postcopy-blocktime", "state": on }] });
        self.qemu.qmp().execute("migrate-set-capabilities", capabilities)?;
        Ok(())
    }

    /// How long they did, together.
    pub(super) fn blocked_ms(&self) -> Result<Option<u64>> {
        let info = self.qemu.qmp().execute("query-migrate", Value::Null)?;
        let each = info["postcopy-vcpu-blocktime"].as_array();
        Ok(each.map(|each| each.iter().filter_map(Value::as_u64).sum()))
    }
}
