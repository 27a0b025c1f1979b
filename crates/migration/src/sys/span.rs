//! Guest memory that is mapped, which others may write at any time.
//!
//! No reference to its bytes is ever made: they are named to the kernel ([`IoBuf`], [`IoBufMut`]), read with
//! volatile loads or copied word by word with relaxed atomic accesses. A copy of memory that is being written
//! is a mixture.

use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::io::retry_on_intr;
use rustix::mm::{Advice, madvise};
use towline_channel::{IoBuf, IoBufMut};

use super::zero;

pub(super) const PAGE_BYTES: usize = 4096;
const WORD_BYTES: usize = 8;

/// A range of this process's memory that stays mapped for `'a`: a guest's RAM block, or a part of one.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    start: NonNull<u8>,
    length: usize,
    memory: PhantomData<&'a AtomicU8>,
}

// SAFETY: an address and a length; all access is by system calls, volatile or atomic, under `from_raw_parts`'
// promise.
unsafe impl Send for Span<'_> {}
// SAFETY: as above.
unsafe impl Sync for Span<'_> {}

impl<'a> Span<'a> {
    /// The `length` bytes from `start` on.
    ///
    /// # Safety
    /// For all of `'a` they are mapped readable and writable in this process and, if they are a file's,
    /// within the file. No Rust reference to them is used during that time, except to atomics. Anything may
    /// write them: vCPUs, other threads through raw pointers or atomics, the kernel, other processes.
    pub unsafe fn from_raw_parts(start: NonNull<u8>, length: usize) -> Self {
        Self { start, length, memory: PhantomData }
    }

    /// Where it begins in this process.
    pub fn address(&self) -> usize {
        self.start.addr().get()
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes to be sent.
    ///
    /// # Panics
    /// If they are not within the span.
    pub fn io_buf(&self, offset: usize, length: usize) -> IoBuf<'a> {
        let start = self.at(offset, length);
        // SAFETY: `at` has checked that the range lies in the span, which is mapped for `'a`.
        unsafe { IoBuf::from_raw_parts(start, length) }
    }

