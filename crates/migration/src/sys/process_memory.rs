//! Memory of another process of this host, a QEMU that maps an image.
//!
//! ```text
//!   /proc/PID/pagemap   ranges that are no longer the file's
//!   process_vm_readv    their content, as many ranges in one call as the kernel takes
//!   process_vm_writev   the same into a QEMU that waits for the guest
//! ```
//! Needs the rights of a debugger (ptrace(2), `PTRACE_MODE_READ` and `PTRACE_MODE_ATTACH`). The process is not
//! stopped: a reader of memory that is being written gets a mixture.

use std::num::NonZero;
use std::ops::Range;
use std::path::Path;
use std::{io, ptr, thread};

use towline_protocol::{BlockIndex, PageRef};

use super::pagemap::{PageSelection, Pagemap};
use super::{HUGE_PAGE_BYTES, Span};
use crate::{Guest, parallel};

/// Bytes of one call, so that processors share the work evenly.
const PIECE_BYTES: u64 = 1 << 20;
/// Processors that copy at once: a few carry all that memory does.
const THREADS_MAX: usize = 4;

/// Memory of a process.
#[derive(Debug)]
pub struct ProcessMemory {
    pagemap: Pagemap,
    pid: libc::pid_t,
}

impl ProcessMemory {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// The process has exited, or its memory is not shown to this one.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { pagemap: Pagemap::open(Path::new(&format!("/proc/{pid}")))?, pid })
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

    /// Copies these ranges of the memory from `address` on to the same places of `to`, on several processors if they are large.
    ///
    /// # Errors
    /// They are not mapped, or the process has exited.
    ///
    /// # Panics
    /// If a range is not within `to`.
    pub fn copy(&self, address: u64, to: &Span<'_>, ranges: &[Range<u64>]) -> io::Result<()> {
        on_all_processors(&pieces(ranges), |piece| {
            in_calls(piece.clone(), |piece| {
                let there = remote(address, piece);
                let here: Vec<_> = piece
                    .iter()
                    .map(|range| iovec(to.at(range.start as usize, length(range)), range))
                    .collect();
                let count = here.len() as libc::c_ulong;
                // SAFETY: the kernel reads both arrays, which have `count` elements, and writes at most what `here` names: memory that
                // is mapped for the span's lifetime, and to which no reference is ever made.
                unsafe { libc::process_vm_readv(self.pid, here.as_ptr(), count, there.as_ptr(), count, 0) }
            })
        })
    }

    /// Writes these ranges of a block of `guest`, which are prepared here, to the memory from `address` on, on several processors if they
    /// are large.
    ///
    /// # Errors
    /// The memory is not mapped for writing, or the process has exited; the guest's cannot be prepared. A part may have been written.
    pub fn write(
        &self,
        address: u64,
        guest: &dyn Guest,
        block: BlockIndex,
        ranges: &[Range<u64>],
    ) -> io::Result<()> {
        on_all_processors(&pieces(&by_units(ranges)), |piece| {
            let page = |range: &Range<u64>| PageRef { block, offset: range.start };
            let prepared =
                piece.iter().try_for_each(|range| guest.prepare(page(range), range.end - range.start));
            prepared.map_err(io::Error::other)?;
            in_calls(piece.clone(), |piece| {
                let there = remote(address, piece);
                let here: Vec<_> =
                    piece.iter().map(|range| guest.memory(page(range), range.end - range.start)).collect();
                let count = here.len() as libc::c_ulong;
                // SAFETY: the kernel reads both arrays, which have `count` elements, the former with the layout of `struct iovec`
                // ([`IoBuf`]), and memory that each buffer promises to be mapped. It writes to another process's memory only.
                unsafe {
                    libc::process_vm_writev(self.pid, here.as_ptr().cast(), count, there.as_ptr(), count, 0)
                }
            })
        })
    }
}

fn length(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

fn iovec(base: *mut u8, range: &Range<u64>) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: length(range) }
}

/// These ranges in the other process.
fn remote(address: u64, piece: &[Range<u64>]) -> Vec<libc::iovec> {
    let at = |range: &Range<u64>| ptr::without_provenance_mut((address + range.start) as usize);
    piece.iter().map(|range| iovec(at(range), range)).collect()
}

/// Does `work` with each piece, on several processors.
fn on_all_processors(
    pieces: &[Vec<Range<u64>>],
    work: impl Fn(&Vec<Range<u64>>) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX);
    parallel::for_each(pieces, threads, || &work).map(drop)
}

/// Repeats `call` with what is left of the piece; it returns the bytes that it has transferred.
fn in_calls(mut piece: Vec<Range<u64>>, call: impl Fn(&[Range<u64>]) -> libc::ssize_t) -> io::Result<()> {
    while !piece.is_empty() {
        match u64::try_from(call(&piece)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(done) => skip(&mut piece, done),
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Splits ranges so that none crosses a multiple of 2 MiB, as [`Guest::memory`] has it.
fn by_units(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut split, unit) = (Vec::new(), HUGE_PAGE_BYTES as u64);
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / unit + 1) * unit);
            split.push(start..end);
            start = end;
        }
    }
    split
}

