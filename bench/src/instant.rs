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

mod bench;
mod guest;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use towline_lab::Towline;

use crate::rounds::{self, Contender, Outcome};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
pub use bench::Parameters;
use bench::{Bench, DATA_PERCENT, KERNEL_MIB, MIB, WITHIN};
use guest::{Stored, Waiting};

const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Interval of queries for completion, long enough not to load the destination.
const COMPLETE_INTERVAL: Duration = Duration::from_millis(2);
/// Spare memory beside two guests in MiB.
const SPARE_MIB: u64 = 1024;

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Qemu,
    Copy,
    Postcopy { preempt: bool, working_set: bool },
    Live { preempt: bool },
}

const METHODS: [Method; 7] = [
    Method::Qemu,
    Method::Copy,
    Method::Postcopy { preempt: false, working_set: false },
    Method::Postcopy { preempt: true, working_set: false },
    Method::Postcopy { preempt: true, working_set: true },
    Method::Live { preempt: false },
    Method::Live { preempt: true },
];

impl Method {
    fn label(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU's own restore, 4 channels",
            Self::Copy => "towline copy",
            Self::Postcopy { preempt: false, .. } => "towline --postcopy",
            Self::Postcopy { working_set: false, .. } => "towline --postcopy-preempt",
            Self::Postcopy { .. } => "towline --postcopy-preempt, working set known",
            Self::Live { preempt: false } => "QEMU to QEMU, postcopy",
            Self::Live { preempt: true } => "QEMU to QEMU, postcopy-preempt",
        }
    }
}

/// Times of one arrival since the command.
#[derive(Debug, Clone, Default)]
struct Arrival {
    running: Duration,
    tick: Duration,
    complete: Duration,
    faults: Option<u64>,
    /// p50 and p99 of towline's faults in microseconds.
    latency: Option<(u64, u64)>,
    /// Total waiting time of the destination's processors in milliseconds.
    blocked_ms: Option<u64>,
}

/// Measures the tables; with [`Parameters::of`] about a quarter of an hour for three runs.
///
/// # Errors
/// QEMU is missing, a guest does not start, or the run was cancelled. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let qemu = towline_lab::paths::QEMU_10_0;
    ensure!(Path::new(qemu).is_file(), "{qemu} is missing; run `cargo xtask setup`");
    let mut table = table(parameters);
    for &size in &parameters.sizes_mib {
        parameters.cancel.check()?;
        let directory =
            tempfile::Builder::new().prefix("towline-bench-").tempdir_in(&parameters.directory)?;
        let bench = Bench { parameters, memory_mib: size, directory };
        table.rows.extend(bench.rows()?);
    }
    Ok(vec![table])
}

