//! A guest that counts in its memory and on its disk, which have to be of the same instant.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::LinuxGuest;

const WITHIN: Duration = Duration::from_secs(120);
/// Counts in memory, and into a file of the disk, until it is asked to end.
const COUNTS: &str = "mkdir /disk; mount -t ext4 /dev/vda /disk || exit; n=0; \
     { until [ -e /tmp/end ]; do n=$((n + 1)); echo $n >> /disk/n; sync; sleep 0.02; done; echo $n > /tmp/ended; } > /dev/null 2>&1 < /dev/null &";
/// Ends that, and prints what was counted in memory, and on the disk up to the first gap.
const COUNTED: &str = "touch /tmp/end; until [ -s /tmp/ended ]; do sleep 0.1; done; echo 3 > /proc/sys/vm/drop_caches; n=0; \
     while read m; do [ $m = $((n + 1)) ] || break; n=$m; done < /disk/n; cat /tmp/ended; echo $n; until umount /disk 2>/dev/null; do sleep 0.1; done; echo done";

/// Makes a file system in this file for a guest that counts.
///
/// # Panics
/// It cannot be made.
pub fn make_ext4(path: &Path) {
    assert!(Command::new("mkfs.ext4").arg("-q").arg(path).status().unwrap().success());
}

/// Asserts that the file system in this file is clean.
///
/// # Panics
/// It is not.
pub fn assert_clean(path: &Path) {
    let checked = Command::new("e2fsck").arg("-fn").arg(path).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

impl LinuxGuest {
    /// Has it count, on the disk `/dev/vda` with that file system.
    ///
    /// # Panics
    /// It does not.
    pub fn begin_to_count(&mut self) {
        self.shell(COUNTS, WITHIN).unwrap();
    }

    /// Ends that, and asserts that it has counted the same in memory and on its disk. Returns the count.
    ///
    /// # Panics
    /// It has not.
    pub fn assert_counted(&mut self, what: &str) -> u64 {
        let said = self.shell(COUNTED, WITHIN).unwrap();
        let words: Vec<_> = said.split_whitespace().collect();
        let [memory, disk, "done"] = words[..] else { panic!("{what}: {said}") };
        assert!(memory == disk, "{what}: {memory} in memory, {disk} on the disk");
        memory.parse().unwrap()
    }
}
