//! The stored guest, and QEMUs that wait for it.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use towline_lab::{Qemu, Towline};

use super::bench::{Bench, MIB, WITHIN};
use crate::counter::Counter;

/// A Linux guest in an image.
pub(super) struct Stored {
    pub(super) path: PathBuf,
    /// Its counter.
    pub(super) tick: u64,
    /// Guest-physical address of its counter.
    tick_address: u64,
    /// Hash of its data.
    hash: String,
}

/// A QEMU that waits for the guest.
pub(super) struct Waiting {
    pub(super) qemu: Qemu,
    pub(super) counter: Counter,
}

impl Stored {
    /// Boots and fills the guest, and saves it.
    pub(super) fn make(bench: &Bench<'_>) -> Result<Self> {
        eprintln!("instant: booting {} MiB, and filling {} MiB", bench.memory_mib, bench.data_mib());
        let source = bench.builder().start()?;
        let mut agent = source.linux(WITHIN)?;
        agent.fill(bench.data_mib() * MIB, 1)?;
        let hash = agent.hash()?;
        let tick_address = agent.tick_address()?;
        drop(agent);
        let path = bench.image();
        let from = format!("qmp:{}", source.qmp_path().display());
        let to = format!("file:{}", path.display());
        Towline::start(&bench.parameters.towline, ["copy", &from, &to])?.wait_done(WITHIN)?;
        // The guest is paused since it was saved.
        let tick = Counter::at(&source, tick_address)?.read()?;
        Ok(Self { path, tick, tick_address, hash })
    }

    fn working_set(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".working-set.json");
        path.into()
    }

    /// Removes the working set, so that the next restore is like a first one.
    pub(super) fn forget_working_set(&self) -> Result<()> {
        match std::fs::remove_file(self.working_set()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Ensures that a working set exists, if necessary by a restore.
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

    /// Checks that its data are unchanged.
    pub(super) fn prove(&self, qemu: &Qemu) -> Result<()> {
        let found = qemu.linux(WITHIN)?.hash()?;
        ensure!(found == self.hash, "the hash of the guest's data is {found}, expected {}", self.hash);
        Ok(())
    }
}

impl Waiting {
    pub(super) fn start(bench: &Bench<'_>, stored: &Stored) -> Result<Self> {
        let qemu = bench.builder().incoming_defer().start()?;
        let counter = Counter::at(&qemu, stored.tick_address)?;
        Ok(Self { qemu, counter })
    }

    /// Has QEMU measure the time that its processors wait for pages.
    pub(super) fn count_waits(&self, on: bool) -> Result<()> {
        let capabilities = json!({ "capabilities": [{ "capability": "postcopy-blocktime", "state": on }] });
        self.qemu.qmp().execute("migrate-set-capabilities", capabilities)?;
        Ok(())
    }

    /// Returns that time of all processors in milliseconds.
    pub(super) fn blocked_ms(&self) -> Result<Option<u64>> {
        let info = self.qemu.qmp().execute("query-migrate", Value::Null)?;
        let each = info["postcopy-vcpu-blocktime"].as_array();
        Ok(each.map(|each| each.iter().filter_map(Value::as_u64).sum()))
    }
}
