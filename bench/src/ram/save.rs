//! Saves of a guest's memory to a file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use super::bench::Bench;
use super::guest::{Memory, Source};
use super::part::{Counters, Named, PREFAULTED, Part, cell, row};
use super::peer::{self, Migration};
use super::towline::{Copy, image_uri, qmp_uri};
use crate::rounds::{self, Contender};
use crate::stats::Summary;
use crate::table::Table;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Qemu {
        direct_io: bool,
    },
    Towline,
    /// As many bytes by direct I/O from one buffer, without a guest: the limit.
    Disk,
}

const METHODS: [Method; 4] =
    [Method::Qemu { direct_io: false }, Method::Qemu { direct_io: true }, Method::Towline, Method::Disk];
/// Bytes of each write of [`Method::Disk`].
const BLOCK_BYTES: usize = 512 << 10;
/// Alignment of its buffer.
const PAGE_BYTES: usize = 4096;
const MEMORY: [Memory; 2] = [Memory::Cold, Memory::Preallocated];

/// One save.
#[derive(Debug, Clone)]
struct Saved {
    /// Time until the contender reported completion.
    done: Duration,
    /// Time until the file was synced.
    synced: Duration,
    ram: Option<Value>,
}

impl Method {
    fn label(self) -> &'static str {
        match self {
            Self::Qemu { direct_io: false } => "QEMU's own",
            Self::Qemu { direct_io: true } => "QEMU's own, direct-io on",
            Self::Towline => "towline",
            Self::Disk => "the disk itself, direct I/O",
        }
    }
}

/// Measures all saves, of `source` and of a guest with preallocated memory.
pub(super) fn measure(bench: &Bench<'_>, source: &Source) -> Result<Part> {
    let preallocated = Source::start(bench, Memory::Preallocated)?;
    let all: Vec<(Memory, Method)> =
        MEMORY.into_iter().flat_map(|memory| METHODS.map(|method| (memory, method))).collect();
    let contenders: Vec<Contender> = all
        .iter()
        .map(|(memory, method)| Contender {
            group: format!("save out of {}", memory.as_text()),
            label: method.label().into(),
        })
        .collect();
    let outcomes = rounds::run(&contenders, bench.parameters.runs, &bench.parameters.cancel, |index| {
        let (memory, method) = all[index];
        save(bench, if memory == Memory::Cold { source } else { &preallocated }, method)
    })?;
    let mut part = Part { table: table(bench), ratios: Vec::new(), rates: Vec::new(), counters: Vec::new() };
    for group in 0..MEMORY.len() {
        let base = group * METHODS.len();
        let seconds = |index: usize| -> Vec<f64> {
            outcomes[index].values.iter().map(|saved| saved.done.as_secs_f64()).collect()
        };
        let to_disk = |index: usize| -> Vec<f64> {
            outcomes[index].values.iter().map(|saved| saved.synced.as_secs_f64()).collect()
        };
        for (offset, method) in METHODS.into_iter().enumerate() {
            let index = base + offset;
            let Contender { group, label } = contenders[index].clone();
            let ratios = Ratios {
                plain: Summary::of_ratios(&seconds(index), &seconds(base)),
                to_disk: Summary::of_ratios(&to_disk(index), &to_disk(base)),
                direct: Summary::of_ratios(&to_disk(index), &to_disk(base + 1)),
            };
            let cells = |saved: &[Saved]| cells(bench, saved, &ratios);
            part.table.rows.push(row(&group, &label, &outcomes[index], cells));
            let bytes = bench.parameters.data_bytes() as f64;
            if let (Method::Towline, Some(last)) = (method, outcomes[index].values.last()) {
                let ram = last.ram.clone().unwrap_or_default();
                part.counters.push(Counters { group: group.clone(), label: label.clone(), ram });
                let named = |value| Named { group: group.clone(), label: label.clone(), value };
                part.ratios.extend(ratios.to_disk.map(named));
                part.rates
                    .extend(Summary::of(seconds(index).iter().map(|time| bytes / time / 1e9)).map(named));
            }
        }
    }
    Ok(part)
}

