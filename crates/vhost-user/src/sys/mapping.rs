//! Shared memory of another process, mapped, read and written without ever becoming a Rust reference.
//!
//! The guest and the frontend write to it at any time. Words are loaded and stored atomically, larger values
//! are copied once by volatile reads, and buffers are passed on as [`IoBuf`], which only system calls read.

use std::fs::File;
use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use towline_channel::guard::{MappingGuard, Zeros};
use towline_channel::{IoBuf, IoBufMut};
use vm_memory::{FileOffset, MmapRegion};

use crate::memory::MemoryTableError;

/// The largest page size of Linux, without huge pages.
const PAGE_BYTES_MAX: u64 = 64 << 10;

/// A mapped part of a file. Unmapped with the last of its [`Area`]s.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Dropped before the region that it guards.
    guard: MappingGuard,
    region: MmapRegion<()>,
    file_id: FileId,
    /// Offset of the mapping in its file: a multiple of the page size.
    start: usize,
    /// Offset of the part in the mapping.
    lead: usize,
    len: usize,
}

/// Identity of a file: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId(u64, u64);

/// Position of bytes in a file, which may be mapped more than once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileRange {
    file: FileId,
    start: usize,
    end: usize,
}

impl FileRange {
    /// Returns true if both have bytes in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.file == other.file && self.start < other.end && other.start < self.end
    }
}

/// A part of a mapping, which it keeps mapped.
#[derive(Debug, Clone)]
pub(crate) struct Area {
    mapping: Arc<Mapping>,
    start: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of the file from `offset` on, shared, for reading and writing. Another process may
    /// truncate the file: an access that faults then (SIGBUS) reads zeros, and the mapping is lost.
    pub(crate) fn guarded(fd: OwnedFd, offset: u64, len: u64) -> Result<Self, MemoryTableError> {
        let end = offset.checked_add(len).filter(|end| *end <= isize::MAX as u64);
        let end = end.ok_or(MemoryTableError::TooLarge { offset, size: len })?;
        let file = File::from(fd);
        // An access past the end of a file raises SIGBUS.
        let metadata = file.metadata().map_err(MemoryTableError::Map)?;
        let (has, file_id) = (metadata.len(), FileId(metadata.dev(), metadata.ino()));
        if has < end {
            return Err(MemoryTableError::File { end, has });
        }
        let len_of = |bytes: u64| usize::try_from(bytes).expect("at most isize::MAX");
        // The kernel maps, unmaps and replaces whole huge pages only.
        let huge = huge_page_bytes(&file);
        let start = offset - offset % huge.max(PAGE_BYTES_MAX);
        let mapped = (end - start).next_multiple_of(huge);
        let region = MmapRegion::from_file(FileOffset::new(file, start), len_of(mapped));
        let region = region.map_err(|error| {
            tracing::debug!(%error, "mmap failed");
            MemoryTableError::Map(std::io::Error::other(error.to_string()))
        })?;
        // SAFETY: the range is this mapping, of which no reference is ever made, and the guard is dropped
        // first. Shared memory may have any contents at any time, so zeros as well.
        let guard = unsafe { MappingGuard::new(region.as_ptr(), region.size(), Zeros::Mapping) };
        let guard = guard.map_err(MemoryTableError::Map)?;
        let (start, lead) = (len_of(start), len_of(offset - start));
        Ok(Self { guard, region, file_id, start, lead, len: len_of(len) })
    }

