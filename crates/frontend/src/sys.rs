//! Shared memory that a backend reads and writes at any time: touched by atomics and by raw copies, never by
//! references.

use std::io::IoSlice;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use memmap2::MmapRaw;

/// A shared mapping, by offsets.
#[derive(Debug)]
pub(crate) struct Shared(MmapRaw);

impl Shared {
    pub(crate) fn new(map: MmapRaw) -> Self {
        Self(map)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn pointer(&self, offset: usize, len: usize) -> *mut u8 {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.0.len());
        assert!(fits, "{len} bytes at {offset:#x} of a memory of {:#x}", self.0.len());
        // SAFETY: it was compared with the mapping's length just now.
        unsafe { self.0.as_mut_ptr().add(offset) }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.pointer(offset, bytes.len());
        // SAFETY: `pointer` has checked the room, `bytes` is another object, and no reference into the
        // mapping is ever made.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.pointer(offset, bytes.len());
        // SAFETY: as in `write`, in the other direction. A concurrent change by another process is read as
        // any mixture.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Hands parts, by offset and length, to a system call that reads them.
    pub(crate) fn send<T>(&self, parts: &[(usize, usize)], call: impl FnOnce(&[IoSlice<'_>]) -> T) -> T {
        let slice = |&(offset, len): &(usize, usize)| {
            let from = self.pointer(offset, len);
            // SAFETY: it is mapped for as long as `self` lives. Only buffers that the driver owns and the
            // device does not are passed (`net::DriverPair`), and only to the kernel, so they are not written
            // during the call.
            IoSlice::new(unsafe { std::slice::from_raw_parts(from, len) })
        };
        let slices: Vec<_> = parts.iter().map(slice).collect();
        call(&slices)
    }

    /// Hands the room to a system call that fills it.
    pub(crate) fn receive(
        &self,
        offset: usize,
        len: usize,
        call: impl FnOnce(&mut [u8]) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        let to = self.pointer(offset, len);
        // SAFETY: as in `send`; a buffer that the device does not have is used by this thread alone.
        call(unsafe { std::slice::from_raw_parts_mut(to, len) })
    }

    fn word_16(&self, offset: usize) -> &AtomicU16 {
        let pointer = self.pointer(offset, 2).cast::<u16>();
        assert!(pointer.is_aligned(), "a word at the odd offset {offset:#x}");
        // SAFETY: two mapped bytes, aligned, for as long as the borrow; shared words go through atomics only.
        unsafe { AtomicU16::from_ptr(pointer) }
    }

    pub(crate) fn load_le16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.word_16(offset).load(order))
    }

    pub(crate) fn store_le16(&self, offset: usize, value: u16, order: Ordering) {
        self.word_16(offset).store(value.to_le(), order);
    }

    /// Takes eight bytes and leaves zeros: how a log is read.
    pub(crate) fn take_64(&self, offset: usize) -> u64 {
        let pointer = self.pointer(offset, 8).cast::<u64>();
        assert!(pointer.is_aligned(), "a word at the odd offset {offset:#x}");
        // SAFETY: eight mapped bytes, aligned, for as long as the borrow.
        u64::from_le(unsafe { AtomicU64::from_ptr(pointer) }.swap(0, Ordering::AcqRel))
    }
}
