//! The files that a QEMU has open, whose names may now lead to others, and the drives on them.
//!
//! ```text
//!   name that QEMU has for a file ─► in its directory and below its root ─► is that file open? ─ yes ─► its device and inode
//!                                                                            └ no ─► the open file that has, or had, this name
//! ```
//! This distinguishes a file that was replaced, removed or moved since it was opened from the one that now
//! has its name, and resolves relative names as QEMU does. For a process that may not be inspected, the file
//! at the absolute name is assumed.

use std::cell::LazyCell;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde_json::Value;
use towline_compat::facts::{Drive, Lock};

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
    /// `None`: it is not known, or may not be inspected.
    pid: Option<i32>,
    files: Vec<OpenFile>,
}

impl OpenFiles {
    /// The open files of a process; `None` if it is not known.
    pub(crate) fn of(pid: Option<i32>) -> Self {
        let entries = pid.and_then(|pid| fs::read_dir(format!("/proc/{pid}/fd")).ok());
        let pid = pid.filter(|_| entries.is_some());
        let file = |path: &Path| {
            let identity = FileIdentity::of(&fs::metadata(path).ok()?)?;
            Some(OpenFile { identity, name: fs::read_link(path).ok()? })
        };
        let entries = entries.into_iter().flatten().flatten();
        Self { pid, files: entries.filter_map(|entry| file(&entry.path())).collect() }
    }

    /// The file that QEMU has open under this name; `None` if there is none, or if that is unknown.
    pub(crate) fn identify(&self, name: &str) -> Option<FileIdentity> {
        let path = Path::new(name);
        let at = |path: PathBuf| FileIdentity::of(&fs::metadata(path).ok()?);
        let Self { pid: Some(pid), files } = self else {
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

// Drives of a QEMU, from `query-block`, and the locks on their files.
//
// QEMU locks single bytes of an image: byte 100 + n while it has permission n, byte 200 + n to exclude
// permission n for others; permission 1 is writing (block/file-posix.c). `/proc/locks` lists all locks of a
// host, also of processes that we may not inspect. A QEMU that waits for a guest has none.

/// Locked by a writer.
const WRITES_BYTE: u64 = 101;
/// Locked to exclude other writers.
const NO_OTHER_WRITES_BYTE: u64 = 201;
/// Size of several thousand locks.
const LOCKS_BYTES: usize = 256 << 10;
/// Name of a virtio device below its PCI function.
const VIRTIO_CHILD: &str = "/virtio-backend";

/// Text of `/proc/locks`, read for the first drive.
type Locks = LazyCell<String>;
/// Files that QEMU has open, read for the first drive.
type Files<'a> = LazyCell<OpenFiles, Box<dyn FnOnce() -> OpenFiles + 'a>>;

/// The drives that have a medium, of the QEMU of this process.
pub(super) fn drives(reply: &Value, pid: Option<i32>) -> Vec<Drive> {
    let files: Files<'_> = LazyCell::new(Box::new(move || OpenFiles::of(pid)));
    let locks: Locks = LazyCell::new(locks);
    reply.as_array().into_iter().flatten().filter_map(|entry| drive(entry, &files, &locks)).collect()
}

/// Name of the device or node of an entry of `query-block`.
pub(super) fn drive_name(entry: &Value) -> String {
    let names = [&entry["qdev"], &entry["device"], &entry["inserted"]["node-name"]];
    let device =
        names.into_iter().filter_map(Value::as_str).find(|name| !name.is_empty()).unwrap_or_default();
    device.strip_suffix(VIRTIO_CHILD).unwrap_or(device).to_owned()
}

/// All locks of this host; empty if they cannot be read.
///
/// A read may wait for every processor to release the list (10 ms and more), so it is read once, and only if
/// there are drives.
fn locks() -> String {
    let mut text = String::with_capacity(LOCKS_BYTES);
    let read = fs::File::open("/proc/locks").and_then(|mut file| file.read_to_string(&mut text));
    read.map(|_| text).unwrap_or_default()
}

fn drive(entry: &Value, files: &Files<'_>, locks: &Locks) -> Option<Drive> {
    let inserted = entry.get("inserted")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let file = text(&inserted["image"]["filename"]);
    let identity = files.identify(&file);
    let lock = identity.as_ref().map_or(Lock::Unknown, |found| lock_of(found, locks));
    Some(Drive {
        device: drive_name(entry),
        format: text(&inserted["drv"]),
        read_only: inserted["ro"].as_bool().unwrap_or_default(),
        virtual_bytes: inserted["image"]["virtual-size"].as_u64().unwrap_or_default(),
        identity: identity.map(|found| found.to_string()),
        lock,
        file,
    })
}

fn lock_of(file: &FileIdentity, locks: &Locks) -> Lock {
    if locks.is_empty() {
        return Lock::Unknown;
    }
    let (major, minor) = (rustix::fs::major(file.device), rustix::fs::minor(file.device));
    lock(locks, &format!("{major:02x}:{minor:02x}:{}", file.inode))
}

/// `12: OFDLCK ADVISORY  READ  -1 08:01:1234 101 101` of the file `08:01:1234`.
fn lock(locks: &str, file: &str) -> Lock {
    let range = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == file)?;
        let end = match *words.get(at + 2)? {
            "EOF" => u64::MAX,
            end => end.parse().ok()?,
        };
        Some(words.get(at + 1)?.parse::<u64>().ok()?..=end)
    };
    let ranges: Vec<_> = locks.lines().filter_map(range).collect();
    let is_held = |byte| ranges.iter().any(|range| range.contains(&byte));
    match (is_held(WRITES_BYTE), is_held(NO_OTHER_WRITES_BYTE)) {
        (true, _) => Lock::Held,
        (false, true) => Lock::HeldByReaders,
        (false, false) => Lock::Free,
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

    #[test]
    fn lock_state_follows_from_the_locked_bytes() {
        let line = |bytes: &str| {
            format!(
                "1: POSIX  ADVISORY  WRITE 7 08:01:9 0 EOF\n2: OFDLCK ADVISORY  READ -1 00:1f:42 {bytes}\n"
            )
        };
        assert_eq!(lock(&line("101 101"), "00:1f:42"), Lock::Held);
        assert_eq!(lock(&line("100 103"), "00:1f:42"), Lock::Held);
        assert_eq!(lock(&line("201 201"), "00:1f:42"), Lock::HeldByReaders);
        assert_eq!(lock(&line("100 100"), "00:1f:42"), Lock::Free);
        assert_eq!(lock(&line("101 101"), "00:1f:4"), Lock::Free);
        assert_eq!(lock("1: POSIX  ADVISORY  WRITE 7 00:1f:42 0 EOF", "00:1f:42"), Lock::Held);
    }

    #[test]
    fn drive_without_a_medium_is_skipped() {
        let reply = serde_json::json!([
            { "device": "cd", "removable": true },
            { "device": "", "qdev": "/machine/peripheral/d/virtio-backend", "inserted":
                { "drv": "raw", "ro": false, "image": { "filename": "/nowhere/x", "virtual-size": 5 } } }
        ]);
        let found = drives(&reply, None);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].device.as_str(), found[0].virtual_bytes), ("/machine/peripheral/d", 5));
        assert_eq!(found[0].lock, Lock::Unknown);
    }
}