    /// Returns true if it was replaced by zeros after a fault.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// Length of the mapping.
    #[cfg(test)]
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.region.size()
    }

    /// Address and length of the mapped part. All accesses go through this value.
    pub(crate) fn span(&self) -> (*mut u8, usize) {
        (self.pointer(0, self.len), self.len)
    }

    /// The file, and the offset of the part there.
    pub(crate) fn file(&self) -> (&File, u64) {
        let mapped = self.region.file_offset().expect("the mapping is of a file");
        (mapped.file(), (self.start + self.lead) as u64)
    }

    fn pointer(&self, offset: usize, len: usize) -> *mut u8 {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {offset} of a mapping of {} bytes", self.len);
        // SAFETY: `lead + len` is the mapping's length, and `offset + len` was compared with `len` just now.
        unsafe { self.region.as_ptr().add(self.lead + offset) }
    }

    /// Bytes to read by a system call.
    pub(crate) fn io_buf(&self, offset: usize, len: usize) -> IoBuf<'_> {
        // SAFETY: `pointer` has compared it with the mapping, which lives as long as the borrow and is
        // readable.
        unsafe { IoBuf::from_raw_parts(self.pointer(offset, len), len) }
    }

    /// Bytes to write by a system call.
    pub(crate) fn io_buf_mut(&self, offset: usize, len: usize) -> IoBufMut<'_> {
        // SAFETY: as in `io_buf`; it is writable, and no reference into a mapping is ever made.
        unsafe { IoBufMut::from_raw_parts(self.pointer(offset, len), len) }
    }
}

/// Granularity of a file's mappings: 1, except on hugetlbfs.
fn huge_page_bytes(file: &File) -> u64 {
    let huge = rustix::fs::fstatfs(file).ok().filter(|stat| stat.f_type == libc::HUGETLBFS_MAGIC);
    huge.and_then(|stat| u64::try_from(stat.f_bsize).ok()).filter(|bytes| *bytes > 0).unwrap_or(1)
}

impl Area {
    /// A part of the mapping; `None` if it is out of range or not aligned to `align`.
    pub(crate) fn new(mapping: &Arc<Mapping>, start: u64, len: usize, align: usize) -> Option<Self> {
        let start = usize::try_from(start).ok()?;
        let end = start.checked_add(len)?;
        if end > mapping.len || !(mapping.region.as_ptr().addr() + mapping.lead + start).is_multiple_of(align)
        {
            return None;
        }
        Some(Self { mapping: Arc::clone(mapping), start, len })
    }

    /// The mapping that contains it.
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Position of the area in the mapped file.
    pub(crate) fn file_range(&self) -> FileRange {
        let start = self.mapping.start + self.mapping.lead + self.start;
        FileRange { file: self.mapping.file_id, start, end: start + self.len }
    }

    /// Address of an aligned value in it.
    fn pointer<T>(&self, offset: usize) -> *mut T {
        let len = size_of::<T>();
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {offset} of an area of {} bytes", self.len);
        let pointer = self.mapping.pointer(self.start + offset, len).cast::<T>();
        assert!(pointer.is_aligned(), "an unaligned value of {len} bytes");
        pointer
    }

