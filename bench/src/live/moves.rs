//! A move by QEMU alone or through towline, with the guest's counter read at both ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use towline_lab::{Qemu, Towline, wait_until};

use super::guest::{Guest, Waiting};
use super::parameters::{MIB, Parameters};
use crate::machine;

const MOVE_WITHIN: Duration = Duration::from_secs(120);
/// Interval of reading the counters.
const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Beginning of the names of the threads of virtual processors, with `-name debug-threads=on`.
const VCPU_THREAD: &str = "CPU ";
/// Practically unlimited; QEMU's default is 128 MiB/s.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Direct,
    Towline,
}

/// Times of a move that its command takes.
struct Times {
    done: Duration,
    towline_cpu: f64,
}

/// Figures of a move.
#[derive(Debug, Clone)]
pub(super) struct Moved {
    pub(super) downtime: Duration,
    pub(super) qemu_downtime_ms: f64,
    pub(super) done: Duration,
    pub(super) total_ms: f64,
    /// CPU time of both QEMUs, without that of virtual processors.
    pub(super) qemu_cpu: f64,
    /// CPU time of towline; 0 without it.
    pub(super) towline_cpu: f64,
}

impl Method {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Direct => "QEMU to QEMU directly",
            Self::Towline => "through towline",
        }
    }
}

/// Moves the guest. Returns the figures, and the guest at its destination.
pub(super) fn run(
    parameters: &Parameters,
    at: &Guest,
    method: Method,
    lanes: usize,
) -> Result<(Moved, Guest)> {
    let destination = at.destination(parameters)?;
    let listens = match method {
        Method::Direct => Some(prepare(parameters, &at.qemu, &destination.qemu, lanes)?),
        Method::Towline => None,
    };
    machine::prefault(parameters.memory_mib * MIB)?;
    parameters.cancel.check()?;
    let over = AtomicBool::new(false);
    let qemus = [at.qemu.pid(), destination.qemu.pid()];
    let cpu_before = migration_seconds(qemus)?;
    let (times, downtime) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| downtime(at, &destination, &over));
        let times = match &listens {
            Some(uri) => directly(&at.qemu, &destination.qemu, uri),
            None => through(parameters, &at.qemu, &destination.qemu, lanes),
        };
        if times.is_err() {
            over.store(true, Ordering::Relaxed);
        }
        let watched = watch.join().unwrap_or_else(|_| bail!("the thread that reads the counters panicked"));
        times.and_then(|times| Ok((times, watched?)))
    })?;
    let qemu_cpu = migration_seconds(qemus)? - cpu_before;
    let info = at.qemu.qmp().execute("query-migrate", Value::Null)?;
    let number =
        |name: &str| info[name].as_f64().with_context(|| format!("query-migrate has no {name}: {info}"));
    let (qemu_downtime_ms, total_ms) = (number("downtime")?, number("total-time")?);
    let Times { done, towline_cpu } = times;
    let moved = Moved { downtime, qemu_downtime_ms, done, total_ms, qemu_cpu, towline_cpu };
    let guest = at.arrive(destination, parameters)?;
    Ok((moved, guest))
}

/// CPU time of two QEMUs without their virtual processors: the guest's own work is no part of its move.
fn migration_seconds(qemus: [u32; 2]) -> Result<f64> {
    qemus.iter().try_fold(0.0, |sum, &pid| {
        Ok(sum + machine::cpu_seconds(pid)? - machine::thread_seconds(pid, VCPU_THREAD)?)
    })
}

/// Returns the time from the counter's last step at the source to its first at the destination.
fn downtime(at: &Guest, destination: &Waiting, over: &AtomicBool) -> Result<Duration> {
    let deadline = Instant::now() + MOVE_WITHIN;
    let (mut last, mut stepped) = (at.counter.read()?, Instant::now());
    loop {
        ensure!(!over.load(Ordering::Relaxed) && Instant::now() < deadline, "the guest did not arrive");
        let now = at.counter.read()?;
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
fn prepare(parameters: &Parameters, source: &Qemu, destination: &Qemu, lanes: usize) -> Result<String> {
    for qemu in [source, destination] {
        let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
        let capabilities = [capability("multifd", lanes > 0), capability("return-path", true)];
        qemu.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        let mut wanted = json!({
            "max-bandwidth": BANDWIDTH_UNLIMITED,
            "downtime-limit": parameters.downtime_limit.as_millis() as u64,
        });
        if lanes > 0 {
            wanted["multifd-channels"] = lanes.into();
        }
        qemu.qmp().execute("migrate-set-parameters", wanted)?;
    }
    let uri = format!("unix:{}", destination.directory().join("live.sock").display());
    destination.qmp().execute("migrate-incoming", json!({ "uri": uri }))?;
    Ok(uri)
}

fn directly(source: &Qemu, destination: &Qemu, uri: &str) -> Result<Times> {
    let begun = Instant::now();
    source.qmp().execute("migrate", json!({ "uri": uri }))?;
    source.qmp().wait_migration("completed", MOVE_WITHIN)?;
    destination.qmp().wait_status("running", MOVE_WITHIN)?;
    Ok(Times { done: begun.elapsed(), towline_cpu: 0.0 })
}

fn through(parameters: &Parameters, source: &Qemu, destination: &Qemu, lanes: usize) -> Result<Times> {
    let endpoint = |qemu: &Qemu| format!("qmp:{}", qemu.qmp_path().display());
    let arguments = [
        "copy".to_owned(),
        "--quiet".to_owned(),
        format!("--multifd-channels={lanes}"),
        format!("--downtime-limit={}", parameters.downtime_limit.as_millis()),
        endpoint(source),
        endpoint(destination),
    ];
    let begun = Instant::now();
    let mut towline = Towline::start(&parameters.towline, arguments)?;
    let pid = towline.pid();
    let mut towline_cpu = 0.0;
    let done = wait_until("towline's end", MOVE_WITHIN, || {
        parameters.cancel.check()?;
        // The last time that it is there: `runs` waits for it.
        towline_cpu = machine::cpu_seconds(pid)?;
        Ok((!towline.runs()?).then(|| begun.elapsed()))
    })?;
    let finished = towline.wait(MOVE_WITHIN)?;
    ensure!(
        finished.status.success(),
        "{}",
        finished.stderr.lines().next().unwrap_or("towline failed without an error")
    );
    Ok(Times { done, towline_cpu })
}