    /// Room for bytes to receive.
    pub(crate) fn io_buf_mut(&self, offset: usize, length: usize) -> IoBufMut<'a> {
        let start = self.at(offset, length);
        // SAFETY: `at` has checked that the range lies in the span, which is mapped for `'a`; no reference to
        // its bytes is ever made.
        unsafe { IoBufMut::from_raw_parts(start, length) }
    }

    /// Returns true if these whole pages are zero now.
    ///
    /// # Panics
    /// If they are not whole pages, or not within the span.
    pub fn is_zero(&self, offset: usize, length: usize) -> bool {
        assert!(
            (offset | length | self.address()).is_multiple_of(PAGE_BYTES),
            "{length} bytes at {offset:#x} are not whole pages"
        );
        let start = self.at(offset, length);
        // SAFETY: `at` has checked the range; the address (asserted) and both numbers are multiples of the
        // page size.
        unsafe { zero::is_zero(start, length) }
    }

    /// An aligned word of it, as a guest's counter is.
    ///
    /// # Panics
    /// If it is not within the span, or not aligned.
    pub fn word(&self, offset: usize) -> &'a AtomicU64 {
        let start = self.at(offset, WORD_BYTES);
        assert!(start.addr().is_multiple_of(WORD_BYTES), "{offset:#x} is not a multiple of {WORD_BYTES}");
        word_at(start, 0, 0)
    }

    /// Copies memory out, word by word; a concurrent write may be there in part.
    ///
    /// # Panics
    /// If it is not within the span.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let start = self.at(offset, bytes.len());
        let (head, words, tail) = split(start, bytes.len());
        for (index, byte) in bytes.iter_mut().enumerate().take(head) {
            *byte = byte_at(start, index).load(Ordering::Relaxed);
        }
        for (index, chunk) in bytes[head..head + words].chunks_exact_mut(WORD_BYTES).enumerate() {
            chunk.copy_from_slice(&word_at(start, head, index).load(Ordering::Relaxed).to_ne_bytes());
        }
        for (index, byte) in bytes.iter_mut().enumerate().skip(tail) {
            *byte = byte_at(start, index).load(Ordering::Relaxed);
        }
    }

    /// Copies memory in, word by word.
    ///
    /// # Panics
    /// If it is not within the span.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let start = self.at(offset, bytes.len());
        let (head, words, tail) = split(start, bytes.len());
        for (index, &byte) in bytes.iter().enumerate().take(head) {
            byte_at(start, index).store(byte, Ordering::Relaxed);
        }
        for (index, chunk) in bytes[head..head + words].chunks_exact(WORD_BYTES).enumerate() {
            let word = u64::from_ne_bytes(chunk.try_into().expect("chunks are of a word's length"));
            word_at(start, head, index).store(word, Ordering::Relaxed);
        }
        for (index, &byte) in bytes.iter().enumerate().skip(tail) {
            byte_at(start, index).store(byte, Ordering::Relaxed);
        }
    }

    /// Advises huge pages. The kernel decides when the memory is touched.
    ///
    /// # Errors
    /// The kernel has none, or not for this memory.
    pub fn advise_huge(&self) -> io::Result<()> {
        self.advise(0, self.length, Advice::LinuxHugepage)
    }

    /// Lets the kernel allocate the pages of this range, as a write would, in one call.
    pub(crate) fn populate(&self, offset: usize, length: usize) -> io::Result<()> {
        self.advise(offset, length, Advice::LinuxPopulateWrite)
    }

    /// Discards the pages of this range. No references to them exist.
    pub(crate) fn discard(&self, offset: usize, length: usize) {
        // A kernel that refuses keeps the memory a little longer.
        let _ = self.advise(offset, length, Advice::LinuxDontNeed);
    }

    /// Writes a byte of each page back unchanged.
    pub(crate) fn touch(&self, offset: usize, length: usize) {
        let start = self.at(offset, length);
        for page in (0..length).step_by(PAGE_BYTES) {
            byte_at(start, page).fetch_or(0, Ordering::Relaxed);
        }
    }

    fn advise(&self, offset: usize, length: usize, advice: Advice) -> io::Result<()> {
        let start = self.at(offset, length);
        // SAFETY: the range is within the span (`at`). No advice removes the mapping; one of them changes
        // the content, which is permitted at any time: all access through Rust is atomic or volatile.
        Ok(retry_on_intr(|| unsafe { madvise(start.cast(), length, advice) })?)
    }

    /// The address of a range.
    ///
    /// # Panics
    /// If it is not within the span. Offsets from a peer are checked against the block list before.
    pub(super) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        let end = offset.checked_add(length);
        assert!(
            end.is_some_and(|end| end <= self.length),
            "{length} bytes at {offset:#x} of {:#x}",
            self.length
        );
        // SAFETY: within the span, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

/// Of `length` bytes from `start` on: bytes before the first whole word, bytes of whole words, and where they
/// end.
fn split(start: *mut u8, length: usize) -> (usize, usize, usize) {
    let head = (start.addr().wrapping_neg() % WORD_BYTES).min(length);
    let words = (length - head) / WORD_BYTES * WORD_BYTES;
    (head, words, head + words)
}

/// A byte of the range that `Span::at` gave; callers stay below its length.
fn byte_at<'a>(start: *mut u8, index: usize) -> &'a AtomicU8 {
    // SAFETY: within the range that was checked, aligned as every byte is; all access through Rust is atomic.
    unsafe { AtomicU8::from_ptr(start.add(index)) }
}

/// A word after the first `head` bytes of the range that `Span::at` gave; callers stay below its length.
fn word_at<'a>(start: *mut u8, head: usize, index: usize) -> &'a AtomicU64 {
    // SAFETY: within the range that was checked; `split` has made `head` end at a multiple of a word. All
    // access through Rust is atomic.
    unsafe { AtomicU64::from_ptr(start.add(head + index * WORD_BYTES).cast()) }
}
