//! QEMU's mapped-ram files and multifd, controlled over QMP.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use towline_lab::Qemu;

use super::bench::Bench;

const MIGRATE_WITHIN: Duration = Duration::from_secs(120);
/// Practically unlimited; QEMU's default is 128 MiB/s.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;

/// Kind of migration by QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Migration {
    /// A file with pages at fixed offsets.
    MappedRam {
        /// Direct I/O.
        direct_io: bool,
    },
    /// A stream with lanes.
    Multifd,
}

/// Sets capabilities and parameters, before the measurement.
pub(super) fn set(bench: &Bench<'_>, qemu: &Qemu, migration: Migration) -> Result<()> {
    let mapped_ram = migration != Migration::Multifd;
    let direct_io = migration == Migration::MappedRam { direct_io: true };
    let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
    let capabilities = [capability("multifd", true), capability("mapped-ram", mapped_ram)];
    qemu.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    let parameters = json!({
        "multifd-channels": bench.parameters.lanes,
        "max-bandwidth": BANDWIDTH_UNLIMITED,
        "direct-io": direct_io,
    });
    qemu.qmp().execute("migrate-set-parameters", parameters)?;
    Ok(())
}

/// Migrates, and returns the time until QEMU reports `completed`.
pub(super) fn migrate(bench: &Bench<'_>, qemu: &Qemu, uri: &str) -> Result<Duration> {
    let started = Instant::now();
    qemu.qmp().execute("migrate", json!({ "uri": uri }))?;
    bench.wait("QEMU's own migration", MIGRATE_WITHIN, || {
        let info = qemu.qmp().execute("query-migrate", Value::Null)?;
        match info["status"].as_str() {
            Some("completed") => Ok(Some(started.elapsed())),
            Some("failed") => bail!("QEMU's own migration failed: {}", info["error-desc"]),
            _ => Ok(None),
        }
    })
}

/// Has a waiting QEMU load from this address.
pub(super) fn incoming(qemu: &Qemu, uri: &str) -> Result<()> {
    qemu.qmp().execute_within("migrate-incoming", json!({ "uri": uri }), MIGRATE_WITHIN)?;
    Ok(())
}

pub(super) fn file_uri(path: &Path) -> String {
    format!("file:{}", path.display())
}
