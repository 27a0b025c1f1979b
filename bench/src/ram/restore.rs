//! Restores into cold and warm memory, from a cold or warm page cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::bench::{Bench, POLL_INTERVAL};
use super::guest::{Destination, Memory, Source};
use super::part::{Counters, Named, PREFAULTED, Part, cell, row};
use super::peer::{self, Migration};
use super::towline::{Copy, image_uri, qmp_uri};
use crate::rounds::{self, Contender};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Qemu,
    HandedOver,
    Verified,
    Streamed,
    StreamedVerified,
    Live,
}

/// Conditions of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Scenario {
    memory: Memory,
    /// True if the image is in the page cache.
    cached: bool,
}

/// One restore.
#[derive(Debug, Clone)]
struct Restored {
    /// Time from the command to the first tick.
    command: Duration,
    /// Time from the start of the destination's process to the first tick, without the benchmark's own steps.
    process: Duration,
    ram: Option<Value>,
}

const SCENARIOS: [(Scenario, &[Method]); 3] = [
    (
        Scenario { memory: Memory::Cold, cached: true },
        &[
            Method::Qemu,
            Method::HandedOver,
            Method::Verified,
            Method::Streamed,
            Method::StreamedVerified,
            Method::Live,
        ],
    ),
    (
        Scenario { memory: Memory::Preallocated, cached: true },
        &[
            Method::Qemu,
            Method::HandedOver,
            Method::Verified,
            Method::Streamed,
            Method::StreamedVerified,
            Method::Live,
        ],
    ),
    (
        Scenario { memory: Memory::Preallocated, cached: false },
        &[Method::Qemu, Method::HandedOver, Method::Verified, Method::Streamed],
    ),
];
/// Goals, as ratios of times, or of rates (`RATE`).
const HANDED_OVER_MAX: f64 = 1.0;
const STREAMED_COLD_MAX: f64 = 1.1;
const STREAMED_WARM_RATE_MIN: f64 = 0.9;
const SAVE_MAX: f64 = 0.8;
const LIVE_WITHIN: Duration = Duration::from_secs(120);

impl Method {
    fn label(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU's own",
            Self::HandedOver => "towline, handed over",
            Self::Verified => "towline, handed over, --verify",
            Self::Streamed => "towline --stream",
            Self::StreamedVerified => "towline --stream --verify",
            Self::Live => "QEMU to QEMU, live, Unix socket",
        }
    }
}

impl Scenario {
    fn label(self) -> String {
        let memory = match self.memory {
            Memory::Cold => "cold memory (default)",
            Memory::Preallocated => "warm memory (preallocated memfd)",
        };
        let cache = if self.cached { "in" } else { "not in" };
        format!("restore into {memory}, image {cache} the page cache")
    }
}

/// The restored image.
struct Image {
    path: PathBuf,
    /// The guest's counter in it.
    counter: u64,
}

/// Saves `source` once while it runs, and measures all restores.
pub(super) fn measure(bench: &Bench<'_>, source: &Source) -> Result<Part> {
    let image = save_running(bench, source)?;
    let all: Vec<(Scenario, Method)> = SCENARIOS
        .iter()
        .flat_map(|(scenario, method)| method.iter().map(|method| (*scenario, *method)))
        .collect();
    let contenders: Vec<Contender> = all
        .iter()
        .map(|(scenario, method)| Contender { group: scenario.label(), label: method.label().into() })
        .collect();
    let outcomes = rounds::run(&contenders, bench.parameters.runs, &bench.parameters.cancel, |index| {
        let (scenario, method) = all[index];
        restore(bench, source, &image, scenario, method)
    })?;
    let seconds = |index: usize| -> Vec<f64> {
        outcomes[index].values.iter().map(|restored| restored.command.as_secs_f64()).collect()
    };
    let mut part = Part { table: table(bench), ratios: Vec::new(), rates: Vec::new(), counters: Vec::new() };
    let bytes = bench.parameters.data_bytes() as f64;
    for (index, (scenario, method)) in all.iter().enumerate() {
        let find = |wanted| all.iter().position(|(at, method)| at == scenario && *method == wanted);
        let against =
            |wanted| Summary::of_ratios(&seconds(index), &find(wanted).map(seconds).unwrap_or_default());
        let ratio = against(Method::Qemu);
        let rates: Vec<f64> = seconds(index).iter().map(|time| bytes / time / 1e6).collect();
        let Contender { group, label } = contenders[index].clone();
        part.table
            .rows
            .push(row(&group, &label, &outcomes[index], |restored| cells(restored, ratio, &rates)));
        let named = |value| Named { group: group.clone(), label: label.clone(), value };
        part.ratios.extend(ratio.map(named));
        part.rates.extend(Summary::of(rates.iter().map(|rate| rate / 1e3)).map(named));
        if *method == Method::Streamed {
            // As a rate, so the other method round than times.
            let live = find(Method::Live).map(seconds).unwrap_or_default();
            let rate = Summary::of_ratios(&live, &seconds(index));
            part.ratios.extend(rate.map(|value| Named {
                group: group.clone(),
                label: RATE_LABEL.into(),
                value,
            }));
        }
        if let Some(ram) = outcomes[index].values.last().and_then(|restored| restored.ram.clone()) {
            part.counters.push(Counters { group, label, ram });
        }
    }
    Ok(part)
}

