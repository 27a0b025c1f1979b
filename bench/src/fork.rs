//! `cargo xtask bench fork`: time for which a guest is stopped to be forked or stored, by what it has written since its start.
//!
//! ```text
//!   towline run ─► the guest writes N MiB ─► towline fork                    ─► stopped · the command until the fork's first tick
//!                                         ├► towline copy --resume --base    ─► stopped
//!                                         └► QEMU's own: stop, migrate to a file, cont · savevm    ─► stopped
//! ```
//! towline's figures are by its own clock, from before `stop` until `cont` was answered; QEMU's are those of its monitor's client. Each
//! round of towline's has [`SAMPLES`] of one guest, which goes on writing meanwhile.
//!
//! Limits: TCG; the file of a whole save is in memory, which is its best case.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use towline_lab::{LinuxGuest, Qmp, Towline};

use crate::guest::{WITHIN, configure, file};
use crate::machine::MIB;
use crate::options::Bench;
use crate::run::{Running, arguments};
use crate::stats::quantiles;
use crate::stored::{self, Shape, Stored};
use crate::table::{Column, Contender, Entry, Figures, Row, Table};

const SIZES_MIB: [u64; 2] = [512, 4096];
const WRITTEN_MIB: [u64; 4] = [1, 16, 64, 256];
/// Share of a guest's memory that is random in its image.
const DATA_PERCENT: u64 = 25;
/// Samples of one round.
const SAMPLES: usize = 40;
/// Forks of one round.
const FORKS: usize = 10;

/// Takes the guest several times, or once.
type Method = fn(&Stored<'_>, &Parent) -> Result<Figures>;

/// A guest, and what it has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Written {
    size_mib: u64,
    mib: u64,
}

impl Row for Written {
    fn name(&self) -> String {
        format!("{} MiB guest, {} MiB written", self.size_mib, self.mib)
    }
}

const MIGRATE: Contender<Method> =
    Contender::new("QEMU: stop, migrate to a file, cont", |stored, parent| stored.migrated(parent));
const SAVEVM: Contender<Method> = Contender::new("QEMU: savevm", |stored, parent| stored.savevm(parent));
const CONTENDERS: [Contender<Method>; 4] = [
    Contender::new("towline fork", |stored, _| stored.forks()),
    Contender::new("towline copy --resume --base", |stored, parent| stored.increments(parent)),
    MIGRATE,
    SAVEVM,
];
const COLUMNS: [Column<Written, Method>; 5] = [
    Column::spread("stopped p50 ms", 2),
    Column::spread("p99 ms", 2),
    Column::ratio("× migrate", "stopped p50 ms", |it| it.with(MIGRATE)),
    Column::median("MiB copied", 1),
    Column::spread("command to first tick ms", 0),
];

/// Measures the table.
///
/// # Errors
/// A guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let of_size = |size_mib| WRITTEN_MIB.map(|mib| Written { size_mib, mib });
    let rows = bench.sizes_mib(&SIZES_MIB).into_iter().flat_map(of_size);
    let shape = |row: Written| Shape::of(row.size_mib, DATA_PERCENT);
    let all = Entry::all(rows, &CONTENDERS);
    let results = stored::measure(bench, all, shape, Stored::fork)?;
    let title = "A running Linux guest that is forked or stored, by what it has written since its start";
    let table = results.table("fork", title, &COLUMNS, |_| true).with_notes([
        &*format!("one round: {FORKS} forks, {SAMPLES} increments, or one save; p50 and p99 are of these"),
        "MiB copied: pages that differ from the image, by the kernel's list",
    ]);
    Ok(vec![table])
}

/// The guest that is forked.
struct Parent {
    _running: Running,
    _agent: LinuxGuest,
    monitor: PathBuf,
}

/// One time that the guest was stopped.
#[derive(Debug, Clone, Copy)]
struct Stop {
    ms: f64,
    copied_mib: f64,
}

