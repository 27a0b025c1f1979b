//! `cargo xtask bench run`: a guest from an image by one command, its memory mapped.
//!
//! ```text
//!   towline run ─► QEMU's monitor answers ─► RUNNING ─► the guest's first tick
//!   └─ command ──┴──────── restore ─────────┴─ tick ──┘
//! ```
//! QEMU 10.0 and the newest one, each size, with the image in the page cache and not. The restore is the time from the answer of QEMU's
//! monitor until the guest ran, by towline's own clock: `migrate-incoming`, and what precedes it. The counter is read through
//! `/proc/PID/mem` from the moment that the guest ran.
//!
//! Limits: one guest at a time, TCG.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use towline_lab::{Towline, Version, require_qemu, wait_until};

use crate::guest::{Counter, WITHIN, number};
use crate::machine::{self, Cache};
use crate::options::Bench;
use crate::stored::{self, Shape, Stored};
use crate::table::{Column, Contender, Entry, Figures, Row, Table};

const SIZES_MIB: [u64; 4] = [512, 1024, 4096, 8192];
/// Share of a guest's memory that is random.
const DATA_PERCENT: u64 = 50;
/// RAM of a q35 that begins at 4 GiB if the guest has more than it can have below.
const ABOVE: u64 = 4 << 30;
const BELOW_MAX: u64 = 2 << 30;

/// A guest, and the QEMU that it runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    size_mib: u64,
    version: Version,
}

impl Row for Place {
    fn name(&self) -> String {
        format!("{} MiB, {}", self.size_mib, name(self.version))
    }
}

const COLUMNS: [Column<Place, Cache>; 4] = [
    Column::spread("until QEMU answers", 1),
    Column::spread("then to RUNNING", 1),
    Column::spread("then to first tick", 1),
    Column::spread("whole command to first tick", 1),
];

fn name(version: Version) -> &'static str {
    if version == Version::V10_0 { "QEMU 10.0" } else { "the newest QEMU" }
}

/// Measures the table.
///
/// # Errors
/// A guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let versions = [Version::V10_0, Version::Newest];
    let versions: Vec<_> = versions.into_iter().filter(|it| require_qemu(name(*it), &[*it])).collect();
    let of_size = |size_mib| versions.iter().map(move |&version| Place { size_mib, version });
    let rows = bench.sizes_mib(&SIZES_MIB).into_iter().flat_map(of_size);
    let contenders = Cache::BOTH.map(|cache| Contender::new(cache.name(), cache));
    let shape =
        |row: Place| Shape { version: row.version, memory_mib: row.size_mib, data_percent: DATA_PERCENT };
    let results = stored::measure(bench, Entry::all(rows, &contenders), shape, |stored, it| {
        // Twice, as the first time from the disk leaves the host of a virtual machine busy with its memory.
        (0..2).try_for_each(|_| it.contender.kind.prepare(&stored.path()))?;
        run(stored)
    })?;
    let title =
        format!("towline run: a Linux guest from an image, {DATA_PERCENT} % of it random, memory mapped, ms");
    let table = results.table("run", &title, &COLUMNS, |_| true).with_notes([
        "until QEMU answers: from the begin of towline's process, with the checks of image and command line and the start of QEMU",
        "both following columns begin when QEMU's monitor has answered",
        &format!("images on {}", machine::filesystem(&std::env::temp_dir())),
    ]);
    Ok(vec![table])
}

/// A guest that `towline run` runs, which ends with this value.
pub(crate) struct Running {
    pub(crate) towline: Towline,
    /// Its event `running`.
    pub(crate) event: Value,
    /// Its counter.
    pub(crate) counter: Counter,
}

impl Running {
    /// Starts towline with these words, whose guest maps the image.
    pub(crate) fn start(stored: &Stored<'_>, words: Vec<String>) -> Result<Self> {
        let (bench, path) = (stored.bench, stored.path());
        let runtime = path.parent().context("the image is in a directory")?.display();
        let program = bench.options.towline.display().to_string();
        let words = [format!("XDG_RUNTIME_DIR={runtime}"), program].into_iter().chain(words);
        let mut towline = Towline::start("/usr/bin/env".as_ref(), words)?;
        let event = bench.wait("the guest to run", || {
            towline.check()?;
            let events = towline.stdout();
            let event = events.lines().find(|line| line.contains(r#""event":"running""#));
            Ok(event.map(serde_json::from_str::<Value>).transpose()?)
        })?;
        ensure!(event["memory"] == "mapped", "memory is not mapped: {event}");
        // Offset of the counter in the guest's RAM block.
        let at = stored.tick_address;
        let offset = if at < ABOVE { at } else { at - ABOVE + BELOW_MAX };
        let counter = Counter::mapped_from(&path, offset, number(&event, "pid")? as u64)?;
        Ok(Self { towline, event, counter })
    }
}

impl Drop for Running {
    /// Waits for the end of the guest, whose name the next one takes.
    fn drop(&mut self) {
        let guest = format!("/proc/{}", self.event["pid"]);
        let is_gone = || Ok((!std::path::Path::new(&guest).exists()).then_some(()));
        if let Err(error) =
            self.towline.kill().and_then(|()| wait_until("the end of a guest", WITHIN, is_gone))
        {
            eprintln!("{error:#}");
        }
    }
}

/// Arguments of `towline run`: the image has the command line, without what comes from this host only.
pub(crate) fn arguments(stored: &Stored<'_>) -> Vec<String> {
    let binary = stored.shape.version.command().get_program().to_string_lossy().into_owned();
    let mut words = ["run", "--json", "--share", "--name", "bench", "--qemu"].map(str::to_owned).to_vec();
    words.extend([binary, stored.path().display().to_string()]);
    for option in stored.kernel.chunks_exact(2) {
        words.extend(["--set".into(), format!("{}={}", option[0].trim_start_matches('-'), option[1])]);
    }
    words
}

/// Runs the guest until its counter steps, and ends it.
fn run(stored: &Stored<'_>) -> Result<Figures> {
    let started = Instant::now();
    let running = Running::start(stored, arguments(stored))?;
    let seen = Instant::now();
    let (answered, ran) =
        (number(&running.event, "answered-us")? / 1e3, number(&running.event, "running-us")? / 1e3);
    running.counter.tick(stored.bench, stored.tick)?;
    let (tick, whole) = (seen.elapsed(), started.elapsed());
    // Ended by SIGKILL with towline's process.
    let running = (ran - answered).max(0.0);
    Ok(Figures::from([
        ("until QEMU answers", answered),
        ("then to RUNNING", running),
        ("then to first tick", running + tick.as_secs_f64() * 1e3),
        ("whole command to first tick", whole.as_secs_f64() * 1e3),
    ]))
}