/// Label of the streamed restore's rate against a live migration's.
const RATE_LABEL: &str = "towline --stream, rate against live";

/// Returns the goals with their figures.
pub(super) fn goals(saves: &[Named], restores: &[Named]) -> Table {
    let mut rows = Vec::new();
    let mut judge = |found: &[Named], goal: &str, label: &str, met: &dyn Fn(f64) -> bool| {
        for ratio in found.iter().filter(|ratio| ratio.label == label) {
            let verdict = if met(ratio.value.median) { "met" } else { "missed" };
            let cells = vec![goal.to_owned(), ratio.value.to_string(), verdict.to_owned()];
            let data =
                json!({ "median": ratio.value.median, "min": ratio.value.min, "max": ratio.value.max });
            let label = format!("{}: {label}", ratio.group);
            rows.push(Row { group: String::new(), label, content: Content::Measured { cells, data } });
        }
    };
    judge(saves, "≤ 0.8 × QEMU's own time, both to disk", "towline", &|ratio| ratio <= SAVE_MAX);
    judge(restores, "≤ 1.0 × QEMU's own time", Method::HandedOver.label(), &|ratio| {
        ratio <= HANDED_OVER_MAX
    });
    let within = |warm: bool| -> Vec<Named> {
        let is_warm = |group: &str| group.contains("warm memory");
        restores.iter().filter(|ratio| is_warm(&ratio.group) == warm).cloned().collect()
    };
    let (cold, warm) = (within(false), within(true));
    judge(&cold, "≤ 1.1 × QEMU's own time", Method::Streamed.label(), &|ratio| ratio <= STREAMED_COLD_MAX);
    judge(&warm, "≥ 0.9 × live's rate", RATE_LABEL, &|ratio| ratio >= STREAMED_WARM_RATE_MIN);
    Table {
        name: "goals",
        title: "Goals".into(),
        columns: vec!["what", "goal", "found", ""],
        rows,
        notes: vec!["judged by the median; ratios are taken round by round".into()],
    }
}

fn table(bench: &Bench<'_>) -> Table {
    let parameters = bench.parameters;
    Table {
        name: "restore",
        title: format!(
            "Restore: {} MiB guest, {} MiB random, to its first tick, {} channels, {} runs, median (min–max)",
            parameters.memory_mib, parameters.data_mib, parameters.lanes, parameters.runs
        ),
        columns: vec!["what", "s from command", "× QEMU's own", "MB/s", "s from process start"],
        rows: Vec::new(),
        notes: vec![
            "from command: towline's process start, or QEMU's `migrate-incoming` (live: `migrate`); the destination was ready".into(),
            "from process start: the destination's start until its monitor answers, and the former".into(),
            "cold memory is first touched by the restore; QEMU's default memory uses huge pages where available".into(),
            PREFAULTED.into(),
            "in the page cache: read once just before; not in it: written out and dropped (POSIX_FADV_DONTNEED) just before".into(),
            "all restores are of one image that towline wrote of a running guest".into(),
        ],
    }
}

fn cells(restored: &[Restored], ratio: Option<Summary>, rates: &[f64]) -> (Vec<String>, Value) {
    let command: Vec<f64> = restored.iter().map(|restored| restored.command.as_secs_f64()).collect();
    let process: Vec<f64> = restored.iter().map(|restored| restored.process.as_secs_f64()).collect();
    let cells = vec![
        cell(Summary::of(command.iter().copied())),
        cell(ratio),
        Summary::of(rates.iter().copied()).map_or_else(|| "–".into(), |rate| format!("{:.0}", rate.median)),
        cell(Summary::of(process.iter().copied())),
    ];
    (cells, json!({ "seconds-from-command": command, "seconds-from-process-start": process }))
}