impl Bench<'_> {
    fn rows(&self) -> Result<Vec<Row>> {
        let stored = Stored::make(self)?;
        let all: Vec<(bool, Method)> =
            [true, false].iter().flat_map(|cached| METHODS.iter().map(|method| (*cached, *method))).collect();
        let group = |cached: bool| {
            let cache = if cached { "in" } else { "not in" };
            format!("{} MiB guest, image {cache} the page cache", self.memory_mib)
        };
        let contenders: Vec<Contender> = all
            .iter()
            .map(|(cached, method)| Contender { group: group(*cached), label: method.label().into() })
            .collect();
        let outcomes = rounds::run(&contenders, self.parameters.runs, &self.parameters.cancel, |index| {
            let (cached, method) = all[index];
            self.arrive(&stored, cached, method)
        })?;
        let of = |cached: bool, method: Method, figure: fn(&Arrival) -> Duration| {
            let at = all.iter().position(|contender| *contender == (cached, method));
            at.map(|at| seconds(&outcomes[at], figure)).unwrap_or_default()
        };
        // QEMU to QEMU reads no image: its figures are those of the rounds with the page cache.
        let peers = |cached: bool, preempt: bool| Peers {
            running: of(cached, Method::Qemu, |arrival| arrival.running),
            complete: of(cached, Method::Qemu, |arrival| arrival.complete),
            live: of(true, Method::Live { preempt }, |arrival| arrival.complete),
        };
        let rows =
            all.iter().zip(&outcomes).zip(contenders).map(|(((cached, method), outcome), contender)| {
                let preempt =
                    matches!(method, Method::Postcopy { preempt: true, .. } | Method::Live { preempt: true });
                let content = match &outcome.failure {
                    Some(reason) => Content::Missing(reason.clone()),
                    None => measured(outcome, &peers(*cached, preempt)),
                };
                Row { group: contender.group, label: contender.label, content }
            });
        Ok(rows.collect())
    }

    fn arrive(&self, stored: &Stored, cached: bool, method: Method) -> Result<Arrival> {
        match method {
            Method::Live { .. } if !cached => bail!("no image is read; see above"),
            Method::Live { preempt } => {
                let needed = 2 * (self.data_mib() + KERNEL_MIB) + SPARE_MIB;
                let available = crate::machine::available_memory()? / MIB;
                ensure!(
                    needed <= available,
                    "two guests need {needed} MiB, and {available} MiB are available"
                );
                return self.live(stored, preempt);
            }
            _ => {}
        }
        if let Method::Postcopy { working_set: true, .. } = method {
            stored.know_working_set(self)?;
        } else {
            stored.forget_working_set()?;
        }
        let waiting = Waiting::start(self, stored)?;
        if cached {
            crate::ram::read_once(&stored.path)?;
        } else {
            crate::ram::drop_cached(&stored.path)?;
        }
        crate::machine::prefault(self.data_mib() * MIB / 4 * 5)?;
        match method {
            Method::Qemu => self.by_qemu(stored, &waiting),
            Method::Copy => self.by_towline(stored, &waiting, &[]),
            Method::Postcopy { preempt, .. } => {
                let options: &[&str] =
                    if preempt { &["--postcopy", "--postcopy-preempt"] } else { &["--postcopy"] };
                let arrival = self.by_towline(stored, &waiting, options)?;
                stored.prove(&waiting.qemu)?;
                Ok(arrival)
            }
            Method::Live { .. } => bail!("a live migration has no image"),
        }
    }

    fn by_qemu(&self, stored: &Stored, waiting: &Waiting) -> Result<Arrival> {
        let capability = |name: &str| json!({ "capability": name, "state": true });
        let capabilities = json!({ "capabilities": [capability("multifd"), capability("mapped-ram")] });
        waiting.qemu.qmp().execute("migrate-set-capabilities", capabilities)?;
        waiting.qemu.qmp().execute("migrate-set-parameters", json!({ "multifd-channels": 4 }))?;
        let started = Instant::now();
        let uri = format!("file:{}", stored.path.display());
        waiting.qemu.qmp().execute_within("migrate-incoming", json!({ "uri": uri }), WITHIN)?;
        let (running, tick) = self.watch(&|| Ok(stored.tick), waiting, started, &mut || Ok(()))?;
        Ok(Arrival { running, tick, complete: running, ..Arrival::default() })
    }

    fn by_towline(&self, stored: &Stored, waiting: &Waiting, options: &[&str]) -> Result<Arrival> {
        waiting.count_waits(options.contains(&"--postcopy"))?;
        let (image, to) =
            (stored.path.display().to_string(), format!("qmp:{}", waiting.qemu.qmp_path().display()));
        let arguments = [&["copy", "--json", &image, &to], options].concat();
        let started = Instant::now();
        let mut towline = Towline::start(&self.parameters.towline, arguments)?;
        let (running, tick) = self.watch(&|| Ok(stored.tick), waiting, started, &mut || {
            let ended = !towline.runs()?;
            let failed = ended && !towline.stderr().is_empty();
            ensure!(!failed, "{}", towline.stderr().lines().next().unwrap_or_default());
            Ok(())
        })?;
        let complete = self.complete(waiting, started)?;
        let finished = towline.wait_done(WITHIN)?;
        let mut events = finished.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let completed = events.next_back().context("towline printed no event")?;
        let faults = &completed["postcopy"]["faults"];
        Ok(Arrival {
            running,
            tick,
            complete,
            faults: faults["requests"].as_u64(),
            latency: faults["latency-p50-us"].as_u64().zip(faults["latency-p99-us"].as_u64()),
            blocked_ms: waiting.blocked_ms()?,
        })
    }

    /// Migrates from a QEMU with the guest, which is paused until then so that it does not use the processors.
    fn live(&self, stored: &Stored, preempt: bool) -> Result<Arrival> {
        let source = Waiting::start(self, stored)?;
        let (image, to) =
            (stored.path.display().to_string(), format!("qmp:{}", source.qemu.qmp_path().display()));
        Towline::start(&self.parameters.towline, ["copy", "--paused", &image, &to])?.wait_done(WITHIN)?;
        let waiting = Waiting::start(self, stored)?;
        waiting.count_waits(true)?;
        let capability = |name: &str| json!({ "capability": name, "state": true });
        let mut capabilities = vec![capability("postcopy-ram")];
        if preempt {
            capabilities.push(capability("postcopy-preempt"));
        }
        let capabilities = json!({ "capabilities": capabilities });
        for qemu in [&source.qemu, &waiting.qemu] {
            qemu.qmp().execute("migrate-set-capabilities", capabilities.clone())?;
        }
        let returns = json!({ "capabilities": [capability("return-path")] });
        source.qemu.qmp().execute("migrate-set-capabilities", returns)?;
        source.qemu.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 }))?;
        let uri = format!("unix:{}", self.directory.path().join("live.sock").display());
        waiting.qemu.qmp().execute("migrate-incoming", json!({ "uri": uri }))?;
        source.qemu.qmp().execute("cont", Value::Null)?;
        crate::machine::prefault(self.data_mib() * MIB / 4 * 5)?;
        let started = Instant::now();
        source.qemu.qmp().execute("migrate", json!({ "uri": uri }))?;
        // At once, without a precopy pass, as with an image.
        source.qemu.qmp().execute("migrate-start-postcopy", Value::Null)?;
        // The source's counter does not change after the switchover.
        let past = || source.counter.read();
        let (running, tick) = self.watch(&past, &waiting, started, &mut || Ok(()))?;
        let complete = self.complete(&waiting, started)?;
        let info = source.qemu.qmp().wait_migration("completed", WITHIN)?;
        let faults = info["ram"]["postcopy-requests"].as_u64();
        Ok(Arrival { running, tick, complete, faults, latency: None, blocked_ms: waiting.blocked_ms()? })
    }

    /// Waits for RUNNING and for the first tick; `check` fails when they cannot happen.
    fn watch(
        &self,
        past: &dyn Fn() -> Result<u64>,
        waiting: &Waiting,
        started: Instant,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<(Duration, Duration)> {
        self.wait("the guest to run", || {
            check()?;
            Ok((waiting.qemu.qmp().status()? == "running").then_some(()))
        })?;
        let running = started.elapsed();
        self.wait("the guest's first tick", || Ok((waiting.counter.read()? > past()?).then_some(())))?;
        Ok((running, started.elapsed()))
    }

    /// Waits until the destination reports completion. Returns the time since the start.
    fn complete(&self, waiting: &Waiting, started: Instant) -> Result<Duration> {
        let deadline = Instant::now() + WITHIN;
        loop {
            self.parameters.cancel.check()?;
            let info = waiting.qemu.qmp().execute("query-migrate", Value::Null)?;
            match info["status"].as_str() {
                Some("completed") => return Ok(started.elapsed()),
                Some("failed") => bail!("the destination failed: {info}"),
                _ => ensure!(
                    Instant::now() < deadline,
                    "the destination is incomplete after {} s",
                    WITHIN.as_secs()
                ),
            }
            std::thread::sleep(COMPLETE_INTERVAL);
        }
    }

    fn wait<T>(&self, what: &str, mut condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + WITHIN;
        loop {
            self.parameters.cancel.check()?;
            if let Some(value) = condition()? {
                return Ok(value);
            }
            ensure!(Instant::now() < deadline, "{what}: not within {} s", WITHIN.as_secs());
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

fn table(parameters: &Parameters) -> Table {
    Table {
        name: "instant",
        title: format!(
            "Restore of a Linux guest, {DATA_PERCENT} % of it random, into cold memory, {} runs, median (min–max)",
            parameters.runs
        ),
        columns: vec![
            "what",
            "ms to RUNNING",
            "QEMU's own ×",
            "ms to first tick",
            "s to completion",
            "× QEMU's own",
            "× QEMU to QEMU",
            "faults",
            "fault p50 ms",
            "p99 ms",
            "processors waited ms",
        ],
        rows: Vec::new(),
        notes: vec![
            "the clock starts with towline's process, or with `migrate-incoming` (QEMU to QEMU: `migrate`); the destination was ready".into(),
            "QEMU's own ×: time to RUNNING of QEMU's own restore in the same round, divided by the row's".into(),
            "to completion: until the destination reports it; ×: of the time of QEMU's own restore, and of postcopy from QEMU to QEMU \
             with the row's preempt setting, in the same round"
                .into(),
            "fault p50, p99: from a request's arrival at towline until its page was handed to the kernel".into(),
            "processors waited: the destination's postcopy-blocktime, of all its processors".into(),
            "after each --postcopy the guest hashed its data, equal unless the row has an error".into(),
        ],
    }
}

fn seconds(outcome: &Outcome<Arrival>, of: impl Fn(&Arrival) -> Duration) -> Vec<f64> {
    outcome.values.iter().map(|arrival| of(arrival).as_secs_f64()).collect()
}

/// Figures that a row is compared with, in seconds.
struct Peers {
    running: Vec<f64>,
    complete: Vec<f64>,
    live: Vec<f64>,
}

fn measured(outcome: &Outcome<Arrival>, peers: &Peers) -> Content {
    let summary = |values: Vec<f64>, digits: usize| match Summary::of(values) {
        Some(summary) => format!("{summary:.digits$}"),
        None => "–".into(),
    };
    let running = seconds(outcome, |arrival| arrival.running);
    let complete = seconds(outcome, |arrival| arrival.complete);
    let ratio =
        |values: Option<Summary>| values.map_or_else(|| "–".into(), |ratio| format!("{:.2}", ratio.median));
    let figures =
        |of: &dyn Fn(&Arrival) -> Option<f64>| outcome.values.iter().filter_map(of).collect::<Vec<_>>();
    let latency =
        |of: fn((u64, u64)) -> u64| figures(&|arrival| arrival.latency.map(|all| of(all) as f64 / 1e3));
    let milliseconds = |values: &[f64]| values.iter().map(|value| value * 1e3).collect::<Vec<_>>();
    let tick = seconds(outcome, |arrival| arrival.tick);
    let faults = figures(&|arrival| arrival.faults.map(|faults| faults as f64));
    let blocked = figures(&|arrival| arrival.blocked_ms.map(|ms| ms as f64));
    let (p50, p99) = (latency(|all| all.0), latency(|all| all.1));
    let cells = vec![
        summary(milliseconds(&running), 0),
        ratio(Summary::of_ratios(&peers.running, &running)),
        summary(milliseconds(&tick), 0),
        summary(complete.clone(), 2),
        ratio(Summary::of_ratios(&complete, &peers.complete)),
        ratio(Summary::of_ratios(&complete, &peers.live)),
        summary(faults.clone(), 0),
        summary(p50.clone(), 2),
        summary(p99.clone(), 2),
        summary(blocked.clone(), 0),
    ];
    let data = json!({
        "seconds-to-running": running,
        "seconds-to-first-tick": tick,
        "seconds-until-complete": complete,
        "faults": faults,
        "fault-p50-ms": p50,
        "fault-p99-ms": p99,
        "blocked-ms": blocked,
    });
    Content::Measured { cells, data }
}
