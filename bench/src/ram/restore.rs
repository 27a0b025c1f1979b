//! Restoring: a file becomes a running guest, in memory that is cold or warm, out of a page cache that is one or the other.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::guest::{Destination, Memory, Source};
use super::peer::{self, Way};
use super::towline::{Copy, image_uri, qmp_uri};
use super::{Bench, Counters, Named, Part, SETTLED, cell, row};
use crate::rounds::{self, Contender};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Means {
    Qemu,
    HandedOver,
    Verified,
    Streamed,
    StreamedVerified,
    Live,
}

/// Where a restore goes to and out of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    memory: Memory,
    /// The image is in the page cache.
    cached: bool,
}

/// One restore.
#[derive(Debug, Clone)]
struct Restored {
    /// From the command to the first tick.
    command: Duration,
    /// From the destination process's start to the first tick, without the bench's own steps between.
    process: Duration,
    ram: Option<Value>,
}

const PLACES: [(Place, &[Means]); 3] = [
    (
        Place { memory: Memory::Cold, cached: true },
        &[
            Means::Qemu,
            Means::HandedOver,
            Means::Verified,
            Means::Streamed,
            Means::StreamedVerified,
            Means::Live,
        ],
    ),
    (
        Place { memory: Memory::Preallocated, cached: true },
        &[
            Means::Qemu,
            Means::HandedOver,
            Means::Verified,
            Means::Streamed,
            Means::StreamedVerified,
            Means::Live,
        ],
    ),
    (
        Place { memory: Memory::Preallocated, cached: false },
        &[Means::Qemu, Means::HandedOver, Means::Verified, Means::Streamed],
    ),
];
/// The goals: group, contender, against which, whether a time or a rate is compared, and the bound.
const HANDED_OVER_MAX: f64 = 1.0;
const STREAMED_COLD_MAX: f64 = 1.1;
const STREAMED_WARM_RATE_MIN: f64 = 0.9;
const SAVE_MAX: f64 = 1.0;
const LIVE_WITHIN: Duration = Duration::from_secs(120);