    fn word_16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: `pointer` has checked that it is mapped, for as long as the borrow, and aligned; all accesses
        // of this process are atomic.
        unsafe { AtomicU16::from_ptr(self.pointer(offset)) }
    }

    fn word_64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `word_16`.
        unsafe { AtomicU64::from_ptr(self.pointer(offset)) }
    }

    /// 16 bytes, each read once.
    pub(crate) fn copy_16(&self, offset: usize) -> [u8; 16] {
        let bytes = self.pointer::<[u8; 16]>(offset);
        let words = bytes.cast::<u64>();
        if words.is_aligned() {
            // SAFETY: `pointer` has checked that 16 bytes are mapped there; volatile, as others write them.
            return zerocopy::transmute!(unsafe { [words.read_volatile(), words.add(1).read_volatile()] });
        }
        // SAFETY: as above; bytes have no alignment.
        unsafe { bytes.read_volatile() }
    }

    pub(crate) fn load_le16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.word_16(offset).load(order))
    }

    pub(crate) fn store_le16(&self, offset: usize, value: u16, order: Ordering) {
        self.word_16(offset).store(value.to_le(), order);
    }

    pub(crate) fn load_64(&self, offset: usize, order: Ordering) -> u64 {
        u64::from_le(self.word_64(offset).load(order))
    }

    pub(crate) fn store_64(&self, offset: usize, value: u64, order: Ordering) {
        self.word_64(offset).store(value.to_le(), order);
    }

    pub(crate) fn or_64(&self, offset: usize, bits: u64) {
        // Bit n of the log is bit n % 8 of byte n / 8: little-endian on any machine.
        self.word_64(offset).fetch_or(bits.to_le(), Ordering::AcqRel);
    }

    /// Loads two adjacent words of 32 bits, aligned to 4.
    pub(crate) fn load_used_elem(&self, offset: usize) -> [u32; 2] {
        let word = self.pointer::<[u32; 2]>(offset).cast::<u32>();
        // SAFETY: `pointer` has checked that both are mapped and aligned; volatile, as the guest may write them.
        unsafe { [word.read_volatile(), word.add(1).read_volatile()] }.map(u32::from_le)
    }

    /// Stores two adjacent words of 32 bits, aligned to 4.
    pub(crate) fn store_used_elem(&self, offset: usize, pair: [u32; 2]) {
        let word = self.pointer::<[u32; 2]>(offset).cast::<u32>();
        let [first, second] = pair.map(u32::to_le);
        // SAFETY: as in `load_used_elem`.
        unsafe {
            word.write_volatile(first);
            word.add(1).write_volatile(second);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use towline_channel::guard::faults;

    use super::*;

    fn mapped(bytes: u64) -> (File, Mapping) {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, bytes).unwrap();
        let mapping = Mapping::guarded(file.try_clone().unwrap().into(), 0, bytes).unwrap();
        (file, mapping)
    }

    #[test]
    fn a_truncated_file_reads_as_zeros_and_others_are_unchanged() {
        let before = faults();
        let ((cut, lost), (_whole, other)) = (mapped(1 << 16), mapped(1 << 16));
        let [lost, other] = [lost, other].map(Arc::new);
        let area = |mapping| Area::new(mapping, 0, 1 << 16, 8).unwrap();
        let areas = [area(&lost), area(&other)];
        areas.iter().for_each(|area| area.store_64(8192, 7, Ordering::Relaxed));
        ftruncate(&cut, 4096).unwrap();
        assert!(!lost.is_lost());
        assert_eq!(areas[0].load_64(8192, Ordering::Relaxed), 0);
        areas[0].store_64(8192, 9, Ordering::Relaxed);
        assert_eq!(areas[0].load_64(8192, Ordering::Relaxed), 9);
        assert!(lost.is_lost() && faults() > before);
        assert!(!other.is_lost());
        assert_eq!(areas[1].load_64(8192, Ordering::Relaxed), 7);
        drop((areas, lost));
        // The next guard reuses its entry.
        let (_file, next) = mapped(1 << 16);
        assert!(!next.is_lost());
    }

    #[test]
    fn missing_huge_pages_read_as_zeros() {
        let Ok(fd) = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
            println!("SKIPPED missing_huge_pages_read_as_zeros: no hugetlbfs in this kernel");
            return;
        };
        ftruncate(&fd, 2 << 20).unwrap();
        // Not a multiple of the page size: the kernel maps the whole page.
        let mapping = Arc::new(Mapping::guarded(fd, 0, 5000).unwrap());
        let area = Area::new(&mapping, 0, 4096, 8).unwrap();
        assert_eq!(area.load_64(8, Ordering::Relaxed), 0);
        let free = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap();
        assert_eq!(mapping.is_lost(), free.trim() == "0");
    }

    /// In a separate process, which must die of the signal.
    #[test]
    fn a_fault_in_unguarded_memory_ends_the_process() {
        const CHILD: &str = "TOWLINE_TEST_SIGBUS";
        if std::env::var_os(CHILD).is_some() {
            let (_file, _mapping) = mapped(4096);
            let file = File::from(memfd_create("other", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&file, 4096).unwrap();
            let part = FileOffset::new(file.try_clone().unwrap(), 0);
            let other = MmapRegion::<()>::from_file(part, 4096).unwrap();
            ftruncate(&file, 0).unwrap();
            // SAFETY: it is mapped; this very read ends the process.
            println!("read {}", unsafe { other.as_ptr().read_volatile() });
            return;
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = "sys::mapping::tests::a_fault_in_unguarded_memory_ends_the_process";
        let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    }
}
