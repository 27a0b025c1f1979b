//! The files that a QEMU has open, whose names may now lead to others.
//!
//! ```text
//!   name that QEMU has for a file ─► in its directory and below its root ─► is that file open? ─ yes ─► its device and inode
//!                                                                            └ no ─► the open file that has, or had, this name
//! ```
//! This distinguishes a file that was replaced, removed or moved since it was opened from the one that now
//! has its name, and resolves relative names as QEMU does. For a process that may not be inspected, the file
//! at the absolute name is assumed.

use std::fmt;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Appended by the kernel to the name of a file that was removed.
const DELETED: &str = " (deleted)";

/// A file under any name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileIdentity {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// The number of a block device, which may have several nodes.
    block_device: Option<u64>,
}

impl FileIdentity {
    fn of(metadata: &Metadata) -> Option<Self> {
        let kind = metadata.file_type();
        let block_device = kind.is_block_device().then(|| metadata.rdev());
        (kind.is_file() || block_device.is_some()).then(|| Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            block_device,
        })
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self.block_device, other.block_device) {
            (Some(one), Some(other)) => one == other,
            _ => self == other,
        }
    }
}

impl fmt::Display for FileIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block_device {
            Some(number) => write!(f, "device:{number}"),
            None => write!(f, "{}:{}", self.device, self.inode),
        }
    }
}

/// An open file, and the name by which it was opened or that it has received since.
#[derive(Debug)]
struct OpenFile {
    identity: FileIdentity,
    name: PathBuf,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    process: Option<InspectedProcess>,
}

#[derive(Debug)]
struct InspectedProcess {
    pid: i32,
    files: Vec<OpenFile>,
}

impl OpenFiles {
    /// The open files of a process; `None` if it is not known.
    pub(crate) fn of(pid: Option<i32>) -> Self {
        let process = pid.and_then(|pid| {
            let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
            let file = |path: &Path| {
                let identity = FileIdentity::of(&fs::metadata(path).ok()?)?;
                Some(OpenFile { identity, name: fs::read_link(path).ok()? })
            };
            let files = entries.flatten().filter_map(|entry| file(&entry.path())).collect();
            Some(InspectedProcess { pid, files })
        });
        Self { process }
    }

    /// The file that QEMU has open under this name; `None` if there is none, or if that is unknown.
    pub(crate) fn identify(&self, name: &str) -> Option<FileIdentity> {
        let path = Path::new(name);
        let at = |path: PathBuf| FileIdentity::of(&fs::metadata(path).ok()?);
        let Some(InspectedProcess { pid, files }) = &self.process else {
            return path.is_absolute().then(|| at(path.to_owned()))?;
        };
        let own = PathBuf::from(format!("/proc/{pid}"));
        let absolute = match path.is_absolute() {
            true => path.to_owned(),
            false => fs::read_link(own.join("cwd")).ok()?.join(path),
        };
        // A QEMU that has changed its root opened most files before that.
        let below_root = own.join("root").join(absolute.strip_prefix("/").unwrap_or(&absolute));
        let named = [at(below_root), path.is_absolute().then(|| at(path.to_owned())).flatten()];
        let is_open = |found: &FileIdentity| files.iter().any(|file| file.identity.is_same(found));
        if let Some(found) = named.into_iter().flatten().find(is_open) {
            return Some(found);
        }
        let had = PathBuf::from(format!("{}{DELETED}", absolute.display()));
        files.iter().find(|file| file.name == absolute || file.name == had).map(|file| file.identity)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_file_is_the_one_that_is_open_and_not_the_one_that_has_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().canonicalize().unwrap().join(name);
        let identity = |name: &str| FileIdentity::of(&fs::metadata(path(name)).unwrap()).unwrap();
        let found = |name: &str| {
            let own = rustix::process::getpid().as_raw_pid();
            OpenFiles::of(Some(own)).identify(path(name).to_str().unwrap())
        };
        let open = ["kept", "replaced", "removed", "moved"].map(|name| {
            let _written = File::create(path(name)).unwrap();
            File::open(path(name)).unwrap()
        });
        let before = ["kept", "replaced", "removed", "moved"].map(identity);
        File::create(path("other")).unwrap();
        fs::rename(path("other"), path("replaced")).unwrap();
        fs::remove_file(path("removed")).unwrap();
        fs::rename(path("moved"), path("elsewhere")).unwrap();
        std::os::unix::fs::symlink(path("kept"), path("link")).unwrap();
        fs::hard_link(path("kept"), path("hard")).unwrap();
        for name in ["kept", "link", "hard"] {
            assert_eq!(found(name), Some(before[0]), "{name}");
        }
        assert_eq!(found("replaced"), Some(before[1]));
        assert_ne!(identity("replaced"), before[1]);
        assert_eq!(found("removed"), Some(before[2]));
        assert_eq!(found("elsewhere"), Some(before[3]));
        assert_eq!(found("moved"), None);
        drop(open);
        assert_eq!(found("kept"), None);
    }

    #[test]
    fn a_relative_name_is_of_the_directory_of_its_process() {
        let directory = tempfile::tempdir().unwrap();
        File::create(directory.path().join("disk.raw")).unwrap();
        let mut other = std::process::Command::new("sh")
            .args(["-c", "exec 7<disk.raw; read line"])
            .current_dir(directory.path())
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(other.id()).unwrap();
        let expected = FileIdentity::of(&fs::metadata(directory.path().join("disk.raw")).unwrap());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        // Until the shell has opened it.
        while OpenFiles::of(Some(pid)).identify("disk.raw") != expected {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert_eq!(OpenFiles::of(None).identify("disk.raw"), None);
        drop(other.stdin.take());
        other.wait().unwrap();
    }
}