fn table(bench: &Bench<'_>) -> Table {
    let parameters = bench.parameters;
    Table {
        name: "save",
        title: format!(
            "Save: {} MiB guest, {} MiB random, to a file, {} channels, {} runs, median (min–max)",
            parameters.memory_mib, parameters.data_mib, parameters.lanes, parameters.runs
        ),
        columns: vec![
            "what",
            "s",
            "MB/s",
            "× QEMU's own",
            "s to disk",
            "× QEMU's own, to disk",
            "× direct-io, to disk",
        ],
        rows: Vec::new(),
        notes: vec![
            "s: from the command (towline: its process's start; QEMU: `migrate`) until it reports completion".into(),
            "s to disk: the same and fsync. towline is synced when it is done, QEMU is not: its file was synced here".into(),
            "towline hashes every chunk (BLAKE3) and writes a manifest, QEMU does neither".into(),
            "the guest is stopped meanwhile; its memory was touched long ago (warm)".into(),
            PREFAULTED.into(),
            bench.images(),
        ],
    }
}

/// Ratios of a row.
struct Ratios {
    /// To QEMU's own save.
    plain: Option<Summary>,
    /// To QEMU's own save, until the data are on the disk.
    to_disk: Option<Summary>,
    /// To QEMU's own save with direct I/O, until the data are on the disk.
    direct: Option<Summary>,
}

fn cells(bench: &Bench<'_>, saved: &[Saved], ratios: &Ratios) -> (Vec<String>, Value) {
    let done: Vec<f64> = saved.iter().map(|saved| saved.done.as_secs_f64()).collect();
    let synced: Vec<f64> = saved.iter().map(|saved| saved.synced.as_secs_f64()).collect();
    let bytes = bench.parameters.data_bytes() as f64;
    let rate = Summary::of(done.iter().map(|time| bytes / time / 1e6));
    let cells = vec![
        cell(Summary::of(done.iter().copied())),
        rate.map_or_else(|| "–".into(), |rate| format!("{:.0}", rate.median)),
        cell(ratios.plain),
        cell(Summary::of(synced.iter().copied())),
        cell(ratios.to_disk),
        cell(ratios.direct),
    ];
    (cells, json!({ "seconds": done, "seconds-to-disk": synced }))
}

fn save(bench: &Bench<'_>, source: &Source, method: Method) -> Result<Saved> {
    let path = bench.path("save.img");
    if let Method::Qemu { direct_io } = method {
        peer::set(bench, &source.qemu, Migration::MappedRam { direct_io })?;
    }
    bench.prefault()?;
    let saved = match method {
        Method::Qemu { .. } => peer::migrate(bench, &source.qemu, &peer::file_uri(&path)).and_then(|done| {
            let before = Instant::now();
            File::open(&path)?.sync_all()?;
            Ok(Saved { done, synced: done + before.elapsed(), ram: None })
        }),
        Method::Towline => Copy::start(bench, &qmp_uri(&source.qemu), &image_uri(&path), &[])
            .and_then(|copy| copy.wait(bench))
            .map(|copied| Saved { done: copied.time, synced: copied.time, ram: Some(copied.ram) }),
        Method::Disk => write(&path, bench.parameters.data_bytes(), bench.parameters.lanes),
    };
    remove(bench)?;
    // The guest of a save that failed runs again, too.
    let stopped = if method == Method::Disk { Ok(()) } else { source.stop() };
    let saved = saved?;
    stopped?;
    Ok(saved)
}

/// Writes `bytes` to a new file by as many threads as the contenders have, and syncs it.
fn write(path: &Path, bytes: u64, threads: usize) -> Result<Saved> {
    let started = Instant::now();
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path)?;
    let part = bytes / threads as u64;
    std::thread::scope(|scope| {
        let writers = (0..threads as u64).map(|thread| {
            let file = &file;
            scope.spawn(move || -> Result<()> {
                let buffer = vec![0x5a_u8; BLOCK_BYTES + PAGE_BYTES];
                let block = &buffer[buffer.as_ptr().align_offset(PAGE_BYTES)..][..BLOCK_BYTES];
                for at in (thread * part..(thread + 1) * part).step_by(BLOCK_BYTES) {
                    file.write_all_at(block, at)?;
                }
                Ok(())
            })
        });
        let writers: Vec<_> = writers.collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("the thread does not panic"))
    })?;
    let done = started.elapsed();
    file.sync_all()?;
    Ok(Saved { done, synced: started.elapsed(), ram: None })
}

/// The image and what stands beside it.
fn remove(bench: &Bench<'_>) -> Result<()> {
    for entry in std::fs::read_dir(bench.directory.path())? {
        std::fs::remove_file(entry?.path())?;
    }
    Ok(())
}
