//! `cargo xtask bench instant`: a restored guest that runs at once, against QEMU's own restore and postcopy.
//!
//! ```text
//!   image ─► waiting QEMU     QEMU's mapped-ram, 4 channels · towline copy · --postcopy · with preempt · with its working set
//!   QEMU  ─► waiting QEMU     postcopy, with and without preempt
//!   for each: time to RUNNING · to the first new tick · to completion · faults and their latencies
//! ```
//! A Linux guest of each size, three quarters of it random. Its counter is read from the destination's memory, but only once QEMU
//! reports that it runs: an earlier read could allocate a page between QEMU's discard of the memory and its userfaultfd.
//!
//! Limits: one guest at a time, TCG. QEMU before 10.1 does not report the latency of faults at its source, so p50 and p99 are towline's;
//! the destination's own measurement of its processors' waiting covers both.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use towline_lab::expect::qmp;

use crate::guest::{Copying, Counter, Machine, WITHIN, configure, file, incoming, listen};
use crate::machine::{self, Cache, MIB};
use crate::options::Bench;
use crate::stored::{self, KERNEL_MIB, Shape, Stored};
use crate::table::{Column, Contender, Entry, Figures, Row, Table};

const SIZES_MIB: [u64; 3] = [1024, 4096, 8192];
/// Share of a guest's memory that is random.
const DATA_PERCENT: u64 = 75;
/// Spare memory beside two guests in MiB.
const SPARE_MIB: u64 = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Qemu,
    /// `towline copy` with these options.
    Towline(&'static [&'static str]),
    /// The same with [`PREEMPT`], and with a record of the pages that an earlier run used first.
    WorkingSet,
    /// From QEMU to QEMU, by postcopy.
    Live,
    /// The same with `postcopy-preempt`.
    LivePreempt,
}

const PREEMPT: &[&str] = &["--postcopy", "--postcopy-preempt"];
const QEMU: Contender<Method> = Contender::new("QEMU's own restore, 4 channels", Method::Qemu);
const LIVE: Contender<Method> = Contender::new("QEMU to QEMU, postcopy", Method::Live);
const LIVE_PREEMPT: Contender<Method> = Contender::new("QEMU to QEMU, postcopy-preempt", Method::LivePreempt);
const CONTENDERS: [Contender<Method>; 7] = [
    QEMU,
    Contender::new("towline copy", Method::Towline(&[])),
    Contender::new("towline --postcopy", Method::Towline(&["--postcopy"])),
    Contender::new("towline --postcopy-preempt", Method::Towline(PREEMPT)),
    Contender::new("towline --postcopy-preempt, working set known", Method::WorkingSet),
    LIVE,
    LIVE_PREEMPT,
];

/// Conditions of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Conditions {
    size_mib: u64,
    cache: Cache,
}

type Restore = Entry<Conditions, Method>;

impl Row for Conditions {
    fn name(&self) -> String {
        format!("{} MiB guest, {}", self.size_mib, self.cache.name())
    }
}

const COLUMNS: [Column<Conditions, Method>; 10] = [
    Column::spread("ms to RUNNING", 0),
    Column::ratio("QEMU's own ×", "RUNNING, 1/s", |it| it.with(QEMU)),
    Column::spread("ms to first tick", 0),
    Column::spread("s to completion", 2),
    Column::ratio("× QEMU's own", "s to completion", |it| it.with(QEMU)),
    Column::ratio("× QEMU to QEMU", "s to completion", against_live),
    Column::spread("faults", 0),
    Column::spread("fault p50 ms", 2),
    Column::spread("p99 ms", 2),
    Column::spread("processors waited ms", 0),
];
const NOTES: [&str; 6] = [
    "the clock starts with towline's process, or with `migrate-incoming` (QEMU to QEMU: `migrate`); the destination was ready",
    "QEMU's own ×: time to RUNNING of QEMU's own restore in the same round, divided by the row's",
    "to completion: until the destination reports it; ×: of the time of QEMU's own restore, and of postcopy from QEMU to QEMU with the row's preempt setting, in the same round",
    "fault p50, p99: from a request's arrival at towline until its page was handed to the kernel",
    "processors waited: the destination's postcopy-blocktime, of all its processors",
    "after each --postcopy the guest hashed its data, equal unless the row has an error",
];

