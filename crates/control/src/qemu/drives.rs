//! Drives of a QEMU, from `query-block`, and the locks on their files.
//!
//! QEMU locks single bytes of an image: byte 100 + n while it has permission n, byte 200 + n to exclude
//! permission n for others; permission 1 is writing (block/file-posix.c). `/proc/locks` lists all locks of a
//! host, also of processes that we may not inspect. A QEMU that waits for a guest has none.

use std::cell::LazyCell;
use std::fs;
use std::io::Read as _;

use serde_json::Value;
use towline_compat::facts::{Drive, Lock};

use super::open_files::{FileIdentity, OpenFiles};

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
pub(super) fn name(entry: &Value) -> String {
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
        device: name(entry),
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
    use super::*;

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
