//! Memory of another process of this host, a QEMU that maps an image.
//!
//! ```text
//!   /proc/PID/pagemap   ranges that are no longer the file's
//!   /proc/PID/mem       their content
//! ```
//! Needs the rights of a debugger (ptrace(2), `PTRACE_MODE_READ` and `PTRACE_MODE_ATTACH`). The process is not
//! stopped: a reader of memory that is being written gets a mixture.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use super::Span;
use super::pagemap::{PageSelection, Pagemap};

/// Memory of a process.
#[derive(Debug)]
pub struct ProcessMemory {
    pagemap: Pagemap,
    memory: File,
}

impl ProcessMemory {
    /// Opens the memory of a process by its directory in `/proc`.
    ///
    /// # Errors
    /// The process has exited, or its memory is not shown to this one.
    pub fn open(process: &Path) -> io::Result<Self> {
        Ok(Self { pagemap: Pagemap::open(process)?, memory: File::open(process.join("mem"))? })
    }

    /// Finds the pages that the process has written in `length` bytes from `address` on, a private mapping of a
    /// file. Returns ranges of bytes from `address` on, ascending and apart.
    ///
    /// # Errors
    /// `ENOTTY`: Linux is older than 6.7.
    pub fn written(&self, address: u64, length: u64) -> io::Result<Vec<Range<u64>>> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let base = usize::try_from(address).map_err(invalid)?;
        let length = usize::try_from(length).map_err(invalid)?;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        self.pagemap.find(base, 0..length, PageSelection::Private, &mut |offset, length| {
            let range = offset as u64..(offset + length) as u64;
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        })?;
        Ok(ranges)
    }

    /// Copies memory from `address` on into this range of `to`.
    ///
    /// # Errors
    /// It is not mapped, or the process has exited.
    ///
    /// # Panics
    /// If the range is not within `to`.
    pub fn copy(&self, address: u64, to: &Span<'_>, range: Range<usize>) -> io::Result<()> {
        let mut done = range.start;
        while done < range.end {
            let (room, length) = (to.at(done, range.end - done), range.end - done);
            let at = libc::off_t::try_from(address + (done - range.start) as u64)
                .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            // SAFETY: the kernel writes at most `length` bytes from `room` on, which are mapped for the span's lifetime; no reference
            // to them is ever made.
            let read = unsafe { libc::pread(self.memory.as_raw_fd(), room.cast(), length, at) };
            match usize::try_from(read) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::RamMapping;

    const PAGE: usize = 4096;
    const PAGES: usize = 300;

    #[test]
    fn written_pages_are_those_that_are_not_the_file_s() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; PAGES * PAGE]).unwrap();
        // SAFETY: the file has no other user.
        let mut mapping = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        let memory = ProcessMemory::open(Path::new("/proc/self")).unwrap();
        let address = mapping.as_ptr().addr() as u64;
        let written = || match memory.written(address, (PAGES * PAGE) as u64) {
            Ok(ranges) => Some(ranges),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => None,
            Err(error) => panic!("{error}"),
        };
        let Some(found) = written() else { return eprintln!("SKIPPED: this kernel has no PAGEMAP_SCAN") };
        assert_eq!(found, []);
        // Read pages are the file's.
        assert_eq!(mapping.iter().map(|byte| u64::from(*byte)).sum::<u64>(), (7 * PAGES * PAGE) as u64);
        assert_eq!(written().unwrap(), []);
        for page in [0, 5, 6, 7, PAGES - 1] {
            mapping[page * PAGE + 9] = page as u8;
        }
        let range = |first: usize, end: usize| (first * PAGE) as u64..(end * PAGE) as u64;
        assert_eq!(written().unwrap(), [range(0, 1), range(5, 8), range(PAGES - 1, PAGES)]);
        let copy = RamMapping::anonymous(4 * PAGE).unwrap();
        memory.copy(address + (5 * PAGE) as u64, &copy.span(), PAGE..4 * PAGE).unwrap();
        let mut content = vec![0; 3 * PAGE];
        copy.span().read(PAGE, &mut content);
        assert!(content == mapping[5 * PAGE..8 * PAGE]);
        assert!(memory.copy(1, &copy.span(), 0..PAGE).is_err());
    }
}
