//! Restores into cold and warm memory, from a cold or warm page cache.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use towline_lab::Qemu;

use super::guests::{Guests, LANES, Memory, PREFAULTED, use_mapped_ram};
use crate::guest::{Counter, configure, endpoint, file, incoming, stop};
use crate::machine::Cache;
use crate::table::{self, Bound, Column, Entry, Figures, Table};

/// Goals, as ratios of times.
const HANDED_OVER_MAX: f64 = 1.0;
const STREAMED_COLD_MAX: f64 = 1.1;
/// As a ratio of rates, against a live migration.
const STREAMED_WARM_MIN: f64 = 0.9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Qemu,
    HandedOver,
    Verified,
    Streamed,
    StreamedVerified,
    Live,
}

/// Conditions of a restore, and its method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Restore {
    memory: Memory,
    cache: Cache,
    method: Method,
}

impl Entry for Restore {
    fn group(&self) -> String {
        let memory = match self.memory {
            Memory::Cold => "cold memory (default)",
            Memory::Preallocated => "warm memory (preallocated memfd)",
        };
        format!("restore into {memory}, {}", self.cache.name())
    }

    fn label(&self) -> &'static str {
        match self.method {
            Method::Qemu => "QEMU's own",
            Method::HandedOver => "towline, handed over",
            Method::Verified => "towline, handed over, --verify",
            Method::Streamed => "towline --stream",
            Method::StreamedVerified => "towline --stream --verify",
            Method::Live => "QEMU to QEMU, live, Unix socket",
        }
    }
}

const COLUMNS: [Column<Restore>; 5] = [
    Column::spread("s from command", 2),
    Column::ratio("× QEMU's own", "s from command", |restore: Restore| restore.by(Method::Qemu))
        .with_goal(against_qemu),
    Column::median("MB/s", 0),
    Column::ratio("× live", "MB/s", |restore: Restore| restore.by(Method::Live)).with_goal(against_live),
    Column::spread("s from process start", 2),
];

fn against_qemu(restore: Restore) -> Option<Bound> {
    match (restore.method, restore.memory) {
        (Method::HandedOver, _) => Some(Bound::Most(HANDED_OVER_MAX)),
        (Method::Streamed, Memory::Cold) => Some(Bound::Most(STREAMED_COLD_MAX)),
        _ => None,
    }
}

fn against_live(restore: Restore) -> Option<Bound> {
    let is_judged = (restore.method, restore.memory) == (Method::Streamed, Memory::Preallocated);
    is_judged.then_some(Bound::Least(STREAMED_WARM_MIN))
}

const NOTES: [&str; 6] = [
    "from command: towline's process start, or QEMU's `migrate-incoming` (live: `migrate`); the destination was ready",
    "from process start: the destination's start until its monitor answers, and the former",
    "cold memory is first touched by the restore; QEMU's default memory uses huge pages where available",
    PREFAULTED,
    "in the page cache: read once just before; not in it: written out and dropped (POSIX_FADV_DONTNEED) just before",
    "all restores are of one image that towline wrote of a running guest",
];

impl Restore {
    fn by(self, method: Method) -> Self {
        Self { method, ..self }
    }

    fn all() -> Vec<Self> {
        let methods = [
            Method::Qemu,
            Method::HandedOver,
            Method::Verified,
            Method::Streamed,
            Method::StreamedVerified,
            Method::Live,
        ];
        let of = |memory, cache, count: usize| {
            methods[..count].iter().map(move |&method| Self { memory, cache, method }).collect::<Vec<_>>()
        };
        let cached = Memory::ALL.map(|memory| of(memory, Cache::Cached, methods.len()));
        [cached.concat(), of(Memory::Preallocated, Cache::Dropped, 4)].concat()
    }
}

/// The guest at both ends of its restores.
struct Restores<'a> {
    guests: &'a Guests<'a>,
    source: &'a Qemu,
    counter: Counter,
    image: PathBuf,
    /// The guest's counter in the image.
    saved: u64,
}

/// A QEMU that waits for the guest.
struct Destination {
    qemu: Qemu,
    counter: Counter,
}