/// QEMU to QEMU reads no image: its figures are those of the rounds with the page cache.
fn against_live(it: Restore) -> Restore {
    let row = Conditions { cache: Cache::Cached, ..it.row };
    let preempts = [Method::Towline(PREEMPT), Method::WorkingSet, Method::LivePreempt];
    let is_preempt = preempts.contains(&it.contender.kind);
    Entry { row, contender: if is_preempt { LIVE_PREEMPT } else { LIVE } }
}

/// Measures the table; about a quarter of an hour for three runs of the published sizes.
///
/// # Errors
/// QEMU is missing, a guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let of_size = |size_mib| Cache::BOTH.map(|cache| Conditions { size_mib, cache });
    let rows = bench.sizes_mib(&SIZES_MIB).into_iter().flat_map(of_size);
    let mut all = Entry::all(rows, &CONTENDERS);
    all.retain(|it| it.row.cache == Cache::Cached || ![LIVE, LIVE_PREEMPT].contains(&it.contender));
    let shape = |row: Conditions| Shape::of(row.size_mib, DATA_PERCENT);
    let results = stored::measure(bench, all, shape, Stored::restore)?;
    let title = format!("Restore of a Linux guest, {DATA_PERCENT} % of it random, into cold memory");
    Ok(vec![results.table("instant", &title, &COLUMNS, |_| true).with_notes(NOTES)])
}

