//! Saves of a guest's memory to a file.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use towline_lab::Qemu;
use towline_lab::expect::qmp;

use super::guests::{Guests, LANES, Memory, PREFAULTED, use_mapped_ram};
use crate::guest::{file, stop};
use crate::machine::at_once;
use crate::table::{self, Column, Contender, Entry, Figures, Row, Table};

/// Bytes of each write of [`Method::Disk`].
const BLOCK_BYTES: usize = 512 << 10;
/// Alignment of its buffer.
const PAGE_BYTES: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Qemu {
        direct_io: bool,
    },
    Towline,
    /// As many bytes by direct I/O from one buffer, without a guest: the limit.
    Disk,
}

impl Row for Memory {
    fn name(&self) -> String {
        let memory = match self {
            Self::Cold => "default memory",
            Self::Preallocated => "preallocated memfd",
        };
        format!("save out of {memory}")
    }
}

const QEMU: Contender<Method> = Contender::new("QEMU's own", Method::Qemu { direct_io: false });
const QEMU_DIRECT: Contender<Method> =
    Contender::new("QEMU's own, direct-io on", Method::Qemu { direct_io: true });
const TOWLINE: Contender<Method> = Contender::new("towline", Method::Towline);
const DISK: Contender<Method> = Contender::new("the disk itself, direct I/O", Method::Disk);
const COLUMNS: [Column<Memory, Method>; 6] = [
    Column::spread("s", 2),
    Column::ratio("× QEMU's own", "s", |save| save.with(QEMU)),
    Column::median("MB/s", 0),
    Column::spread("s to disk", 2),
    Column::ratio("× QEMU's own, to disk", "s to disk", |save| save.with(QEMU))
        .with_goal(|save| save.at_most(TOWLINE, 0.8)),
    Column::ratio("× direct-io, to disk", "s to disk", |save| save.with(QEMU_DIRECT)),
];

pub(super) fn all() -> Vec<Entry<Memory, Method>> {
    Entry::all([Memory::Cold, Memory::Preallocated], &[QEMU, QEMU_DIRECT, TOWLINE, DISK])
}

/// Measures these saves.
pub(super) fn measure(guests: &Guests<'_>, saves: Vec<Entry<Memory, Method>>) -> Result<Table> {
    let results = table::measure(guests.bench, saves, |Entry { row, contender }| {
        let method = contender.kind;
        let source = if row == Memory::Cold { &guests.cold } else { &guests.preallocated };
        let saved = save(guests, source, method);
        // The image and what is beside it.
        for entry in fs::read_dir(guests.directory.path())? {
            fs::remove_file(entry?.path())?;
        }
        // The guest of a save that failed runs again, too.
        let stopped = if method == Method::Disk { Ok(()) } else { stop(source) };
        let saved = saved?;
        stopped.map(|()| saved)
    })?;
    Ok(results.table("save", &guests.title("Save to a file"), &COLUMNS, |_| true).with_notes([
        "s: from the command (towline: its process's start; QEMU: `migrate`) until it reports completion",
        "s to disk: the same and fsync. towline is synced when it is done, QEMU is not: its file was synced here",
        "towline hashes every chunk (BLAKE3) and writes a manifest, QEMU does neither",
        "the guest is stopped meanwhile; its memory was touched long ago (warm)",
        PREFAULTED,
        &guests.images(),
        "images are removed after every save, so that each save writes new blocks",
    ]))
}

fn save(guests: &Guests<'_>, source: &Qemu, method: Method) -> Result<Figures> {
    let path = guests.path("save.img");
    if let Method::Qemu { direct_io } = method {
        use_mapped_ram(source, direct_io)?;
    }
    guests.prefault()?;
    let started = Instant::now();
    match method {
        Method::Qemu { .. } => drop(guests.bench.migrate(source.qmp(), &file(&path))?),
        Method::Towline => {
            let lanes = LANES.to_string();
            let arguments = [&*qmp(source), &file(&path), "--multifd-channels", &lanes];
            guests.bench.copy(arguments)?.wait(guests.bench)?;
        }
        Method::Disk => write(&path, guests.data_bytes())?,
    }
    let done = started.elapsed().as_secs_f64();
    let synced = match method {
        Method::Towline => done,
        _ => File::open(&path)?.sync_all().map(|()| started.elapsed().as_secs_f64())?,
    };
    let megabytes = guests.data_bytes() as f64 / 1e6;
    Ok(Figures::from([("s", done), ("MB/s", megabytes / done), ("s to disk", synced)]))
}

/// Writes as many bytes to a new file by as many threads as the contenders have.
fn write(path: &Path, bytes: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path)?;
    let part = bytes / LANES as u64;
    at_once((0..LANES as u64).map(|thread| {
        let file = &file;
        move || {
            let buffer = vec![0x5a_u8; BLOCK_BYTES + PAGE_BYTES];
            let block = &buffer[buffer.as_ptr().align_offset(PAGE_BYTES)..][..BLOCK_BYTES];
            for at in (thread * part..(thread + 1) * part).step_by(BLOCK_BYTES) {
                file.write_all_at(block, at)?;
            }
            Ok(())
        }
    }))
}
