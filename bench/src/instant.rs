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

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use towline_lab::{Qemu, Version, paths};

use crate::guest::{Copying, Counter, WITHIN, configure, endpoint, incoming};
use crate::machine::{self, Cache, MIB};
use crate::options::Bench;
use crate::stored::{KERNEL_MIB, Shape, Stored};
use crate::table::{self, Column, Entry, Figures, Results, Table};

const SIZES_MIB: [u64; 3] = [1024, 4096, 8192];
/// Share of a guest's memory that is random.
const DATA_PERCENT: u64 = 75;
/// Spare memory beside two guests in MiB.
const SPARE_MIB: u64 = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Qemu,
    Copy,
    Postcopy(Preempt, WorkingSet),
    Live(Preempt),
}

/// Connection of the requested pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Preempt {
    Off,
    On,
}

/// Record of the pages that an earlier run used first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkingSet {
    Unknown,
    Known,
}

const METHODS: [Method; 7] = [
    Method::Qemu,
    Method::Copy,
    Method::Postcopy(Preempt::Off, WorkingSet::Unknown),
    Method::Postcopy(Preempt::On, WorkingSet::Unknown),
    Method::Postcopy(Preempt::On, WorkingSet::Known),
    Method::Live(Preempt::Off),
    Method::Live(Preempt::On),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Restore {
    size_mib: u64,
    cache: Cache,
    method: Method,
}

impl Entry for Restore {
    fn group(&self) -> String {
        format!("{} MiB guest, {}", self.size_mib, self.cache.name())
    }

    fn label(&self) -> &'static str {
        match self.method {
            Method::Qemu => "QEMU's own restore, 4 channels",
            Method::Copy => "towline copy",
            Method::Postcopy(Preempt::Off, _) => "towline --postcopy",
            Method::Postcopy(_, WorkingSet::Unknown) => "towline --postcopy-preempt",
            Method::Postcopy(_, WorkingSet::Known) => "towline --postcopy-preempt, working set known",
            Method::Live(Preempt::Off) => "QEMU to QEMU, postcopy",
            Method::Live(Preempt::On) => "QEMU to QEMU, postcopy-preempt",
        }
    }
}

const COLUMNS: [Column<Restore>; 10] = [
    Column::spread("ms to RUNNING", 0),
    Column::ratio("QEMU's own ×", "RUNNING, 1/s", |it| Restore { method: Method::Qemu, ..it }),
    Column::spread("ms to first tick", 0),
    Column::spread("s to completion", 2),
    Column::ratio("× QEMU's own", "s to completion", |it| Restore { method: Method::Qemu, ..it }),
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
    let preempt = match it.method {
        Method::Postcopy(preempt, _) | Method::Live(preempt) => preempt,
        Method::Qemu | Method::Copy => Preempt::Off,
    };
    Restore { cache: Cache::Cached, method: Method::Live(preempt), ..it }
}

/// Measures the table; about a quarter of an hour for three runs of the published sizes.
///
/// # Errors
/// QEMU is missing, a guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let qemu = paths::QEMU_10_0;
    ensure!(Path::new(qemu).is_file(), "{qemu} is missing; run `cargo xtask setup`");
    let sizes = bench.sizes_mib(&SIZES_MIB);
    let of_size = |&size_mib: &u64| {
        let of_cache = move |cache| METHODS.map(|method| Restore { size_mib, cache, method });
        Cache::BOTH.into_iter().flat_map(of_cache)
    };
    let is_measured = |it: &Restore| it.cache == Cache::Cached || !matches!(it.method, Method::Live(_));
    let all = bench.chosen(sizes.iter().flat_map(of_size).filter(is_measured))?;
    let mut results = Results::none();
    for of_size in all.chunk_by(|one, other| one.size_mib == other.size_mib) {
        let shape =
            Shape { version: Version::V10_0, memory_mib: of_size[0].size_mib, data_percent: DATA_PERCENT };
        let restores = Restores { bench, stored: Stored::new(bench, shape)? };
        results.extend(table::measure(bench, of_size.iter().copied(), |it| restores.run(it))?);
    }
    let title = format!("Restore of a Linux guest, {DATA_PERCENT} % of it random, into cold memory");
    Ok(vec![results.table("instant", &title, &COLUMNS, |_| true).with_notes(NOTES)])
}

struct Restores<'a> {
    bench: &'a Bench,
    stored: Stored,
}

/// A QEMU that waits for the guest.
struct Waiting {
    qemu: Qemu,
    counter: Counter,
}

