//! Reports of guests that are started, run and end: lines for people, and events.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use towline_control::plan::{CopyPhase, Observer};
use towline_control::qemu::StartedQemu;
use towline_launch::RunningQemu;

use super::rejection::Rejection;
use super::request::{GuestStart, MemoryOrigin};
use crate::command_line::quoted;
use crate::console;
use crate::events;
use crate::exit::Exit;
use crate::progress::Reporter;

/// Reports of one command.
pub(crate) struct RunReport<'a> {
    pub(crate) reporter: &'a Reporter,
    /// Begin of the command.
    pub(crate) begun: Instant,
    pub(crate) memory: &'a MemoryOrigin,
    /// The image's absolute path, or its location.
    pub(crate) image: &'a Path,
}

/// A guest that was started.
#[derive(Debug)]
pub(crate) struct StartedGuest {
    pub(crate) qemu: RunningQemu,
    /// Its monitor, for the copy; `None`: the copy connects to it.
    pub(crate) monitor: Option<StartedQemu>,
    /// Time from the begin of the command until its monitor answered.
    pub(crate) answered: Duration,
    /// True once the guest may have run, so that it may have written to its disks.
    pub(crate) has_run: AtomicBool,
}

/// Reports that a guest runs, as soon as it does.
pub(crate) struct RunningObserver<'a> {
    pub(crate) report: &'a RunReport<'a>,
    pub(crate) guest: &'a StartedGuest,
}

impl RunReport<'_> {
    /// Reports the command that is about to start a QEMU, without secrets. The launcher adds its monitor, `-incoming`, `-sandbox` and
    /// `-name`.
    pub(crate) fn starting(&self, start: &GuestStart) {
        let arguments = start.command_line.to_shown_arguments();
        let words = std::iter::once(start.host.binary.as_os_str()).chain(arguments.iter().map(AsRef::as_ref));
        let words: Vec<_> = words.collect();
        let shown: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        self.reporter.event("starting", json!({ "name": start.name.as_str(), "command": shown }));
        let quoted: Vec<_> = words.into_iter().map(quoted).collect();
        self.reporter.line(&quoted.join(" "));
    }

    fn running(&self, guest: &StartedGuest) {
        let (name, qmp) = (guest.qemu.directory().name(), guest.qemu.qmp_path());
        let fields = json!({
            "name": name.as_str(),
            "pid": guest.qemu.pid(),
            // A path need not be UTF-8, and an event is.
            "qmp": qmp.to_string_lossy(),
            "image": self.image.to_string_lossy(),
            "memory": self.memory.id(),
            "answered-us": microseconds(guest.answered),
            "running-us": microseconds(self.begun.elapsed()),
        });
        self.reporter.event("running", fields);
        self.reporter.line(&format!("{name} runs, qmp:{}", qmp.display()));
    }
}

impl Observer for RunningObserver<'_> {
    fn phase(&self, phase: CopyPhase) {
        // It runs before this is known: `Running` follows the answer to `cont`, which may get lost.
        if matches!(phase, CopyPhase::Release | CopyPhase::CutOver | CopyPhase::Running) {
            self.guest.has_run.store(true, Ordering::Relaxed);
        }
        if phase == CopyPhase::Running {
            self.report.running(self.guest);
        }
    }
}

/// Reports the end of a command.
pub(crate) fn finished(reporter: &Reporter, guests: usize, exit: Exit) -> Exit {
    reporter.event("run", events::with_exit(json!({ "guests": guests }), exit));
    exit
}

/// Reports that no guest was started.
pub(crate) fn rejected(reporter: &Reporter, rejection: &Rejection) -> Exit {
    let mut fields = events::error(&rejection.text);
    fields["reason"] = rejection.reason.into();
    reporter.event("failed", events::with_exit(fields, rejection.exit));
    console::error(&rejection.text);
    rejection.exit
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