impl Means {
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

impl Place {
    fn label(self) -> String {
        let memory = match self.memory {
            Memory::Cold => "cold memory (default)",
            Memory::Preallocated => "warm memory (preallocated memfd)",
        };
        let cache = if self.cached { "in" } else { "not in" };
        format!("restore into {memory}, image {cache} the page cache")
    }
}

/// The image that all restores are of.
struct Image {
    path: PathBuf,
    /// The guest's counter in it.
    counter: u64,
}

/// Saves `source` once while it runs, and runs all restores.
pub(super) fn measure(bench: &Bench<'_>, source: &Source) -> Result<Part> {
    let image = save_running(bench, source)?;
    let all: Vec<(Place, Means)> =
        PLACES.iter().flat_map(|(place, means)| means.iter().map(|means| (*place, *means))).collect();
    let contenders: Vec<Contender> = all
        .iter()
        .map(|(place, means)| Contender { group: place.label(), label: means.label().into() })
        .collect();
    let outcomes = rounds::run(&contenders, bench.parameters.runs, &bench.parameters.cancel, |index| {
        let (place, means) = all[index];
        restore(bench, source, &image, place, means)
    })?;
    let seconds = |index: usize| -> Vec<f64> {
        outcomes[index].values.iter().map(|restored| restored.command.as_secs_f64()).collect()
    };
    let mut part = Part { table: table(bench), ratios: Vec::new(), rates: Vec::new(), counters: Vec::new() };
    let bytes = bench.parameters.data_bytes() as f64;
    for (index, (place, means)) in all.iter().enumerate() {
        let find = |wanted| all.iter().position(|(at, means)| at == place && *means == wanted);
        let against =
            |wanted| Summary::of_ratios(&seconds(index), &find(wanted).map(seconds).unwrap_or_default());
        let ratio = against(Means::Qemu);
        let rates: Vec<f64> = seconds(index).iter().map(|time| bytes / time / 1e6).collect();
        let Contender { group, label } = contenders[index].clone();
        part.table
            .rows
            .push(row(&group, &label, &outcomes[index], |restored| cells(restored, ratio, &rates)));
        let named = |value| Named { group: group.clone(), label: label.clone(), value };
        part.ratios.extend(ratio.map(named));
        part.rates.extend(Summary::of(rates.iter().map(|rate| rate / 1e3)).map(named));
        if *means == Means::Streamed {
            // As a rate, so the other way round than times.
            let live = find(Means::Live).map(seconds).unwrap_or_default();
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

/// How the streamed restore's rate against a live migration's is called among the ratios.
const RATE_LABEL: &str = "towline --stream, rate against live";

/// The goals beside what was found.
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
    judge(saves, "≤ 1.0 × QEMU's own time", "towline", &|ratio| ratio <= SAVE_MAX);
    judge(restores, "≤ 1.0 × QEMU's own time", Means::HandedOver.label(), &|ratio| {
        ratio <= HANDED_OVER_MAX
    });
    let within = |warm: bool| -> Vec<Named> {
        let is_warm = |group: &str| group.contains("warm memory");
        restores.iter().filter(|ratio| is_warm(&ratio.group) == warm).cloned().collect()
    };
    let (cold, warm) = (within(false), within(true));
    judge(&cold, "≤ 1.1 × QEMU's own time", Means::Streamed.label(), &|ratio| ratio <= STREAMED_COLD_MAX);
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
            "cold memory is first touched by the restore; where huge pages are to be had, QEMU's default memory gets them".into(),
            SETTLED.into(),
            "in the page cache: read once just before; not in it: written out and dropped (POSIX_FADV_DONTNEED) just before".into(),
            "all restores are of one image that towline wrote; its guest ran when it was saved".into(),
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
    ensure!(counter > 0, "the guest that was saved counts at 0, expected more");
    source.stop()?;
    Ok(Image { path, counter })
}

fn restore(
    bench: &Bench<'_>,
    source: &Source,
    image: &Image,
    place: Place,
    means: Means,
) -> Result<Restored> {
    if means != Means::Live {
        if place.cached { read_once(&image.path)? } else { drop_cached(&image.path)? }
    }
    let destination = Destination::start(bench, place.memory)?;
    let options: &[&str] = match means {
        Means::Qemu => return by_qemu(bench, image, &destination),
        Means::Live => return live(bench, source, &destination),
        Means::HandedOver => &[],
        Means::Verified => &["--verify"],
        Means::Streamed => &["--stream"],
        Means::StreamedVerified => &["--stream", "--verify"],
    };
    let uri = image_uri(&image.path);
    bench.settle()?;
    let mut copy = Copy::start(bench, &uri, &qmp_uri(&destination.qemu), options)?;
    // A towline that fails never makes the guest tick: then its own words count.
    while copy.runs()? && !destination.ticks(image.counter)? {
        bench.parameters.cancel.check()?;
        std::thread::sleep(super::LOOK_INTERVAL);
    }
    let started = copy.started;
    let seen = Instant::now();
    let ticked = destination.ticks(image.counter)?;
    let copied = copy.wait(bench)?;
    let tick = if ticked { seen } else { destination.first_tick(bench, image.counter)? };
    Ok(Restored::new(&destination, tick - started, Some(copied.ram)))
}

fn by_qemu(bench: &Bench<'_>, image: &Image, destination: &Destination) -> Result<Restored> {
    peer::set(bench, &destination.qemu, Way::MappedRam { direct_io: false })?;
    bench.settle()?;
    let started = Instant::now();
    peer::incoming(&destination.qemu, &peer::file_uri(&image.path))?;
    let tick = destination.first_tick(bench, image.counter)?;
    Ok(Restored::new(destination, tick - started, None))
}

/// QEMU to QEMU. The source stays stopped, for a counting guest would take a processor from QEMU's threads; so the
/// destination is told to run as soon as it has everything, as towline does.
fn live(bench: &Bench<'_>, source: &Source, destination: &Destination) -> Result<Restored> {
    let uri = format!("unix:{}", destination.qemu.directory().join("live.sock").display());
    peer::set(bench, &source.qemu, Way::Multifd)?;
    peer::set(bench, &destination.qemu, Way::Multifd)?;
    peer::incoming(&destination.qemu, &uri)?;
    let counter = source.counter.read()?;
    bench.settle()?;
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

/// Brings what the file holds into the page cache; its holes would only fill it with zeros.
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

/// Takes it out of the page cache.
pub(crate) fn drop_cached(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}