impl Restores<'_> {
    fn run(&self, it: Restore) -> Result<Figures> {
        let options: &[&str] = match it.method {
            Method::Live(preempt) => return self.live(preempt),
            Method::Postcopy(Preempt::Off, _) => &["--postcopy"],
            Method::Postcopy(Preempt::On, _) => &["--postcopy", "--postcopy-preempt"],
            Method::Copy | Method::Qemu => &[],
        };
        match it.method {
            Method::Postcopy(_, WorkingSet::Known) => self.know_working_set()?,
            _ => self.forget_working_set()?,
        }
        let waiting = self.waiting()?;
        it.cache.prepare(&self.stored.path())?;
        machine::prefault(self.stored.shape.data_mib() * MIB)?;
        if it.method == Method::Qemu {
            return self.by_qemu(&waiting);
        }
        let figures = self.by_towline(&waiting, options)?;
        if !options.is_empty() {
            let (found, expected) = (waiting.qemu.linux(WITHIN)?.hash()?, &self.stored.hash);
            ensure!(found == *expected, "the hash of the guest's data is {found}, expected {expected}");
        }
        Ok(figures)
    }

    fn waiting(&self) -> Result<Waiting> {
        let qemu = self.stored.shape.builder().incoming_defer().start()?;
        let counter = Counter::at(&qemu, self.stored.tick_address)?;
        Ok(Waiting { qemu, counter })
    }

    /// Starts a copy of the image to a waiting QEMU.
    fn copy(&self, waiting: &Waiting, options: &[&str]) -> Result<Copying> {
        let (image, to) = (self.stored.path().display().to_string(), endpoint(&waiting.qemu));
        self.bench.copy([&*image, &to].iter().chain(options).copied())
    }

    fn working_set(&self) -> PathBuf {
        self.stored.path().with_extension("img.working-set.json")
    }

    /// Removes the working set, so that the next restore is like a first one.
    fn forget_working_set(&self) -> Result<()> {
        match std::fs::remove_file(self.working_set()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Ensures that a working set exists, if necessary by a restore.
    fn know_working_set(&self) -> Result<()> {
        if !self.working_set().is_file() {
            let waiting = self.waiting()?;
            self.copy(&waiting, &["--postcopy", "--postcopy-preempt"])?.wait(self.bench)?;
        }
        Ok(())
    }

    fn by_qemu(&self, waiting: &Waiting) -> Result<Figures> {
        let capabilities = [("multifd", true), ("mapped-ram", true)];
        configure(&waiting.qemu, &capabilities, json!({ "multifd-channels": 4 }))?;
        let started = Instant::now();
        incoming(&waiting.qemu, &format!("file:{}", self.stored.path().display()))?;
        let mut figures = self.watch(waiting, started, || Ok(self.stored.tick), || Ok(()))?;
        // It runs when it has loaded everything.
        figures.insert("s to completion", figures["ms to RUNNING"] / 1e3);
        Ok(figures)
    }

    fn by_towline(&self, waiting: &Waiting, options: &[&str]) -> Result<Figures> {
        let blocktime = ("postcopy-blocktime", !options.is_empty());
        configure(&waiting.qemu, &[blocktime], json!({}))?;
        let mut copying = self.copy(waiting, options)?;
        let started = copying.started;
        let mut figures = self.watch(waiting, started, || Ok(self.stored.tick), || copying.check())?;
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
    fn live(&self, preempt: Preempt) -> Result<Figures> {
        let needed = 2 * (self.stored.shape.data_mib() + KERNEL_MIB) + SPARE_MIB;
        let available = machine::available_memory()? / MIB;
        ensure!(needed <= available, "two guests need {needed} MiB, and {available} MiB are available");
        let source = self.waiting()?;
        self.copy(&source, &["--paused"])?.wait(self.bench)?;
        let waiting = self.waiting()?;
        for (qemu, own) in [(&source.qemu, "return-path"), (&waiting.qemu, "postcopy-blocktime")] {
            let preempt = ("postcopy-preempt", preempt == Preempt::On);
            configure(qemu, &[("postcopy-ram", true), preempt, (own, true)], json!({}))?;
        }
        let uri = format!("unix:{}", waiting.qemu.directory().join("live.sock").display());
        incoming(&waiting.qemu, &uri)?;
        source.qemu.qmp().execute("cont", Value::Null)?;
        machine::prefault(self.stored.shape.data_mib() * MIB)?;
        let started = Instant::now();
        source.qemu.qmp().execute("migrate", json!({ "uri": uri }))?;
        // At once, without a precopy pass, as with an image.
        source.qemu.qmp().execute("migrate-start-postcopy", Value::Null)?;
        // The source's counter does not change after the switchover.
        let mut figures = self.watch(&waiting, started, || source.counter.read(), || Ok(()))?;
        self.complete(&waiting, started, &mut figures)?;
        let info = self.bench.migrated(&source.qemu)?;
        figures.extend(info["ram"]["postcopy-requests"].as_f64().map(|faults| ("faults", faults)));
        Ok(figures)
    }

    /// Waits for RUNNING and for the first tick beyond `past`; `check` fails when they cannot happen.
    fn watch(
        &self,
        waiting: &Waiting,
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
    fn complete(&self, waiting: &Waiting, started: Instant, figures: &mut Figures) -> Result<()> {
        let info = self.bench.migrated(&waiting.qemu)?;
        figures.insert("s to completion", started.elapsed().as_secs_f64());
        // Of each processor, in milliseconds.
        let each = info["postcopy-vcpu-blocktime"].as_array();
        let blocked = each.map(|each| each.iter().filter_map(Value::as_f64).sum());
        figures.extend(blocked.map(|blocked: f64| ("processors waited ms", blocked)));
        Ok(())
    }
}