impl Stored<'_> {
    fn fork(&self, it: Entry<Written, Method>) -> Result<Figures> {
        (it.contender.kind)(self, &self.parent(it)?)
    }

    /// A guest of the image that has written that much.
    fn parent(&self, it: Entry<Written, Method>) -> Result<Parent> {
        // That of the guest before, which was killed.
        let agent = self.file("agent.sock");
        let _ = std::fs::remove_file(&agent);
        let mut words = arguments(self);
        words.extend(self.agent_of("agent.sock"));
        if it.contender == SAVEVM {
            let disk = self.file("state.qcow2");
            let made = Command::new("qemu-img")
                .args(["create", "-q", "-f", "qcow2"])
                .arg(&disk)
                .arg("16G")
                .status()?;
            ensure!(made.success(), "qemu-img: {made}");
            words.extend([
                "--".into(),
                "-drive".into(),
                format!("if=none,format=qcow2,file={}", disk.display()),
            ]);
        }
        let running = Running::start(self, words)?;
        let mut agent = LinuxGuest::connect_at(&agent)?;
        agent.wait_ready(WITHIN)?;
        let line = format!(
            "mount -o remount,size=90% /tmp; dd if=/dev/urandom of=/tmp/bench bs=1M count={} 2>/dev/null",
            it.row.mib
        );
        agent.shell(&line, WITHIN)?;
        let monitor = self.file("towline/guests/bench/qmp.sock");
        Ok(Parent { _running: running, _agent: agent, monitor })
    }

    /// Settings that give a guest its agent's socket.
    fn agent_of(&self, socket: &str) -> Vec<String> {
        let chardev = format!("chardev.agent=socket,path={},server=on,wait=off", self.file(socket).display());
        ["--set".into(), chardev, "--set".into(), "serial.1=chardev:agent".into()].to_vec()
    }

    fn forks(&self) -> Result<Figures> {
        let (mut stops, mut ticks) = (Vec::new(), Vec::new());
        for _ in 0..FORKS {
            let mut words =
                ["fork", "bench", "--json", "--log", "info", "--name", "fork"].map(str::to_owned).to_vec();
            words.extend(self.agent_of("fork.sock"));
            let started = Instant::now();
            let _ = std::fs::remove_file(self.file("fork.sock"));
            let fork = Running::start(self, words)?;
            fork.counter.tick(self.bench, fork.counter.read()?)?;
            ticks.push(started.elapsed().as_secs_f64() * 1e3);
            stops.push(stop(&fork.towline.stderr())?);
        }
        let mut figures = figures(&stops);
        figures.extend(quantiles(ticks, [("command to first tick ms", 0.5)]));
        Ok(figures)
    }

    fn increments(&self, parent: &Parent) -> Result<Figures> {
        let (base, next) = (self.path().display().to_string(), self.file("next.img").display().to_string());
        let source = format!("qmp:{}", parent.monitor.display());
        let one = || {
            let words = ["copy", "--log", "info", "--overwrite", "--resume", "--base", &base, &source, &next];
            let finished = Towline::start(&self.bench.options.towline, words)?.wait(WITHIN)?;
            ensure!(finished.status.success(), "{}", finished.stderr);
            stop(&finished.stderr)
        };
        let stops = (0..SAMPLES).map(|_| self.bench.cancel.check().map_err(Into::into).and_then(|()| one()));
        Ok(figures(&stops.collect::<Result<Vec<_>>>()?))
    }

    fn migrated(&self, parent: &Parent) -> Result<Figures> {
        let qmp = Qmp::connect(&parent.monitor, WITHIN)?;
        configure(&qmp, &[], json!({}))?;
        let started = Instant::now();
        qmp.execute("stop", Value::Null)?;
        self.bench.migrate(&qmp, &file(&self.file("whole")))?;
        qmp.execute("cont", Value::Null)?;
        Ok(Figures::from([("stopped p50 ms", started.elapsed().as_secs_f64() * 1e3)]))
    }

    fn savevm(&self, parent: &Parent) -> Result<Figures> {
        let qmp = Qmp::connect(&parent.monitor, WITHIN)?;
        let started = Instant::now();
        let error = qmp.hmp("savevm bench")?;
        ensure!(error.trim().is_empty(), "{error}");
        Ok(Figures::from([("stopped p50 ms", started.elapsed().as_secs_f64() * 1e3)]))
    }
}

/// The stop that towline has logged.
fn stop(log: &str) -> Result<Stop> {
    let line = log.lines().find(|line| line.contains("guest taken"));
    let line = line.with_context(|| format!("the guest was not taken by its difference: {log}"))?;
    let field = |name: &str| -> Result<f64> {
        let value = line.split(name).nth(1).and_then(|rest| rest.strip_prefix('='));
        let digits = value.map(|value| value.chars().take_while(char::is_ascii_digit).collect::<String>());
        Ok(digits.with_context(|| format!("{line}: no {name}"))?.parse()?)
    };
    Ok(Stop { ms: field("standstill_us")? / 1e3, copied_mib: field("written")? / MIB as f64 })
}

fn figures(stops: &[Stop]) -> Figures {
    let ms = stops.iter().map(|stop| stop.ms).collect();
    let copied = stops.iter().map(|stop| stop.copied_mib).collect();
    let times = quantiles(ms, [("stopped p50 ms", 0.5), ("p99 ms", 0.99)]);
    times.into_iter().chain(quantiles(copied, [("MiB copied", 0.5)])).collect()
}
