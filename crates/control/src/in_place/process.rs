//! The mappings of a QEMU's process, read on demand.

use std::cell::OnceCell;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::getpid;

use super::TransferReason;
use super::file_id::FileId;
use super::maps::{self, Detail, MapsEntry};
use crate::qemu::Qemu;

/// The mappings of a QEMU's process, once read.
pub(super) struct Mappings {
    process: Result<i32, TransferReason>,
    detail: Detail,
    read: OnceCell<Result<Vec<MapsEntry>, TransferReason>>,
}

impl Mappings {
    pub(super) fn of(qemu: &Qemu, detail: Detail) -> Self {
        let process = qemu.process().known_pid();
        let process = process.map_err(|why| TransferReason::UnknownProcess { why: why.to_owned() });
        Self { process, detail, read: OnceCell::new() }
    }

    /// Those of this process.
    pub(super) fn own() -> Self {
        Self { process: Ok(getpid().as_raw_pid()), detail: Detail::Mappings, read: OnceCell::new() }
    }

    pub(super) fn pid(&self) -> Result<i32, TransferReason> {
        self.process.clone()
    }

    pub(super) fn get(&self) -> Result<&[MapsEntry], TransferReason> {
        let read = || {
            let process = self.directory()?;
            let unreadable = |error| TransferReason::unreadable(process.join(self.detail.file_name()), error);
            maps::mappings(&process, self.detail).map_err(unreadable)
        };
        self.read.get_or_init(read).as_deref().map_err(Clone::clone)
    }

    /// The directory of the process in `/proc`.
    fn directory(&self) -> Result<PathBuf, TransferReason> {
        Ok(format!("/proc/{}", self.pid()?).into())
    }

    /// A path of QEMU's as this process reaches it, if QEMU's process is known.
    pub(super) fn seen(&self, path: &Path) -> Option<PathBuf> {
        let process = self.directory().ok()?;
        Some(match path.strip_prefix("/") {
            Ok(path) => process.join("root").join(path),
            Err(_) => process.join("cwd").join(path),
        })
    }

    /// The file that `wanted` describes, opened for reading, if QEMU has it open.
    pub(super) fn open_file(&self, wanted: &Metadata) -> Result<Option<File>, TransferReason> {
        let found = self.files()?.into_iter().find(|(_, found)| FileId::of(found) == FileId::of(wanted));
        let open = |path: PathBuf| File::open(&path).map_err(|error| TransferReason::unreadable(path, error));
        found.map(|(path, _)| open(path)).transpose()
    }

    /// Refuses a process that does not have this file open, or has another one with the same numbers in its
    /// mappings: on btrfs files of several subvolumes share them.
    pub(super) fn check_open(&self, path: &Path, file: &Metadata) -> Result<(), TransferReason> {
        let open: Vec<_> = self.files()?.iter().map(|(_, found)| FileId::of(found)).collect();
        FileId::of(file).check_among(&open, path)
    }

    /// The files that the process has open, as files of `/proc`.
    pub(super) fn files(&self) -> Result<Vec<(PathBuf, Metadata)>, TransferReason> {
        let mut files = self.descriptors()?;
        files.retain(|(_, found)| found.is_file());
        Ok(files)
    }

    /// The directory to which relative paths of QEMU are relative.
    pub(super) fn working_directory(&self) -> Option<PathBuf> {
        fs::read_link(self.directory().ok()?.join("cwd")).ok()
    }

    /// Returns how the process has this file open, by all of its descriptors; `None` if it does not have it
    /// open.
    pub(super) fn open_mode(&self, file: &Metadata) -> Result<Option<OpenMode>, TransferReason> {
        // The kernel shows the access mode as the permissions of the link.
        let is_writable = |path: &Path| fs::symlink_metadata(path).is_ok_and(|link| link.mode() & 0o200 != 0);
        let mode = |path: &Path| if is_writable(path) { OpenMode::Writable } else { OpenMode::ReadOnly };
        let is_file = |found: &Metadata| FileId::of(found) == FileId::of(file);
        let descriptors = self.descriptors()?;
        Ok(descriptors.iter().filter(|(_, found)| is_file(found)).map(|(path, _)| mode(path)).max())
    }

    /// The descriptors of the process, as files of `/proc`, and what they refer to.
    fn descriptors(&self) -> Result<Vec<(PathBuf, Metadata)>, TransferReason> {
        let directory = self.directory()?.join("fd");
        let entries = fs::read_dir(&directory).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let entries = entries.map_err(|error| TransferReason::unreadable(directory, error))?;
        let mut files = Vec::with_capacity(entries.len());
        for path in entries.into_iter().map(|entry| entry.path()) {
            match fs::metadata(&path) {
                Ok(metadata) => files.push((path, metadata)),
                // It was closed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(TransferReason::unreadable(path, error)),
            }
        }
        Ok(files)
    }
}

/// Access of a process to an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OpenMode {
    ReadOnly,
    Writable,
}

impl FileId {
    /// Checks that it is among these, and no file of another device with its inode number. `path` is its name.
    fn check_among(self, files: &[Self], path: &Path) -> Result<(), TransferReason> {
        let path = path.to_owned();
        if files.iter().any(|file| file.inode == self.inode && *file != self) {
            return Err(TransferReason::Ambiguous { path });
        }
        if files.contains(&self) { Ok(()) } else { Err(TransferReason::NotOpen { path }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_if_no_other_has_its_inode_number() {
        let file = |minor, inode| FileId { major: 0, minor, inode };
        let image = file(40, 257);
        let check = |files: &[FileId]| image.check_among(files, Path::new("/a"));
        assert_eq!(check(&[file(1, 9), image, image]), Ok(()));
        assert_eq!(check(&[file(1, 9)]), Err(TransferReason::NotOpen { path: "/a".into() }));
        // The first file of another subvolume, with or without the image open.
        let ambiguous = Err(TransferReason::Ambiguous { path: "/a".into() });
        assert_eq!(check(&[file(41, 257)]), ambiguous);
        assert_eq!(check(&[file(41, 257), image]), ambiguous);
        assert_eq!(check(&[image, file(41, 257)]), ambiguous);
    }

    #[test]
    fn a_process_has_its_files_open_and_no_others() {
        let (open, other) = (tempfile::tempfile().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let closed = other.as_file().metadata().unwrap();
        let path = other.path().to_owned();
        let process = Mappings::own();
        assert_eq!(process.check_open(&path, &open.metadata().unwrap()), Ok(()));
        assert_eq!(process.check_open(&path, &closed), Ok(()));
        let path = other.into_temp_path();
        assert_eq!(
            process.check_open(&path, &closed),
            Err(TransferReason::NotOpen { path: path.to_path_buf() })
        );
    }
}
