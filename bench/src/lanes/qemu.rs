//! QEMU's multifd, between two stock QEMUs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};
use towline_lab::{BootSector, Builder, MemoryBackend, Qemu, Version, wait_until};

use super::entry::{MIB, Parameters, Peer};
use super::process::Cost;
use crate::machine::{self, cpu_seconds};

/// Timeout of filling the guest's memory.
const FILL_WITHIN: Duration = Duration::from_secs(240);
const MIGRATE_WITHIN: Duration = Duration::from_secs(120);
/// Practically unlimited; QEMU's default is 128 MiB/s.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;
/// Memory that the guest does not fill: its own image and the firmware's.
const SPARE_MIB: u64 = 16;
/// Memory that the lab's guest can address and fill.
const FILL_MIB_MAX: u64 = 2040;
const WORDS_PER_PAGE: u32 = 1024;

/// A QEMU whose guest has filled its memory and is stopped.
pub(super) struct Source {
    qemu: Qemu,
}

/// Settings of a migration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings<'a> {
    pub(super) lanes: usize,
    pub(super) peer: Peer,
    pub(super) is_cold: bool,
    pub(super) cpus: Option<(&'a [usize], &'a [usize])>,
    pub(super) certificates: &'a Path,
}

fn builder(parameters: &Parameters, is_cold: bool, certificates: &Path, endpoint: &str) -> Builder {
    let fill_mib = parameters.memory_mib.min(FILL_MIB_MAX);
    let guest =
        BootSector { fill_mib, words_per_page: WORDS_PER_PAGE, seed: 1, sweep_pages: 0, uses_popcnt: false };
    Qemu::builder(Version::V10_0)
        .memory_mib(parameters.memory_mib + SPARE_MIB)
        .memory_backend(MemoryBackend::Memfd { prealloc: !is_cold })
        .boot_sector(guest)
        .args([
            "-object",
            &format!("tls-creds-x509,id=tls,dir={},endpoint={endpoint}", certificates.display()),
        ])
}

impl Source {
    pub(super) fn start(parameters: &Parameters, certificates: &Path) -> Result<Self> {
        eprintln!("lanes: filling {} MiB of a QEMU's guest", parameters.memory_mib.min(FILL_MIB_MAX));
        let qemu = builder(parameters, false, certificates, "client").start()?;
        wait_until("the guest to fill its memory", FILL_WITHIN, || {
            parameters.cancel.check()?;
            Ok(qemu.filled()?.then_some(()))
        })?;
        let source = Self { qemu };
        source.stop()?;
        Ok(source)
    }

    /// Stops the guest, also after a migration.
    fn stop(&self) -> Result<()> {
        if self.qemu.qmp().status()? == "postmigrate" {
            self.qemu.qmp().execute("cont", Value::Null)?;
        }
        self.qemu.qmp().execute("stop", Value::Null)?;
        Ok(())
    }

    /// Migrates to a new QEMU.
    pub(super) fn migrate(&self, parameters: &Parameters, settings: Settings<'_>) -> Result<Cost> {
        let destination = builder(parameters, settings.is_cold, settings.certificates, "server");
        let destination = destination.incoming_defer().start()?;
        if settings.is_cold {
            machine::prefault(parameters.memory_mib * MIB / 4 * 5)?;
        }
        set(&self.qemu, settings.lanes, settings.peer)?;
        // Zero-copy is not supported when receiving.
        let peer = if settings.peer == Peer::ZeroCopy { Peer::Plain } else { settings.peer };
        set(&destination, settings.lanes, peer)?;
        let everywhere: Vec<usize> = (0..CpuSet::MAX_CPU).collect();
        let (from, to) = settings.cpus.unwrap_or((&everywhere, &everywhere));
        pin(&self.qemu, from)?;
        pin(&destination, to)?;
        destination.qmp().execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }))?;
        let info = destination.qmp().execute("query-migrate", Value::Null)?;
        let port = info["socket-address"][0]["port"]
            .as_str()
            .context("the destination's query-migrate has no port")?;
        let cpu = || Ok::<_, anyhow::Error>(cpu_seconds(self.qemu.pid())? + cpu_seconds(destination.pid())?);
        let before = cpu()?;
        let migrated = self.wait(parameters, &format!("tcp:127.0.0.1:{port}"));
        let cpu_seconds = cpu()? - before;
        let stopped = self.stop();
        let info = migrated?;
        stopped?;
        let number = |value: &Value, key: &str| {
            value[key].as_f64().with_context(|| format!("query-migrate without {key}"))
        };
        Ok(Cost {
            seconds: number(&info, "total-time")? / 1e3,
            cpu_seconds,
            bytes: number(&info["ram"], "normal-bytes")?,
            source: Value::Null,
        })
    }

    fn wait(&self, parameters: &Parameters, uri: &str) -> Result<Value> {
        self.qemu.qmp().execute("migrate", json!({ "uri": uri }))?;
        wait_until("QEMU's own migration", MIGRATE_WITHIN, || {
            parameters.cancel.check()?;
            let info = self.qemu.qmp().execute("query-migrate", Value::Null)?;
            match info["status"].as_str() {
                Some("completed") => Ok(Some(info)),
                Some("failed") => bail!("QEMU's own migration failed: {}", info["error-desc"]),
                _ => Ok(None),
            }
        })
    }
}

fn set(qemu: &Qemu, lanes: usize, peer: Peer) -> Result<()> {
    let capabilities = |is_zero_copy: bool| {
        let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
        let capabilities = [capability("multifd", true), capability("zero-copy-send", is_zero_copy)];
        qemu.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))
    };
    // QEMU refuses zero-copy together with TLS, so the former is disabled before the latter is enabled.
    capabilities(false)?;
    let tls = if peer == Peer::Tls { "tls" } else { "" };
    let parameters =
        json!({ "multifd-channels": lanes, "max-bandwidth": BANDWIDTH_UNLIMITED, "tls-creds": tls });
    qemu.qmp().execute("migrate-set-parameters", parameters)?;
    if peer == Peer::ZeroCopy {
        capabilities(true)?;
    }
    Ok(())
}

/// Pins all threads; later ones inherit that.
fn pin(qemu: &Qemu, cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    for entry in std::fs::read_dir(format!("/proc/{}/task", qemu.pid()))? {
        let number = entry?.file_name().to_string_lossy().parse::<i32>()?;
        sched_setaffinity(Pid::from_raw(number), &set)?;
    }
    Ok(())
}
