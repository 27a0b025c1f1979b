//! QEMU's multifd, between two stock QEMUs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use towline_lab::{Builder, MemoryBackend, Qemu};

use super::transfer::{Conditions, Cost, Memory, Peer};
use crate::guest::{configure, incoming, number, small, stop};
use crate::machine::{self, MIB, cpu_seconds};
use crate::options::Bench;

/// Memory that the guest does not fill: its own image and the firmware's.
const SPARE_MIB: u64 = 16;
/// Memory that the lab's guest can address and fill.
const FILL_MIB_MAX: u64 = 2040;

/// A QEMU whose guest has filled its memory and is stopped.
pub(super) struct Source {
    qemu: Qemu,
    memory_mib: u64,
    certificates: PathBuf,
}

fn builder(memory_mib: u64, memory: Memory, certificates: &Path, endpoint: &str) -> Builder {
    let credentials = format!("tls-creds-x509,id=tls,dir={},endpoint={endpoint}", certificates.display());
    small(memory_mib.min(FILL_MIB_MAX), MemoryBackend::Memfd { prealloc: memory == Memory::Warm })
        .memory_mib(memory_mib + SPARE_MIB)
        .args(["-object", &credentials])
}

impl Source {
    pub(super) fn start(bench: &Bench, memory_mib: u64, certificates: &Path) -> Result<Self> {
        let qemu = bench.filled(builder(memory_mib, Memory::Warm, certificates, "client"))?;
        Ok(Self { qemu, memory_mib, certificates: certificates.into() })
    }

    /// Migrates to a new QEMU.
    pub(super) fn migrate(&self, bench: &Bench, conditions: Conditions, peer: Peer) -> Result<Cost> {
        let Conditions { memory, lanes } = conditions;
        let destination = builder(self.memory_mib, memory, &self.certificates, "server");
        let destination = destination.incoming_defer().start()?;
        if memory == Memory::Cold {
            machine::prefault(self.memory_mib * MIB)?;
        }
        set(&self.qemu, lanes, peer)?;
        // Zero-copy is not supported when receiving.
        set(&destination, lanes, if peer == Peer::ZeroCopy { Peer::Plain } else { peer })?;
        incoming(&destination, "tcp:127.0.0.1:0")?;
        let info = destination.qmp().execute("query-migrate", Value::Null)?;
        let port = info["socket-address"][0]["port"]
            .as_str()
            .context("the destination's query-migrate has no port")?;
        let cpu = || Ok::<_, anyhow::Error>(cpu_seconds(self.qemu.pid())? + cpu_seconds(destination.pid())?);
        let before = cpu()?;
        let migrated = bench.migrate(self.qemu.qmp(), &format!("tcp:127.0.0.1:{port}"));
        let cpu_seconds = cpu()? - before;
        let stopped = stop(&self.qemu);
        let info = migrated?;
        stopped?;
        let seconds = number(&info, "total-time")? / 1e3;
        Ok(Cost { seconds, cpu_seconds, bytes: number(&info["ram"], "normal-bytes")? })
    }
}

fn set(qemu: &Qemu, lanes: usize, peer: Peer) -> Result<()> {
    let tls = if peer == Peer::Tls { "tls" } else { "" };
    let parameters = || json!({ "multifd-channels": lanes, "tls-creds": tls });
    // QEMU refuses zero-copy together with TLS, so the former is disabled before the latter is enabled.
    configure(qemu.qmp(), &[("multifd", true), ("zero-copy-send", false)], parameters())?;
    match peer {
        Peer::ZeroCopy => configure(qemu.qmp(), &[("zero-copy-send", true)], parameters()),
        Peer::Plain | Peer::Tls => Ok(()),
    }
}
