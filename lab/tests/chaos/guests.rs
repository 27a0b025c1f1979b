//! The QEMUs of a run, observed without towline.

use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::{BootSector, Builder, Qemu, Version};

use crate::case::Case;

/// Timeout of anything that must happen.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
/// Time for which a live QEMU may not answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit until the states of the guest are stable.
const SETTLE_WITHIN: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// State of the guest in a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestState {
    /// The process has exited.
    Gone,
    /// The guest runs.
    Live,
    /// All of it is there; `cont` runs it.
    Whole,
    /// A part of it is there, or nothing.
    Part,
    /// In the middle of a migration.
    Busy,
}

/// The QEMUs of both ends.
pub(crate) struct Guests {
    pub(crate) source: Option<Qemu>,
    pub(crate) destinations: Vec<Qemu>,
}

/// Builder of a case's small guest.
pub(crate) fn builder(case: &Case) -> Builder {
    let boot_sector =
        BootSector { fill_mib: 4, words_per_page: 4, sweep_pages: case.sweep_pages, ..BootSector::default() };
    Qemu::builder(Version::V10_0).memory_mib(16).boot_sector(boot_sector)
}

/// Starts the guest and waits until it counts.
pub(crate) fn counting(case: &Case) -> Qemu {
    let qemu = builder(case).start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

impl Guests {
    pub(crate) fn all(&self) -> impl Iterator<Item = &Qemu> {
        self.destinations.iter().chain(&self.source)
    }

    /// Number of QEMUs that run the guest. The destinations are queried first: from the moment one runs, the
    /// source must not.
    pub(crate) fn live(&self) -> usize {
        self.all().filter(|qemu| guest_state(qemu) == GuestState::Live).count()
    }

    /// Waits until all states are stable; the source's is returned first.
    pub(crate) fn wait_stable(&self) -> Result<(Option<GuestState>, Vec<GuestState>), String> {
        let deadline = Instant::now() + SETTLE_WITHIN;
        loop {
            let source = self.source.as_ref().map(guest_state);
            let destinations: Vec<_> = self.destinations.iter().map(guest_state).collect();
            if source != Some(GuestState::Busy) && !destinations.contains(&GuestState::Busy) {
                return Ok((source, destinations));
            }
            if Instant::now() >= deadline {
                let states: Vec<_> = self.all().map(describe).collect();
                return Err(format!("it does not settle: {}", states.join("; ")));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns the current state of the guest in a QEMU.
pub(crate) fn guest_state(qemu: &Qemu) -> GuestState {
    let ask = |command: &str| qemu.qmp().execute_within(command, Value::Null, REPLY_TIMEOUT);
    let (Ok(status), Ok(migration)) = (ask("query-status"), ask("query-migrate")) else {
        return match qemu.wait_exit(Duration::from_secs(2)) {
            Ok(_) => GuestState::Gone,
            Err(_) => GuestState::Busy,
        };
    };
    // A QEMU that waits for its first connection gets none once all towlines have exited.
    let moves = migration["status"] == "active";
    match status["status"].as_str() {
        Some("running" | "suspended") => GuestState::Live,
        Some("paused" | "postmigrate") => GuestState::Whole,
        Some("inmigrate") if moves => GuestState::Busy,
        Some("inmigrate" | "prelaunch") => GuestState::Part,
        _ => GuestState::Busy,
    }
}

fn describe(qemu: &Qemu) -> String {
    let ask = |command: &str| qemu.qmp().execute_within(command, Value::Null, REPLY_TIMEOUT);
    format!(
        "{:?}, {:?}",
        ask("query-status").ok(),
        ask("query-migrate").ok().map(|info| info["status"].clone())
    )
}
