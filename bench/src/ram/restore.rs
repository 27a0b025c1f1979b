//! Restores into cold and warm memory, from a cold or warm page cache.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use towline_lab::BootSector;
use towline_lab::expect::qmp;

use super::guests::{Guests, LANES, Memory, PREFAULTED, builder, use_mapped_ram};
use crate::guest::{Counter, Machine, configure, file, incoming, listen, stop};
use crate::machine::Cache;
use crate::table::{self, Bound, Column, Contender, Entry, Figures, Row, Table};

/// Restores the guest into a QEMU that waits. Returns the time to its first tick.
pub(super) type Method = fn(&Restores<'_>, &Machine) -> Result<Duration>;

/// Conditions of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Conditions {
    memory: Memory,
    cache: Cache,
}

impl Row for Conditions {
    fn name(&self) -> String {
        let memory = match self.memory {
            Memory::Cold => "cold memory (default)",
            Memory::Preallocated => "warm memory (preallocated memfd)",
        };
        format!("restore into {memory}, {}", self.cache.name())
    }
}

pub(super) type Restore = Entry<Conditions, Method>;

const QEMU: Contender<Method> = Contender::new("QEMU's own", |it, to| it.by_qemu(to));
const HANDED_OVER: Contender<Method> =
    Contender::new("towline, handed over", |it, to| it.by_towline(to, &[]));
const STREAMED: Contender<Method> =
    Contender::new("towline --stream", |it, to| it.by_towline(to, &["--stream"]));
const LIVE: Contender<Method> = Contender::new("QEMU to QEMU, live, Unix socket", |it, to| it.live(to));
const CONTENDERS: [Contender<Method>; 6] = [
    QEMU,
    HANDED_OVER,
    Contender::new("towline, handed over, --verify", |it, to| it.by_towline(to, &["--verify"])),
    STREAMED,
    Contender::new("towline --stream --verify", |it, to| it.by_towline(to, &["--stream", "--verify"])),
    LIVE,
];
/// Number of those that are measured without the page cache.
const UNCACHED: usize = 4;

const COLUMNS: [Column<Conditions, Method>; 5] = [
    Column::spread("s from command", 2),
    Column::ratio("× QEMU's own", "s from command", |restore| restore.with(QEMU)).with_goal(against_qemu),
    Column::median("MB/s", 0),
    Column::ratio("× live", "MB/s", |restore| restore.with(LIVE)).with_goal(against_live),
    Column::spread("s from process start", 2),
];

/// Goals of the ratio of times.
fn against_qemu(restore: Restore) -> Option<Bound> {
    let is_cold = restore.row.memory == Memory::Cold;
    let streamed = restore.at_most(STREAMED, 1.1).filter(|_| is_cold);
    restore.at_most(HANDED_OVER, 1.0).or(streamed)
}

/// Goal of the ratio of rates.
fn against_live(restore: Restore) -> Option<Bound> {
    let is_warm = restore.row.memory == Memory::Preallocated;
    restore.at_least(STREAMED, 0.9).filter(|_| is_warm)
}

const NOTES: [&str; 6] = [
    "from command: towline's process start, or QEMU's `migrate-incoming` (live: `migrate`); the destination was ready",
    "from process start: the destination's start until its monitor answers, and the former",
    "cold memory is first touched by the restore; QEMU's default memory uses huge pages where available",
    PREFAULTED,
    "in the page cache: read once just before; not in it: written out and dropped (POSIX_FADV_DONTNEED) just before",
    "all restores are of one image that towline wrote of a running guest",
];

pub(super) fn all() -> Vec<Restore> {
    let cached =
        [Memory::Cold, Memory::Preallocated].map(|memory| Conditions { memory, cache: Cache::Cached });
    let dropped = Conditions { memory: Memory::Preallocated, cache: Cache::Dropped };
    [Entry::all(cached, &CONTENDERS), Entry::all([dropped], &CONTENDERS[..UNCACHED])].concat()
}

/// The guest at both ends of its restores.
pub(super) struct Restores<'a> {
    guests: &'a Guests<'a>,
    counter: Counter,
    image: PathBuf,
    /// The guest's counter in the image.
    saved: u64,
}

/// Saves a guest once while it runs, and measures these restores.
pub(super) fn measure(guests: &Guests<'_>, restores: Vec<Restore>) -> Result<Table> {
    let source = &guests.cold;
    let (counter, image) = (Counter::at(source, BootSector::COUNTER_ADDRESS)?, guests.path("guest.img"));
    source.qmp().execute("cont", Value::Null)?;
    guests.bench.copy([&*qmp(source), &file(&image)])?.wait(guests.bench)?;
    let saved = counter.read()?;
    ensure!(saved > 0, "the counter of the saved guest is 0, expected more");
    stop(source)?;
    let ends = Restores { guests, counter, image, saved };
    let results = table::measure(guests.bench, restores, |restore| ends.run(restore))?;
    let title = guests.title("Restore to the first tick");
    Ok(results.table("restore", &title, &COLUMNS, |_| true).with_notes(NOTES))
}

impl Restores<'_> {
    fn run(&self, restore: Restore) -> Result<Figures> {
        let Entry { row, contender } = restore;
        if contender != LIVE {
            row.cache.prepare(&self.image)?;
        }
        let started = Instant::now();
        let qemu = builder(self.guests.memory_mib, row.memory).incoming_defer().start()?;
        let start = started.elapsed().as_secs_f64();
        let destination = Machine { counter: Counter::at(&qemu, BootSector::COUNTER_ADDRESS)?, qemu };
        let took = (contender.kind)(self, &destination);
        let took = took.with_context(|| format!("QEMU wrote: {}", destination.qemu.stderr().trim()))?;
        let took = took.as_secs_f64();
        let megabytes = self.guests.data_bytes() as f64 / 1e6;
        Ok(Figures::from([
            ("s from command", took),
            ("s from process start", start + took),
            ("MB/s", megabytes / took),
        ]))
    }

    fn by_towline(&self, destination: &Machine, options: &[&str]) -> Result<Duration> {
        let (image, to, lanes) = (file(&self.image), qmp(&destination.qemu), LANES.to_string());
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

    fn by_qemu(&self, destination: &Machine) -> Result<Duration> {
        use_mapped_ram(&destination.qemu, false)?;
        self.guests.prefault()?;
        let started = Instant::now();
        incoming(&destination.qemu, &file(&self.image))?;
        destination.counter.tick(self.guests.bench, self.saved)?;
        Ok(started.elapsed())
    }

    /// Migrates from QEMU to QEMU. The source stays stopped, so that a counting guest does not use a processor of QEMU's threads; the
    /// destination runs on `cont` once it has everything, as with towline.
    fn live(&self, destination: &Machine) -> Result<Duration> {
        let (bench, qemu) = (self.guests.bench, &destination.qemu);
        let source = &self.guests.cold;
        for qemu in [source, qemu] {
            let parameters = json!({ "multifd-channels": LANES, "direct-io": false });
            configure(qemu.qmp(), &[("multifd", true), ("mapped-ram", false)], parameters)?;
        }
        let uri = listen(qemu)?;
        let counter = self.counter.read()?;
        self.guests.prefault()?;
        let started = Instant::now();
        let migrated = bench.migrate(source.qmp(), &uri).and_then(|_| {
            bench.wait("a live migration", || Ok((qemu.qmp().status()? != "inmigrate").then_some(())))?;
            qemu.qmp().execute("cont", Value::Null)?;
            destination.counter.tick(bench, counter)?;
            Ok(started.elapsed())
        });
        stop(source)?;
        migrated
    }
}
