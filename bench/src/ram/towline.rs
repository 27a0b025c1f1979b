//! towline, run as by a user.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use towline_lab::{Qemu, Towline};

use super::bench::Bench;

const COPY_WITHIN: Duration = Duration::from_secs(120);
/// Timeout of reaping a process that has exited.
const END_WITHIN: Duration = Duration::from_secs(10);

/// A running `towline copy`.
pub(super) struct Copy {
    pub(super) started: Instant,
    process: Towline,
}

/// A successful copy.
pub(super) struct Copied {
    /// Time from the process's start to its end.
    pub(super) time: Duration,
    /// Field `ram` of its event `completed`.
    pub(super) ram: Value,
}

impl Copy {
    /// Runs `towline copy SOURCE DEST OPTIONS`.
    pub(super) fn start(
        bench: &Bench<'_>,
        source: &str,
        destination: &str,
        options: &[&str],
    ) -> Result<Self> {
        let lanes = bench.parameters.lanes.to_string();
        let mut arguments = vec!["copy", source, destination, "--json", "--multifd-channels", &lanes];
        arguments.extend(options);
        let started = Instant::now();
        let process = Towline::start(&bench.parameters.towline, arguments)?;
        Ok(Self { started, process })
    }

    /// Waits for its end.
    pub(super) fn wait(mut self, bench: &Bench<'_>) -> Result<Copied> {
        let ended =
            bench.wait("towline's end", COPY_WITHIN, || Ok((!self.process.runs()?).then(Instant::now)))?;
        let finished = self.process.wait(END_WITHIN)?;
        if !finished.status.success() {
            bail!("{}", finished.stderr.lines().next().unwrap_or("towline failed without an error"));
        }
        let events = finished.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let completed = events.into_iter().find(|event| event["event"] == "completed");
        let ram = completed.context("towline ended without the event `completed`")?["ram"].take();
        Ok(Copied { time: ended - self.started, ram })
    }

    /// Returns true while it is running.
    pub(super) fn runs(&mut self) -> Result<bool> {
        self.process.runs()
    }
}

pub(super) fn qmp_uri(qemu: &Qemu) -> String {
    format!("qmp:{}", qemu.qmp_path().display())
}

pub(super) fn image_uri(path: &Path) -> String {
    format!("file:{}", path.display())
}
