//! Judgement of the guest's fate after a kill.

use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::{Finished, Qemu};

use super::{Victim, status};
use crate::support::WITHIN;

/// Time for which a live QEMU may not answer.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit until a source resumes its guest on its own.
const SETTLE_WITHIN: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Begin of the fault of a source whose monitor does not reply.
pub(super) const SOURCE_HANGS: &str = "the source's QEMU hangs";

/// Both QEMUs, observed without towline.
pub(super) struct Watch<'a> {
    source: &'a Qemu,
    destination: &'a Qemu,
}

/// The kill, and towline's output.
pub(super) struct Outcome {
    pub(super) victim: Victim,
    /// Towline waited at a phase, so all later work was still to be done.
    pub(super) held: bool,
    pub(super) phases: Vec<String>,
    /// Exit of towline, unless it was killed.
    pub(super) finished: Option<Finished>,
}

/// State of the guest in a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guest {
    /// The process has exited.
    Gone,
    Runs,
    /// All of it is there; `cont` runs it.
    Paused,
    /// A destination that lacks a part of it.
    Part,
    /// In the middle of a migration, or not answering.
    Busy,
}

impl<'a> Watch<'a> {
    pub(super) fn new(source: &'a Qemu, destination: &'a Qemu) -> Self {
        Self { source, destination }
    }

    /// Fails if both run. The destination is queried first: from the moment it runs the source must not.
    pub(super) fn check(&self) -> Result<(), String> {
        std::thread::sleep(POLL_INTERVAL);
        let runs = |qemu: &Qemu| guest(qemu) == Guest::Runs;
        if runs(self.destination) && runs(self.source) { Err("two guests run".into()) } else { Ok(()) }
    }

    /// Waits until all states are stable.
    fn wait_stable(&self) -> Result<(Guest, Guest), String> {
        let deadline = Instant::now() + SETTLE_WITHIN;
        loop {
            self.check()?;
            let (destination, source) = (guest(self.destination), guest(self.source));
            if ![destination, source].contains(&Guest::Busy) {
                return Ok((source, destination));
            }
            if Instant::now() >= deadline {
                let what = if source == Guest::Busy && status(self.source).is_none() {
                    SOURCE_HANGS
                } else {
                    "it does not settle"
                };
                return Err(format!(
                    "{what}: source {source:?}, {}; destination {destination:?}, {}",
                    describe(self.source),
                    describe(self.destination)
                ));
            }
        }
    }
}

/// Compares the guest's fate with the guarantees and with towline's report.
pub(super) fn judge(watch: &Watch<'_>, outcome: &Outcome) -> Result<String, String> {
    let (source, destination) = watch.wait_stable()?;
    let code = outcome.finished.as_ref().and_then(|finished| finished.status.code());
    let stderr = outcome.finished.as_ref().map_or("", |finished| finished.stderr.trim());
    let is_reported = |phase: &str| outcome.phases.iter().any(|name| name == phase);
    let found = format!(
        "source {source:?}, destination {destination:?}, exit status {code:?}, last phase {}, stderr {stderr:?}",
        outcome.phases.last().map_or("none", String::as_str)
    );
    let alive = [source, destination].iter().any(|guest| matches!(guest, Guest::Runs | Guest::Paused));
    if !alive {
        // The killed QEMU had the sole complete guest: the source before the destination had it, or the
        // destination after `cont` was sent to it.
        let may = match outcome.victim {
            Victim::Source => !is_reported("Loaded"),
            Victim::Destination => is_reported("CutOver"),
            Victim::Towline | Victim::Connection => false,
        };
        let names = stderr.contains("has ended, and the guest with it") || stderr.contains("was not reached");
        let is_consistent = match (outcome.victim, code) {
            (Victim::Source, Some(3)) => names,
            // The kill came too early for it, or the connection did not exist.
            (Victim::Source, Some(1)) => stderr.contains("unreached"),
            (Victim::Destination, Some(3)) => true,
            // Towline had finished before.
            (Victim::Destination, Some(0)) => !outcome.held,
            _ => false,
        };
        return if may && is_consistent {
            Ok(format!("gone with its QEMU: {found}"))
        } else {
            Err(format!("lost: {found}"))
        };
    }
    let was_done = outcome.victim == Victim::Destination && !outcome.held;
    let fits = match code {
        // Killed, so there is no report.
        None => true,
        Some(0) => destination == Guest::Runs || (destination == Guest::Gone && was_done),
        Some(1) => source == Guest::Runs && destination != Guest::Runs,
        Some(3) => {
            let at_source = stderr.contains("paused at its source") && source == Guest::Paused;
            let held = stderr.contains("its source still holds it") && source == Guest::Paused;
            at_source || held
        }
        _ => false,
    };
    if !fits {
        return Err(format!("misreported: {found}"));
    }
    if [source, destination].contains(&Guest::Runs) {
        return Ok(found);
    }
    let qemu = if source == Guest::Paused { watch.source } else { watch.destination };
    qemu.qmp().execute("cont", Value::Null).map_err(|error| format!("`cont`: {error:#}: {found}"))?;
    qemu.wait_counting(WITHIN).map_err(|error| format!("after `cont`: {error:#}: {found}"))?;
    Ok(format!("goes on with `cont`: {found}"))
}

fn guest(qemu: &Qemu) -> Guest {
    if qemu.exited().is_ok_and(|exited| exited.is_some()) {
        return Guest::Gone;
    }
    let Some(status) = status(qemu) else {
        return if qemu.exited().is_ok_and(|exited| exited.is_some()) { Guest::Gone } else { Guest::Busy };
    };
    match status["status"].as_str() {
        Some("running") => Guest::Runs,
        Some("paused" | "postmigrate") => Guest::Paused,
        Some("inmigrate" | "prelaunch") => Guest::Part,
        _ => Guest::Busy,
    }
}

fn describe(qemu: &Qemu) -> String {
    let migration = qemu.qmp().execute_within("query-migrate", Value::Null, REPLY_TIMEOUT);
    let migration = migration.map(|info| format!("migration {} ({})", info["status"], info["error-desc"]));
    format!("status {:?}, {}", status(qemu), migration.unwrap_or_else(|error| format!("{error:#}")))
}