/// Leaves the first `bytes` out.
fn skip(piece: &mut Vec<Range<u64>>, mut bytes: u64) {
    piece.retain_mut(|range| {
        let skipped = bytes.min(range.end - range.start);
        (range.start, bytes) = (range.start + skipped, bytes - skipped);
        range.start < range.end
    });
}

/// Splits ranges into pieces for one call each.
fn pieces(ranges: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
    let (mut pieces, mut last, mut bytes) = (Vec::new(), Vec::new(), 0);
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + PIECE_BYTES - bytes);
            last.push(start..end);
            (start, bytes) = (end, bytes + end - start);
            if bytes == PIECE_BYTES || last.len() == libc::UIO_MAXIOV as usize {
                pieces.push(std::mem::take(&mut last));
                bytes = 0;
            }
        }
    }
    pieces.extend(Some(last).filter(|last| !last.is_empty()));
    pieces
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use towline_protocol::configuration::Configuration;

    use super::*;
    use crate::memory::{BlockBacking, MemoryBlock};
    use crate::{Memory, RamMapping};

    const PAGE: usize = 4096;
    const PAGES: usize = 300;

    #[test]
    fn written_pages_are_those_that_are_not_the_file_s() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; PAGES * PAGE]).unwrap();
        // SAFETY: the file has no other user.
        let mut mapping = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        let memory = ProcessMemory::open(std::process::id().cast_signed()).unwrap();
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
        memory.copy(address + (4 * PAGE) as u64, &copy.span(), &[range(1, 4)]).unwrap();
        let mut content = vec![0; 3 * PAGE];
        copy.span().read(PAGE, &mut content);
        assert!(content == mapping[5 * PAGE..8 * PAGE]);
        assert!(memory.copy(0, &copy.span(), &[range(0, 1)]).is_err());
    }

    #[test]
    fn what_is_written_is_in_the_mapping_and_not_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; PAGES * PAGE]).unwrap();
        // SAFETY: the file has no other user.
        let mapping = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        let block =
            MemoryBlock { name: "pc.ram", length: (PAGES * PAGE) as u64, backing: BlockBacking::Anonymous };
        let guest = Memory::new(Configuration::default(), &[block]).unwrap();
        let page = |page: usize| PageRef { block: BlockIndex(0), offset: (page * PAGE) as u64 };
        (0..PAGES).for_each(|n| guest.write(page(n), &[n as u8; PAGE]));
        let memory = ProcessMemory::open(std::process::id().cast_signed()).unwrap();
        let range = |first: usize, end: usize| (first * PAGE) as u64..(end * PAGE) as u64;
        let written = [range(3, 5), range(8, 290)];
        memory.write(mapping.as_ptr().addr() as u64, &guest, BlockIndex(0), &written).unwrap();
        for (n, content) in mapping.chunks(PAGE).enumerate() {
            let is_written = (3..5).contains(&n) || (8..290).contains(&n);
            assert!(content.iter().all(|byte| *byte == if is_written { n as u8 } else { 7 }), "page {n}");
        }
        let mut of_file = vec![0; PAGES * PAGE];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut of_file, 0).unwrap();
        assert!(of_file.iter().all(|byte| *byte == 7));
        assert!(memory.write(0, &guest, BlockIndex(0), &written).is_err());
        let crossing = by_units(&std::iter::once(5..HUGE_PAGE_BYTES as u64 + 1).collect::<Vec<_>>());
        assert_eq!(crossing[1], HUGE_PAGE_BYTES as u64..HUGE_PAGE_BYTES as u64 + 1);
    }

    #[test]
    fn pieces_have_all_bytes_and_none_is_too_large() {
        let ranges: Vec<_> = (0..3000)
            .map(|n| n * 8192..n * 8192 + 4096)
            .chain(std::iter::once(1 << 30..(1 << 30) + (5 << 20) / 2))
            .collect();
        let all = pieces(&ranges);
        let bytes = |piece: &Vec<Range<u64>>| piece.iter().map(|range| range.end - range.start).sum::<u64>();
        assert!(
            all.iter().all(|piece| bytes(piece) <= PIECE_BYTES && piece.len() <= libc::UIO_MAXIOV as usize)
        );
        assert_eq!(all.iter().map(bytes).sum::<u64>(), 3000 * 4096 + (5 << 20) / 2);
        let mut piece = vec![0..10, 20..30];
        skip(&mut piece, 13);
        assert_eq!(piece.iter().map(|range| range.end - range.start).sum::<u64>(), 7);
        skip(&mut piece, 7);
        assert_eq!(piece, []);
    }
}
