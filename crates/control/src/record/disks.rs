//! Disks of a guest that is recorded: a file for each instant, each the backing file of the next. They are joined before QEMU has too many.
//!
//! ```text
//!   disk.raw ◄─ disk.1 ◄─ disk.2 ◄─ … ◄─ disk.30 ◄─ disk.31   the guest writes here
//!   disk.raw ◄──────────────────────────────────── disk.31    joined (block-stream): QEMU has no need of the others, instants may
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use towline_channel::Cancel;
use towline_image::directory::is_in_use;
use towline_qmp::commands::{BlockStream, QueryJobs};

use super::error::Error;
use super::place::check_room;
use crate::qemu::{self, Drive, Qemu};
use crate::waits::{Woken, wait};

/// Files of a drive from which on they are joined. QEMU's limit here is 64.
const JOINED_FROM: usize = 24;
/// Beginning of the names of jobs.
const JOB: &str = "towline-record-";
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Longest name of a backing file that QEMU writes.
const NAME_BYTES_MAX: usize = 1023;

/// Joins the files of each drive that has many; waits until QEMU has. Another job for the drive is an error, as is a file system of the
/// record without room.
pub(super) fn join(qemu: &mut Qemu, record: &Path, cancel: &Cancel) -> Result<(), Error> {
    let directory = qemu.working_directory().unwrap_or_default();
    for (number, drive) in qemu.written_drives()?.iter().enumerate() {
        let Some(Join { base, bytes }) = join_of(drive, &directory) else { continue };
        check_room(record, bytes)?;
        let job_id = format!("{JOB}{number}");
        tracing::info!(
            drive = drive.name,
            base,
            files = drive.files.chain.len(),
            "the files of a drive are joined"
        );
        qemu.client()
            .execute(&BlockStream { job_id, device: drive.node.clone(), base })
            .map_err(qemu::Error::from)?;
    }
    while qemu
        .client()
        .execute(&QueryJobs)
        .map_err(qemu::Error::from)?
        .iter()
        .any(|job| job.id.starts_with(JOB))
    {
        if wait(cancel, None, POLL_INTERVAL) == Woken::Cancelled {
            // QEMU goes on with it.
            return Ok(());
        }
    }
    Ok(())
}

/// Returns true if the files of a drive are to be joined.
pub(super) fn is_long(drive: &Drive) -> bool {
    drive.files.chain.len() >= JOINED_FROM
}

/// Files of a drive to join.
struct Join {
    /// The file that stays the backing file.
    base: String,
    /// Bytes that are copied at most.
    bytes: u64,
}

/// At least half of the files are joined, and further ones unless that would copy much for little.
fn join_of(drive: &Drive, directory: &Path) -> Option<Join> {
    let chain = &drive.files.chain;
    if !is_long(drive) {
        return None;
    }
    // Of another kind of storage: never copied.
    let bytes =
        |file: &String| fs::metadata(directory.join(file)).map_or(u64::MAX, |file| file.blocks() * 512);
    let mut joined = chain.len() / 2;
    let mut total = chain[..joined].iter().map(bytes).fold(0, u64::saturating_add);
    while joined + 1 < chain.len() && bytes(&chain[joined]) <= total.saturating_mul(2) {
        total = total.saturating_add(bytes(&chain[joined]));
        joined += 1;
    }
    Some(Join { base: chain[joined].clone(), bytes: total })
}

/// Files of disks in the directory of a record.
#[derive(Debug)]
pub(super) struct DiskFiles {
    directory: PathBuf,
    /// Files that nothing needed when this process began: the last disks of a guest that ended, or left by a killed process.
    unknown: BTreeSet<PathBuf>,
}

impl DiskFiles {
    /// The files of this directory; `needed` names disks that instants need.
    pub(super) fn of(directory: PathBuf, needed: &[PathBuf]) -> io::Result<Self> {
        let unknown = unneeded(&directory, needed)?;
        Ok(Self { directory, unknown: unknown.into_iter().collect() })
    }

    /// Removes files that neither these disks nor a process needs. One that nothing needed when this process began may be the disk of a
    /// guest that ended: it stays, with its backing files, as long as the oldest instant is not newer.
    pub(super) fn remove_unneeded(&self, mut needed: Vec<PathBuf>, oldest: SystemTime) -> io::Result<()> {
        let stays = |path: &&PathBuf| {
            fs::metadata(path).and_then(|file| file.modified()).is_ok_and(|time| time >= oldest)
        };
        let stay: BTreeSet<&PathBuf> = self.unknown.iter().filter(stays).collect();
        // With their backing files; one that was not completed has none.
        needed.extend(stay.iter().filter(|path| backing_file(path).is_ok()).map(|path| path.to_path_buf()));
        for path in unneeded(&self.directory, &needed)? {
            if !stay.contains(&path) && is_in_use(&path).is_ok_and(|is_used| !is_used) {
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }
}

/// Files of a directory that are in no chain of these disks. None if a chain cannot be followed.
fn unneeded(directory: &Path, needed: &[PathBuf]) -> io::Result<Vec<PathBuf>> {
    let mut reached = BTreeSet::new();
    for disk in needed {
        let mut next = Some(disk.clone());
        while let Some(path) = next.filter(|path| path.parent() == Some(directory) && !reached.contains(path))
        {
            next = match backing_file(&path) {
                // A disk that was removed needs nothing.
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                backing => backing?,
            };
            reached.insert(path);
        }
    }
    let files = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let files = files.collect::<io::Result<Vec<_>>>()?;
    Ok(files.into_iter().filter(|path| !reached.contains(path)).collect())
}

/// The backing file that the header of a qcow2 file names.
pub(super) fn backing_file(path: &Path) -> io::Result<Option<PathBuf>> {
    let file = File::open(path)?;
    let mut header = [0; 20];
    file.read_exact_at(&mut header, 0)?;
    let unknown = || {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: its backing file is not known", path.display()),
        )
    };
    if &header[..4] != b"QFI\xfb" {
        return Err(unknown());
    }
    let offset = u64::from_be_bytes(header[8..16].try_into().expect("eight bytes"));
    let length = u32::from_be_bytes(header[16..].try_into().expect("four bytes")) as usize;
    if offset == 0 {
        return Ok(None);
    }
    let mut name = vec![0; length.min(NAME_BYTES_MAX)];
    file.read_exact_at(&mut name, offset)?;
    let name = String::from_utf8(name).map_err(|_| unknown())?;
    if name.starts_with("json:") || length > NAME_BYTES_MAX {
        return Err(unknown());
    }
    Ok(Some(path.parent().unwrap_or(Path::new("/")).join(name)))
}
