//! A file mapped for reading, which another process may truncate at any time.

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Advice, Mmap, MmapOptions};
use towline_channel::guard::{MappingGuard, Zeros};

/// A mapped file. Loading a page that the file no longer has, or that its disk cannot read, yields zeros
/// instead of ending the process, and is recorded: [`Mapping::is_lost`].
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Declared first: dropped before the memory is unmapped, so it never guards another mapping.
    guard: MappingGuard,
    map: Mmap,
}

impl Mapping {
    /// Maps the whole file.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: images are written under a temporary name and not changed under their own, so the bytes of
        // the slice do not change. If another process truncates one nevertheless, the guard maps zeros in
        // place of a missing page before any code sees a byte of it, and every user of the bytes checks
        // `is_lost` before relying on them.
        let map = unsafe { MmapOptions::new().map(file) }?;
        // SAFETY: the memory is this mapping, and the guard is dropped first.
        let guard = unsafe { MappingGuard::new(map.as_ptr(), map.len(), Zeros::Page) }?;
        Ok(Self { guard, map })
    }

    /// Returns true if a load found no page since the file was mapped.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// Maps this part at once, which is much cheaper than a fault for each page; kernels before 5.14 fault
    /// them one by one.
    pub(crate) fn populate(&self, start: usize, length: usize) {
        let _ = self.map.advise_range(Advice::PopulateRead, start, length);
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn file(pages: usize) -> File {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; pages * PAGE], 0).unwrap();
        file
    }

    #[test]
    fn a_truncated_file_reads_as_zeros_and_is_marked_as_lost() {
        let (file, other) = (file(8), file(1));
        let (map, intact) = (Mapping::new(&file).unwrap(), Mapping::new(&other).unwrap());
        assert_eq!((map[7 * PAGE], map.is_lost()), (7, false));
        file.set_len(2 * PAGE as u64 + 5).unwrap();
        assert_eq!((map[2 * PAGE + 4], map[2 * PAGE + 5], map.is_lost()), (7, 0, false), "the last page");
        assert_eq!(map[3 * PAGE..5 * PAGE], [0; 2 * PAGE]);
        assert!(map.is_lost() && !intact.is_lost());
        assert_eq!((map[PAGE], intact[0]), (7, 7));
        drop(map);
        // A new mapping, perhaps at the same address, has no mark.
        assert!(!Mapping::new(&other).unwrap().is_lost());
    }

    #[test]
    fn concurrent_faults_in_many_mappings_are_handled() {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let file = file(16);
                        let map = Mapping::new(&file).unwrap();
                        file.set_len(0).unwrap();
                        std::thread::scope(|scope| {
                            for _ in 0..2 {
                                scope.spawn(|| assert!(map.iter().all(|byte| *byte == 0)));
                            }
                        });
                        assert!(map.is_lost());
                    }
                });
            }
        });
    }

    /// Child process of the next test, not a test itself.
    #[test]
    fn child_that_faults_elsewhere() {
        if std::env::var_os("TOWLINE_TEST_FAULT_ELSEWHERE").is_none() {
            return;
        }
        let _installed = Mapping::new(&file(1)).unwrap();
        let file = file(1);
        // SAFETY: no other mapping exists; truncating the file under it is the purpose of the test.
        let foreign = unsafe { MmapOptions::new().map(&file) }.unwrap();
        file.set_len(0).unwrap();
        std::process::exit(i32::from(foreign[0]));
    }

    #[test]
    fn a_fault_outside_of_guarded_mappings_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;

        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "sys::mapping::tests::child_that_faults_elsewhere", "--nocapture"]);
        let status = child.env("TOWLINE_TEST_FAULT_ELSEWHERE", "1").output().unwrap().status;
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}