fn save_running(bench: &Bench<'_>, source: &Source) -> Result<Image> {
    let path = bench.path("guest.img");
    source.cont()?;
    Copy::start(bench, &qmp_uri(&source.qemu), &image_uri(&path), &[])?.wait(bench)?;
    let counter = source.counter.read()?;
    ensure!(counter > 0, "the counter of the saved guest is 0, expected more");
    source.stop()?;
    Ok(Image { path, counter })
}

fn restore(
    bench: &Bench<'_>,
    source: &Source,
    image: &Image,
    scenario: Scenario,
    method: Method,
) -> Result<Restored> {
    if method != Method::Live {
        if scenario.cached { read_once(&image.path)? } else { drop_cached(&image.path)? }
    }
    let destination = Destination::start(bench, scenario.memory)?;
    let options: &[&str] = match method {
        Method::Qemu => return by_qemu(bench, image, &destination),
        Method::Live => return live(bench, source, &destination),
        Method::HandedOver => &[],
        Method::Verified => &["--verify"],
        Method::Streamed => &["--stream"],
        Method::StreamedVerified => &["--stream", "--verify"],
    };
    let uri = image_uri(&image.path);
    bench.prefault()?;
    let mut copy = Copy::start(bench, &uri, &qmp_uri(&destination.qemu), options)?;
    // After a failure of towline the guest does not tick, and its error is returned.
    while copy.runs()? && !destination.ticks(image.counter)? {
        bench.parameters.cancel.check()?;
        std::thread::sleep(POLL_INTERVAL);
    }
    let started = copy.started;
    let seen = Instant::now();
    let ticked = destination.ticks(image.counter)?;
    let copied = copy.wait(bench)?;
    let tick = if ticked { seen } else { destination.first_tick(bench, image.counter)? };
    Ok(Restored::new(&destination, tick - started, Some(copied.ram)))
}

fn by_qemu(bench: &Bench<'_>, image: &Image, destination: &Destination) -> Result<Restored> {
    peer::set(bench, &destination.qemu, Migration::MappedRam { direct_io: false })?;
    bench.prefault()?;
    let started = Instant::now();
    peer::incoming(&destination.qemu, &peer::file_uri(&image.path))?;
    let tick = destination.first_tick(bench, image.counter)?;
    Ok(Restored::new(destination, tick - started, None))
}

/// Migrates from QEMU to QEMU. The source stays stopped, so that a counting guest does not use a processor of QEMU's threads; the
/// destination runs on `cont` once it has everything, as with towline.
fn live(bench: &Bench<'_>, source: &Source, destination: &Destination) -> Result<Restored> {
    let uri = format!("unix:{}", destination.qemu.directory().join("live.sock").display());
    peer::set(bench, &source.qemu, Migration::Multifd)?;
    peer::set(bench, &destination.qemu, Migration::Multifd)?;
    peer::incoming(&destination.qemu, &uri)?;
    let counter = source.counter.read()?;
    bench.prefault()?;
    let started = Instant::now();
    let run = || -> Result<Duration> {
        source.qemu.qmp().execute("migrate", json!({ "uri": uri }))?;
        bench.wait("a live migration", LIVE_WITHIN, || {
            let info = source.qemu.qmp().execute("query-migrate", Value::Null)?;
            if info["status"] == "failed" {
                bail!("the live migration failed: {}", info["error-desc"]);
            }
            Ok((destination.qemu.qmp().status()? != "inmigrate").then_some(()))
        })?;
        destination.qemu.qmp().execute("cont", Value::Null)?;
        Ok(destination.first_tick(bench, counter)? - started)
    };
    let outcome = run();
    let status = || {
        let info = source.qemu.qmp().execute("query-migrate", Value::Null)?;
        Ok(matches!(info["status"].as_str(), Some("completed" | "failed" | "cancelled")).then_some(()))
    };
    bench.wait("the source's end of a live migration", LIVE_WITHIN, status)?;
    source.stop()?;
    Ok(Restored::new(destination, outcome?, None))
}

impl Restored {
    fn new(destination: &Destination, command: Duration, ram: Option<Value>) -> Self {
        Self { command, process: destination.start_time + command, ram }
    }
}

/// Reads the file's data into the page cache, without its holes.
pub(crate) fn read_once(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        at = match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let end = seek(&file, SeekFrom::Hole(at))?;
        while at < end {
            let length = usize::try_from(end - at)?.min(buffer.len());
            file.read_exact_at(&mut buffer[..length], at)?;
            at += length as u64;
        }
    }
}

/// Writes the file back, and drops it from the page cache.
pub(crate) fn drop_cached(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}
