//! `cargo xtask bench live`: a busy Linux guest moves from QEMU to QEMU, through towline and directly.
//!
//! ```text
//!   QEMU ── multifd ─────────────────► QEMU        directly
//!   QEMU ── multifd ─► towline ── multifd ─► QEMU  through towline
//! ```
//! The same guest moves in every run, each time to a new QEMU, and the contenders take turns. It writes a pattern into memory, which it
//! checks after every run. Its downtime is measured from outside: its counter is read from both QEMUs' memory, from the last step
//! at the source to the first at the destination.
//!
//! Limits: one guest, two virtual processors, TCG, both QEMUs on one host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use towline_lab::expect::qmp;
use towline_lab::{Builder, Qemu, Version};

use crate::guest::{Counter, WITHIN, configure, listen, number};
use crate::machine::{self, MIB};
use crate::options::Bench;
use crate::table::{self, Bound, Column, Contender, Entry, Figures, Row, Table};

/// Memory of the guest in MiB, half of which is random.
const MEMORY_MIB: u64 = 1024;
/// Rate of its writes in bytes per second, and their range in MiB.
const DIRTY_RATE: u64 = 20_000_000;
const DIRTY_MIB: u64 = 64;
/// Downtime limit of both contenders.
const DOWNTIME_LIMIT_MS: u64 = 300;
/// Interval of reading the counters.
const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Beginning of the names of the threads of virtual processors, with `-name debug-threads=on`.
const VCPU_THREAD: &str = "CPU ";

/// Moves a guest to a QEMU that waits. Returns the time until it is done there, and towline's CPU time in seconds.
type Method = fn(&Guest, &Bench, &Guest, usize) -> Result<(Duration, f64)>;

/// Lanes of towline and channels of QEMU; 0: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lanes(usize);

impl Row for Lanes {
    fn name(&self) -> String {
        match self.0 {
            0 => "without multifd".into(),
            lanes => format!("{lanes} channels"),
        }
    }
}

type Move = Entry<Lanes, Method>;

const DIRECT: Contender<Method> = Contender::new("QEMU to QEMU directly", Guest::directly);
const TOWLINE: Contender<Method> = Contender::new("through towline", Guest::through);
const COLUMNS: [Column<Lanes, Method>; 10] = [
    Column::spread("downtime, ms", 0),
    Column::ratio("× directly", "downtime, ms", directly).with_goal(downtime_goal),
    Column::spread("QEMU's downtime, ms", 0),
    Column::ratio("× directly", "QEMU's downtime, ms", directly).with_goal(downtime_goal),
    Column::spread("s to done", 2),
    Column::ratio("× directly", "s to done", directly).with_goal(total_goal),
    Column::spread("QEMU's total-time, s", 2),
    Column::ratio("× directly", "QEMU's total-time, s", directly).with_goal(total_goal),
    Column::spread("CPU s, QEMUs", 2),
    Column::spread("CPU s, towline", 2),
];

fn directly(it: Move) -> Move {
    it.with(DIRECT)
}

fn downtime_goal(it: Move) -> Option<Bound> {
    it.at_most(TOWLINE, 1.25)
}

fn total_goal(it: Move) -> Option<Bound> {
    it.at_most(TOWLINE, if it.row.0 > 0 { 1.15 } else { 1.1 })
}

/// Measures the tables; takes a few minutes.
///
/// # Errors
/// The lab is missing, the guest does not boot, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let memory_mib = bench.size_mib(MEMORY_MIB);
    ensure!(memory_mib >= 4 * DIRTY_MIB, "the guest has too little memory for its data");
    let all = Entry::all([4, 0].map(Lanes), &[DIRECT, TOWLINE]);
    let mut guest = None;
    let results = table::measure(bench, bench.chosen(all)?, |it| {
        // A guest that a contender has lost is booted again.
        let at = match guest.take() {
            Some(at) => at,
            None => Guest::boot(bench, memory_mib)?,
        };
        let (figures, moved) = at.go(bench, it)?;
        guest = Some(moved);
        Ok(figures)
    })?;
    let title = format!(
        "Live: Linux guest of {memory_mib} MiB, {} MiB random, 2 processors, writing {} MB/s over {DIRTY_MIB} MiB",
        memory_mib / 2,
        DIRTY_RATE / 1_000_000
    );
    let table = results.table("live", &title, &COLUMNS, |_| true).with_notes([
        &*format!("downtime: from the last step of the guest's counter at the source (it steps every 5 ms) to the first at the destination; {DOWNTIME_LIMIT_MS} ms allowed"),
        "s to done: from the command (towline: its process's start; directly: `migrate`, settings made before) until towline ends or the source is `completed`, and the guest runs at the destination",
        "QEMU's: query-migrate at the source afterwards",
        "CPU s: user and system time during the move, without the QEMUs' virtual processors",
        "after every run the guest checks its memory; memory for the destination was touched and freed just before",
    ]);
    Ok(vec![table])
}

/// A running guest, in its present QEMU or the next one.
struct Guest {
    qemu: Qemu,
    memory_mib: u64,
    /// Guest-physical address of its counter.
    tick_address: u64,
    counter: Counter,
}

impl Guest {
    fn builder(memory_mib: u64) -> Builder {
        let builder = Qemu::builder(Version::V10_0).linux().memory_mib(memory_mib).processors(2);
        builder.args(["-name", "debug-threads=on"])
    }

