//! The mappings of a QEMU's process, read when they are first needed.

use std::cell::OnceCell;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Reason;
use super::maps::{Detail, Mapping, Proc};
use crate::qemu::{Process, Qemu};

/// The mappings of a QEMU's process, once they are needed.
pub(super) struct Mappings {
    process: Result<i32, Reason>,
    detail: Detail,
    read: OnceCell<Result<Vec<Mapping>, Reason>>,
}

impl Mappings {
    pub(super) fn of(qemu: &Qemu, detail: Detail) -> Self {
        let process = match qemu.process() {
            Process::Known { pid, .. } => Ok(*pid),
            Process::Unknown { reason } => Err(Reason::UnknownProcess { why: reason.clone() }),
        };
        Self { process, detail, read: OnceCell::new() }
    }

    pub(super) fn get(&self) -> Result<&[Mapping], Reason> {
        let read = || read_mappings(&self.process.clone()?.to_string(), self.detail);
        self.read.get_or_init(read).as_deref().map_err(Clone::clone)
    }

    /// A path of QEMU's as this process reaches it, if QEMU's process is known.
    pub(super) fn seen(&self, path: &Path) -> Option<PathBuf> {
        let process = Proc::default().directory(&self.process.as_ref().ok()?.to_string());
        Some(match path.strip_prefix("/") {
            Ok(path) => process.join("root").join(path),
            Err(_) => process.join("cwd").join(path),
        })
    }

    /// The file that `wanted` describes, opened for reading, if QEMU has it open.
    pub(super) fn open_file(&self, wanted: &Metadata) -> Result<Option<File>, Reason> {
        let is_wanted = |found: &Metadata| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino());
        let found = self.descriptors()?.into_iter().find(|(_, found)| found.is_file() && is_wanted(found));
        let open = |path: PathBuf| {
            File::open(&path).map_err(|error| Reason::Unreadable { path, text: error.to_string() })
        };
        found.map(|(path, _)| open(path)).transpose()
    }

    /// The descriptors of the process, as files of `/proc`, and what they refer to.
    fn descriptors(&self) -> Result<Vec<(PathBuf, Metadata)>, Reason> {
        let directory = Proc::default().directory(&self.process.clone()?.to_string()).join("fd");
        let unreadable =
            |error: std::io::Error| Reason::Unreadable { path: directory.clone(), text: error.to_string() };
        let entries = fs::read_dir(&directory).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let paths = entries.map_err(unreadable)?.into_iter().map(|entry| entry.path());
        // One that was closed meanwhile is none.
        Ok(paths.filter_map(|path| fs::metadata(&path).ok().map(|metadata| (path, metadata))).collect())
    }
}

/// The mappings of this process.
pub(super) fn own_mappings() -> Result<Vec<Mapping>, Reason> {
    read_mappings("self", Detail::Mappings)
}

fn read_mappings(process: &str, detail: Detail) -> Result<Vec<Mapping>, Reason> {
    let proc = Proc::default();
    proc.mappings(process, detail)
        .map_err(|error| Reason::Unreadable { path: proc.path(process, detail), text: error.to_string() })
}
