//! QEMU's own: mapped-ram files and multifd, driven over the lab's monitor.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use towline_lab::Qemu;

use super::Bench;

const MIGRATE_WITHIN: Duration = Duration::from_secs(120);
/// QEMU's "as fast as it goes"; its default is 128 MiB/s.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;

/// How QEMU is to migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Into or out of a file with pages at fixed places.
    MappedRam {
        /// Past the page cache.
        direct_io: bool,
    },
    /// A stream with lanes.
    Multifd,
}

/// Sets capabilities and parameters; not part of what is timed.
pub(super) fn set(bench: &Bench<'_>, qemu: &Qemu, way: Way) -> Result<()> {
    let mapped_ram = way != Way::Multifd;
    let direct_io = way == Way::MappedRam { direct_io: true };
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

/// Migrates and waits until QEMU says `completed`; the time between.
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

/// Has a QEMU that waits load from there.
pub(super) fn incoming(qemu: &Qemu, uri: &str) -> Result<()> {
    qemu.qmp().execute_within("migrate-incoming", json!({ "uri": uri }), MIGRATE_WITHIN)?;
    Ok(())
}

pub(super) fn file_uri(path: &Path) -> String {
    format!("file:{}", path.display())
}
