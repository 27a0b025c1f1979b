//! A file mapped for reading, whose end may be cut off by somebody else at any time.

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Advice, Mmap, MmapOptions};

use super::faults::Guard;

/// A mapped file. A load of a page that the file no longer has, or that its disk does not give, reads zeros instead of ending the
/// process, and is remembered: [`Mapping::is_lost`].
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Declared first: it is dropped before the memory is unmapped, so that it never guards somebody else's.
    guard: Guard,
    map: Mmap,
}

impl Mapping {
    /// Maps the whole of `file`.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: images are written under a temporary name and never changed under their own, so the bytes behind the slice
        // stay what they are. Where somebody truncates one all the same, the guard puts zeros in place of what is gone, before
        // any code sees a byte of that page again, and every user of the bytes asks `is_lost` before it relies on them.
        let map = unsafe { MmapOptions::new().map(file) }?;
        Ok(Self { guard: Guard::new(&map)?, map })
    }

    /// Whether a load from it found no page behind it since it was mapped.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// Has this part mapped at once, which costs a fraction of a fault each; a kernel before 5.14 does it fault by fault.
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
    fn a_truncated_file_reads_as_zeros_and_is_known_as_lost() {
        let (file, other) = (file(8), file(1));
        let (map, intact) = (Mapping::new(&file).unwrap(), Mapping::new(&other).unwrap());
        assert_eq!((map[7 * PAGE], map.is_lost()), (7, false));
        file.set_len(2 * PAGE as u64 + 5).unwrap();
        assert_eq!(
            (map[2 * PAGE + 4], map[2 * PAGE + 5], map.is_lost()),
            (7, 0, false),
            "the page of the end"
        );
        assert_eq!(map[3 * PAGE..5 * PAGE], [0; 2 * PAGE]);
        assert!(map.is_lost() && !intact.is_lost());
        assert_eq!((map[PAGE], intact[0]), (7, 7));
        drop(map);
        // A new mapping, perhaps at the same place, begins without faults.
        assert!(!Mapping::new(&other).unwrap().is_lost());
    }

    #[test]
    fn many_threads_may_fault_in_many_mappings_at_once() {
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

    /// Not a test of its own: what the child of the next one does.
    #[test]
    fn child_that_faults_elsewhere() {
        if std::env::var_os("TOWLINE_TEST_FAULT_ELSEWHERE").is_none() {
            return;
        }
        let _installed = Mapping::new(&file(1)).unwrap();
        let file = file(1);
        // SAFETY: nothing else has it mapped, and that it is cut short is the test.
        let foreign = unsafe { MmapOptions::new().map(&file) }.unwrap();
        file.set_len(0).unwrap();
        std::process::exit(i32::from(foreign[0]));
    }

    #[test]
    fn a_fault_that_is_not_in_a_mapping_of_ours_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;

        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "sys::mapping::tests::child_that_faults_elsewhere", "--nocapture"]);
        let status = child.env("TOWLINE_TEST_FAULT_ELSEWHERE", "1").output().unwrap().status;
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}