/// Saves `source` once while it runs, and measures all restores.
pub(super) fn measure(guests: &Guests<'_>, source: &Qemu) -> Result<Vec<Table>> {
    let (counter, image) = (Counter::of_small(source)?, guests.path("guest.img"));
    source.qmp().execute("cont", Value::Null)?;
    guests.bench.copy([&*endpoint(source), &file(&image)])?.wait(guests.bench)?;
    let saved = counter.read()?;
    ensure!(saved > 0, "the counter of the saved guest is 0, expected more");
    stop(source)?;
    let restores = Restores { guests, source, counter, image, saved };
    let results = table::measure(guests.bench, Restore::all(), |restore| restores.run(restore))?;
    let title = guests.title("Restore to the first tick");
    let table = results.table("restore", &title, &COLUMNS, |_| true);
    Ok(vec![table.with_notes(NOTES)])
}

impl Restores<'_> {
    fn run(&self, restore: Restore) -> Result<Figures> {
        if restore.method != Method::Live {
            restore.cache.prepare(&self.image)?;
        }
        let started = Instant::now();
        let qemu = self.guests.builder(restore.memory).incoming_defer().start()?;
        let start = started.elapsed().as_secs_f64();
        let destination = Destination { counter: Counter::of_small(&qemu)?, qemu };
        let took = match restore.method {
            Method::Qemu => self.by_qemu(&destination),
            Method::Live => self.live(&destination),
            Method::HandedOver => self.by_towline(&destination, &[]),
            Method::Verified => self.by_towline(&destination, &["--verify"]),
            Method::Streamed => self.by_towline(&destination, &["--stream"]),
            Method::StreamedVerified => self.by_towline(&destination, &["--stream", "--verify"]),
        };
        let took = took.with_context(|| format!("QEMU wrote: {}", destination.qemu.stderr().trim()))?;
        let took = took.as_secs_f64();
        let megabytes = self.guests.data_bytes() as f64 / 1e6;
        Ok(Figures::from([
            ("s from command", took),
            ("s from process start", start + took),
            ("MB/s", megabytes / took),
        ]))
    }

    fn by_towline(&self, destination: &Destination, options: &[&str]) -> Result<Duration> {
        let (image, to, lanes) = (file(&self.image), endpoint(&destination.qemu), LANES.to_string());
        self.guests.prefault()?;
        let arguments = [&*image, &to, "--multifd-channels", &lanes];
        let mut copying = self.guests.bench.copy(arguments.iter().chain(options).copied())?;
        let started = copying.started;
        // After a failure of towline the guest does not tick, and its error is returned.
        let tick = self.guests.bench.wait("the guest's first tick", || {
            let ticked = destination.counter.read()? > self.saved;
            Ok((ticked || !copying.runs()?).then(|| ticked.then(|| started.elapsed())))
        })?;
        copying.wait(self.guests.bench)?;
        if let Some(tick) = tick {
            return Ok(tick);
        }
        destination.counter.tick(self.guests.bench, self.saved)?;
        Ok(started.elapsed())
    }

    fn by_qemu(&self, destination: &Destination) -> Result<Duration> {
        use_mapped_ram(&destination.qemu, false)?;
        self.guests.prefault()?;
        let started = Instant::now();
        incoming(&destination.qemu, &file(&self.image))?;
        destination.counter.tick(self.guests.bench, self.saved)?;
        Ok(started.elapsed())
    }

    /// Migrates from QEMU to QEMU. The source stays stopped, so that a counting guest does not use a processor of QEMU's threads; the
    /// destination runs on `cont` once it has everything, as with towline.
    fn live(&self, destination: &Destination) -> Result<Duration> {
        let (bench, qemu) = (self.guests.bench, &destination.qemu);
        let uri = format!("unix:{}", qemu.directory().join("live.sock").display());
        for qemu in [self.source, qemu] {
            let parameters = json!({ "multifd-channels": LANES, "direct-io": false });
            configure(qemu, &[("multifd", true), ("mapped-ram", false)], parameters)?;
        }
        incoming(qemu, &uri)?;
        let counter = self.counter.read()?;
        self.guests.prefault()?;
        let started = Instant::now();
        let migrated = bench.migrate(self.source, &uri).and_then(|_| {
            bench.wait("a live migration", || Ok((qemu.qmp().status()? != "inmigrate").then_some(())))?;
            qemu.qmp().execute("cont", Value::Null)?;
            destination.counter.tick(bench, counter)?;
            Ok(started.elapsed())
        });
        stop(self.source)?;
        migrated
    }
}