    fn boot(bench: &Bench, memory_mib: u64) -> Result<Self> {
        bench.cancel.check()?;
        eprintln!("live: booting, and filling {} MiB", memory_mib / 2);
        let qemu = Self::builder(memory_mib).start()?;
        let mut agent = qemu.linux(WITHIN)?;
        agent.fill(memory_mib / 2 * MIB, 1)?;
        agent.dirty(DIRTY_RATE, DIRTY_MIB * MIB)?;
        let tick_address = agent.tick_address()?;
        drop(agent);
        let counter = Counter::at(&qemu, tick_address)?;
        Ok(Self { qemu, memory_mib, tick_address, counter })
    }

    /// Starts a QEMU with the same configuration, which waits for the guest.
    fn destination(&self) -> Result<Self> {
        let qemu = Self::builder(self.memory_mib).incoming_defer().start()?;
        let counter = Counter::at(&qemu, self.tick_address)?;
        Ok(Self { qemu, counter, ..*self })
    }

    /// Moves. Returns the figures, and the guest at its destination, which has checked its memory and counts.
    fn go(&self, bench: &Bench, it: Move) -> Result<(Figures, Self)> {
        let (destination, lanes) = (self.destination()?, it.row.0);
        machine::prefault(self.memory_mib * MIB)?;
        bench.cancel.check()?;
        let over = AtomicBool::new(false);
        let qemus = [self.qemu.pid(), destination.qemu.pid()];
        let cpu_before = migration_seconds(qemus)?;
        let (moved, downtime) = std::thread::scope(|scope| {
            let watch = scope.spawn(|| self.downtime(&destination, &over));
            let moved = (it.contender.kind)(self, bench, &destination, lanes);
            over.store(moved.is_err(), Ordering::Relaxed);
            (moved, watch.join().expect("the thread does not panic"))
        });
        let ((done, towline_cpu), downtime) = (moved?, downtime?);
        let qemu_cpu = migration_seconds(qemus)? - cpu_before;
        let info = self.qemu.qmp().execute("query-migrate", Value::Null)?;
        let figures = Figures::from([
            ("downtime, ms", downtime.as_secs_f64() * 1e3),
            ("QEMU's downtime, ms", number(&info, "downtime")?),
            ("s to done", done.as_secs_f64()),
            ("QEMU's total-time, s", number(&info, "total-time")? / 1e3),
            ("CPU s, QEMUs", qemu_cpu),
            ("CPU s, towline", towline_cpu),
        ]);
        let mut agent = destination.qemu.linux(WITHIN)?;
        let pages = agent.check()?;
        ensure!(pages == DIRTY_MIB * MIB / 4096, "{pages} pages were checked, expected all");
        agent.wait_ticking(WITHIN)?;
        drop(agent);
        Ok((figures, destination))
    }

    /// Returns the time from the counter's last step here to its first at the destination.
    fn downtime(&self, destination: &Self, over: &AtomicBool) -> Result<Duration> {
        let deadline = Instant::now() + WITHIN;
        let (mut last, mut stepped) = (self.counter.read()?, Instant::now());
        loop {
            ensure!(!over.load(Ordering::Relaxed) && Instant::now() < deadline, "the guest did not arrive");
            let now = self.counter.read()?;
            if now != last {
                (last, stepped) = (now, Instant::now());
            }
            // The page may arrive several times before the guest runs: only a step beyond the source's counter counts.
            if destination.counter.read()? > last {
                return Ok(stepped.elapsed());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Configures both QEMUs, and has the destination listen. Returns its address.
    fn prepare(&self, destination: &Self, lanes: usize) -> Result<String> {
        for qemu in [&self.qemu, &destination.qemu] {
            let mut parameters = json!({ "downtime-limit": DOWNTIME_LIMIT_MS });
            if lanes > 0 {
                parameters["multifd-channels"] = lanes.into();
            }
            configure(qemu.qmp(), &[("multifd", lanes > 0), ("return-path", true)], parameters)?;
        }
        listen(&destination.qemu)
    }

    /// Moves by `migrate`, until the guest runs.
    fn directly(&self, bench: &Bench, destination: &Self, lanes: usize) -> Result<(Duration, f64)> {
        let uri = self.prepare(destination, lanes)?;
        let begun = Instant::now();
        bench.migrate(self.qemu.qmp(), &uri)?;
        bench
            .wait("the guest to run", || Ok((destination.qemu.qmp().status()? == "running").then_some(())))?;
        Ok((begun.elapsed(), 0.0))
    }

    /// Moves by towline, until it ends.
    fn through(&self, bench: &Bench, destination: &Self, lanes: usize) -> Result<(Duration, f64)> {
        let (from, to) = (qmp(&self.qemu), qmp(&destination.qemu));
        let lanes = format!("--multifd-channels={lanes}");
        let downtime = format!("--downtime-limit={DOWNTIME_LIMIT_MS}");
        let copied = bench.copy([&*from, &to, &lanes, &downtime])?.wait(bench)?;
        Ok((copied.took, copied.cpu_seconds))
    }
}

/// CPU time of two QEMUs without their virtual processors: the guest's own work does not belong to its move.
fn migration_seconds(qemus: [u32; 2]) -> Result<f64> {
    qemus.iter().try_fold(0.0, |sum, &pid| {
        Ok(sum + machine::cpu_seconds(pid)? - machine::thread_seconds(pid, VCPU_THREAD)?)
    })
}