impl Stored<'_> {
    fn restore(&self, it: Restore) -> Result<Figures> {
        let options = match it.contender.kind {
            Method::Live | Method::LivePreempt => return self.live(it.contender),
            Method::Towline(options) => options,
            Method::WorkingSet => PREEMPT,
            Method::Qemu => &[],
        };
        let (working_set, is_wanted) = (self.working_set(), it.contender.kind == Method::WorkingSet);
        if working_set.is_file() && !is_wanted {
            // The restore is like a first one.
            std::fs::remove_file(working_set)?;
        } else if is_wanted && !working_set.is_file() {
            self.copy(&self.waiting()?, PREEMPT)?.wait(self.bench)?;
        }
        let waiting = self.waiting()?;
        it.row.cache.prepare(&self.path())?;
        machine::prefault(self.shape.data_mib() * MIB)?;
        if it.contender == QEMU {
            return self.by_qemu(&waiting);
        }
        let figures = self.by_towline(&waiting, options)?;
        if !options.is_empty() {
            let (found, expected) = (waiting.qemu.linux(WITHIN)?.hash()?, &self.hash);
            ensure!(found == *expected, "the hash of the guest's data is {found}, expected {expected}");
        }
        Ok(figures)
    }

    fn waiting(&self) -> Result<Machine> {
        let qemu = self.shape.builder().incoming_defer().start()?;
        let counter = Counter::at(&qemu, self.tick_address)?;
        Ok(Machine { qemu, counter })
    }

    /// Starts a copy of the image to a waiting QEMU.
    fn copy(&self, waiting: &Machine, options: &[&str]) -> Result<Copying> {
        let (image, to) = (self.path().display().to_string(), qmp(&waiting.qemu));
        self.bench.copy([&*image, &to].iter().chain(options).copied())
    }

    fn working_set(&self) -> PathBuf {
        self.path().with_extension("img.working-set.json")
    }

    fn by_qemu(&self, waiting: &Machine) -> Result<Figures> {
        let capabilities = [("multifd", true), ("mapped-ram", true)];
        configure(waiting.qemu.qmp(), &capabilities, json!({ "multifd-channels": 4 }))?;
        let started = Instant::now();
        incoming(&waiting.qemu, &file(&self.path()))?;
        let mut figures = self.watch(waiting, started, || Ok(self.tick), || Ok(()))?;
        // It runs when it has loaded everything.
        figures.insert("s to completion", figures["ms to RUNNING"] / 1e3);
        Ok(figures)
    }

    fn by_towline(&self, waiting: &Machine, options: &[&str]) -> Result<Figures> {
        let blocktime = ("postcopy-blocktime", !options.is_empty());
        configure(waiting.qemu.qmp(), &[blocktime], json!({}))?;
        let mut copying = self.copy(waiting, options)?;
        let started = copying.started;
        let mut figures = self.watch(waiting, started, || Ok(self.tick), || copying.check())?;
        self.complete(waiting, started, &mut figures)?;
        let event = copying.wait(self.bench)?.event;
        let faults = &event["postcopy"]["faults"];
        for (name, key, scale) in [
            ("faults", "requests", 1.0),
            ("fault p50 ms", "latency-p50-us", 1e-3),
            ("p99 ms", "latency-p99-us", 1e-3),
        ] {
            figures.extend(faults[key].as_f64().map(|value| (name, value * scale)));
        }
        Ok(figures)
    }

    /// Migrates from a QEMU with the guest, which is paused until then so that it does not use the processors.
    fn live(&self, contender: Contender<Method>) -> Result<Figures> {
        let needed = 2 * (self.shape.data_mib() + KERNEL_MIB) + SPARE_MIB;
        let available = machine::memory("MemAvailable:")? / MIB;
        ensure!(needed <= available, "two guests need {needed} MiB, and {available} MiB are available");
        let source = self.waiting()?;
        self.copy(&source, &["--paused"])?.wait(self.bench)?;
        let waiting = self.waiting()?;
        for (qemu, own) in [(&source.qemu, "return-path"), (&waiting.qemu, "postcopy-blocktime")] {
            let preempt = ("postcopy-preempt", contender == LIVE_PREEMPT);
            configure(qemu.qmp(), &[("postcopy-ram", true), preempt, (own, true)], json!({}))?;
        }
        let uri = listen(&waiting.qemu)?;
        source.qemu.qmp().execute("cont", Value::Null)?;
        machine::prefault(self.shape.data_mib() * MIB)?;
        let started = Instant::now();
        source.qemu.qmp().execute("migrate", json!({ "uri": uri }))?;
        // At once, without a precopy pass, as with an image.
        source.qemu.qmp().execute("migrate-start-postcopy", Value::Null)?;
        // The source's counter does not change after the switchover.
        let mut figures = self.watch(&waiting, started, || source.counter.read(), || Ok(()))?;
        self.complete(&waiting, started, &mut figures)?;
        let info = self.bench.migrated(source.qemu.qmp())?;
        figures.extend(info["ram"]["postcopy-requests"].as_f64().map(|faults| ("faults", faults)));
        Ok(figures)
    }

    /// Waits for RUNNING and for the first tick beyond `past`; `check` fails when they cannot happen.
    fn watch(
        &self,
        waiting: &Machine,
        started: Instant,
        past: impl Fn() -> Result<u64>,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Figures> {
        self.bench.wait("the guest to run", || {
            check()?;
            Ok((waiting.qemu.qmp().status()? == "running").then_some(()))
        })?;
        let running = started.elapsed().as_secs_f64();
        waiting.counter.tick(self.bench, past()?)?;
        let tick = started.elapsed().as_secs_f64();
        Ok(Figures::from([
            ("ms to RUNNING", running * 1e3),
            ("RUNNING, 1/s", 1.0 / running),
            ("ms to first tick", tick * 1e3),
        ]))
    }

    /// Waits until the destination reports completion.
    fn complete(&self, waiting: &Machine, started: Instant, figures: &mut Figures) -> Result<()> {
        let info = self.bench.migrated(waiting.qemu.qmp())?;
        figures.insert("s to completion", started.elapsed().as_secs_f64());
        // Of each processor, in milliseconds.
        let each = info["postcopy-vcpu-blocktime"].as_array();
        let blocked = each.map(|each| each.iter().filter_map(Value::as_f64).sum());
        figures.extend(blocked.map(|blocked: f64| ("processors waited ms", blocked)));
        Ok(())
    }
}
