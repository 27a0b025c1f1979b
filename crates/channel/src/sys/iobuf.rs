//! Buffers that the kernel reads and writes and that never become slices.
//!
//! Live guest memory changes while we hold it, so a `&[u8]` over it would be a lie to the compiler. [`IoBuf`]
//! and [`IoBufMut`] carry an address and a length to a system call and have no way back to a slice. They have
//! the layout of `struct iovec`, so an array of them goes to the kernel unchanged.
//!
//! They do not own the memory: the constructor's caller guarantees, by a lifetime or by `unsafe`, that it
//! stays mapped.

use std::marker::PhantomData;

/// Bytes to send. A copy refers to the same bytes.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoBuf<'a> {
    iov: libc::iovec,
    memory: PhantomData<&'a [u8]>,
}

/// Room for bytes to receive.
#[repr(transparent)]
pub struct IoBufMut<'a> {
    iov: libc::iovec,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: an address and a length; they are used only by system calls and by the copies below, under the
// promise of `from_raw_parts` (or of the borrowed slice, which is `Sync`) that the memory is valid for the
// lifetime.
unsafe impl Send for IoBuf<'_> {}
// SAFETY: as above; nothing changes through a shared reference.
unsafe impl Sync for IoBuf<'_> {}
// SAFETY: as above; `&mut [u8]` is `Send`.
unsafe impl Send for IoBufMut<'_> {}
// SAFETY: as above; a shared reference gives only the length.
unsafe impl Sync for IoBufMut<'_> {}

impl<'a> IoBuf<'a> {
    /// A buffer over memory that need not be Rust's, such as a guest's.
    ///
    /// # Safety
    /// `start .. start + len` is mapped and readable for all of `'a`, and `len` is at most `isize::MAX`. It
    /// may be changed at any time by other processes, the kernel or atomic and volatile writes; any mixture
    /// may be sent then.
    pub unsafe fn from_raw_parts(start: *const u8, len: usize) -> Self {
        Self { iov: libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len }, memory: PhantomData }
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.iov.iov_len
    }

    /// Returns true if its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `len` bytes of it, or all if it has fewer.
    pub fn prefix(self, len: usize) -> Self {
        Self { iov: libc::iovec { iov_len: len.min(self.len()), ..self.iov }, ..self }
    }

    /// All but the first `len` bytes of it; nothing if it has fewer.
    pub fn skip(self, len: usize) -> Self {
        Self { iov: skip(self.iov, len), ..self }
    }

    pub(super) fn iov(&self) -> libc::iovec {
        self.iov
    }
}

impl<'a> IoBufMut<'a> {
    /// Room in memory that need not be Rust's, such as a guest's.
    ///
    /// # Safety
    /// `start .. start + len` is mapped and writable for all of `'a`, and `len` is at most `isize::MAX`. No
    /// Rust reference to these bytes is used while this lives; a guest or another process may use them.
    pub unsafe fn from_raw_parts(start: *mut u8, len: usize) -> Self {
        Self { iov: libc::iovec { iov_base: start.cast(), iov_len: len }, memory: PhantomData }
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.iov.iov_len
    }

    /// Returns true if its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Room for the first `len` bytes of it, or all if it has fewer; borrows the whole.
    pub fn prefix(&mut self, len: usize) -> IoBufMut<'_> {
        IoBufMut { iov: libc::iovec { iov_len: len.min(self.len()), ..self.iov }, memory: PhantomData }
    }

    /// Room for the first `len` bytes of it, or all if it has fewer.
    pub fn into_prefix(self, len: usize) -> Self {
        Self { iov: libc::iovec { iov_len: len.min(self.len()), ..self.iov }, ..self }
    }

    /// All but the first `len` bytes of it; nothing if it has fewer.
    pub fn skip(self, len: usize) -> Self {
        Self { iov: skip(self.iov, len), ..self }
    }

    /// The same memory as bytes to send.
    pub fn as_io_buf(&self) -> IoBuf<'_> {
        IoBuf { iov: self.iov, memory: PhantomData }
    }

    pub(super) fn iov(&self) -> libc::iovec {
        self.iov
    }

    /// Narrows the buffer to its end, for a cursor that puts the whole back with [`Self::restore`].
    pub(super) fn narrow(&mut self, len: usize) {
        self.iov = skip(self.iov, len);
    }

    /// Restores the [`Self::iov`] of before [`Self::narrow`].
    pub(super) fn restore(&mut self, whole: libc::iovec) {
        self.iov = whole;
    }
}

impl<'a> From<&'a [u8]> for IoBuf<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is readable for its lifetime and never longer than `isize::MAX`.
        unsafe { Self::from_raw_parts(bytes.as_ptr(), bytes.len()) }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for IoBuf<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self::from(bytes.as_slice())
    }
}

impl<'a> From<&'a mut [u8]> for IoBufMut<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        // SAFETY: a mutable slice is ours alone for its lifetime and never longer than `isize::MAX`.
        unsafe { Self::from_raw_parts(bytes.as_mut_ptr(), bytes.len()) }
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for IoBufMut<'a> {
    fn from(bytes: &'a mut [u8; N]) -> Self {
        Self::from(bytes.as_mut_slice())
    }
}

impl std::fmt::Debug for IoBuf<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBuf({} bytes at {:p})", self.len(), self.iov.iov_base)
    }
}

impl std::fmt::Debug for IoBufMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBufMut({} bytes at {:p})", self.len(), self.iov.iov_base)
    }
}

/// Copies a prefix of the buffers into `bytes` and returns how many were copied. For channels that copy
/// anyway (memory, ciphers); never for a page on its way into a socket or a file.
pub fn gather(bufs: &[IoBuf<'_>], bytes: &mut [u8]) -> usize {
    let mut done = 0;
    for buf in bufs {
        let n = buf.len().min(bytes.len() - done);
        // SAFETY: `n` bytes are readable in `buf` (its maker's promise) and writable from `done` on in
        // `bytes`. The two do not overlap: `bytes` is a mutable reference, so no other live buffer of the
        // caller covers it.
        unsafe {
            std::ptr::copy_nonoverlapping(buf.iov.iov_base.cast::<u8>(), bytes[done..].as_mut_ptr(), n);
        }
        done += n;
    }
    done
}

/// Copies a prefix of `bytes` into the buffers and returns how many were copied. See [`gather`].
pub fn scatter(bytes: &[u8], bufs: &mut [IoBufMut<'_>]) -> usize {
    let mut done = 0;
    for buf in bufs {
        let n = buf.len().min(bytes.len() - done);
        // SAFETY: `n` bytes are readable from `done` on in `bytes` and writable in `buf` (its maker's
        // promise), whose memory no other reference of the caller, `bytes` among them, may cover.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes[done..].as_ptr(), buf.iov.iov_base.cast::<u8>(), n);
        }
        done += n;
    }
    done
}

/// Room for headers with gaps between them: after each header, `gap` takes what follows it. All gaps are the
/// same memory, so what lies there afterwards is unusable.
pub fn with_gaps<'a, const N: usize>(headers: &'a mut [[u8; N]], gap: &'a mut [u8]) -> Vec<IoBufMut<'a>> {
    let (start, len) = (gap.as_mut_ptr(), gap.len());
    let mut bufs = Vec::with_capacity(2 * headers.len());
    for header in headers {
        bufs.push(IoBufMut::from(&mut header[..]));
        // SAFETY: `gap` is writable and borrowed for `'a`. Several buffers of one call over the same bytes
        // are written by the kernel one after another, or by `scatter` through pointers; no reference to them
        // exists during the call.
        bufs.push(unsafe { IoBufMut::from_raw_parts(start, len) });
    }
    bufs
}

/// The first `len` bytes of the buffers.
pub(crate) fn limit<'a>(bufs: &[IoBuf<'a>], len: usize) -> Vec<IoBuf<'a>> {
    let mut left = len;
    bufs.iter().map_while(|buf| take(&mut left, buf.len()).map(|share| buf.prefix(share))).collect()
}

/// Room for the first `len` bytes in the buffers.
pub(crate) fn limit_mut<'a>(bufs: &'a mut [IoBufMut<'_>], len: usize) -> Vec<IoBufMut<'a>> {
    let mut left = len;
    bufs.iter_mut().map_while(|buf| take(&mut left, buf.len()).map(|share| buf.prefix(share))).collect()
}

/// Takes a buffer's share of the remaining length. `None`: nothing remains.
fn take(left: &mut usize, len: usize) -> Option<usize> {
    let share = (*left > 0).then(|| len.min(*left))?;
    *left -= share;
    Some(share)
}

/// The length in bytes of all the buffers together.
pub fn total_len(bufs: &[IoBuf<'_>]) -> usize {
    bufs.iter().fold(0, |sum, buf| sum.saturating_add(buf.len()))
}

/// The length in bytes of all the room together.
pub fn total_len_mut(bufs: &[IoBufMut<'_>]) -> usize {
    bufs.iter().fold(0, |sum, buf| sum.saturating_add(buf.len()))
}

fn skip(iov: libc::iovec, len: usize) -> libc::iovec {
    let len = len.min(iov.iov_len);
    libc::iovec { iov_base: iov.iov_base.wrapping_byte_add(len), iov_len: iov.iov_len - len }
}

// The kernel gets arrays of these as arrays of `struct iovec`.
const _: () = assert!(size_of::<IoBuf<'_>>() == size_of::<libc::iovec>());
const _: () = assert!(size_of::<IoBufMut<'_>>() == size_of::<libc::iovec>());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_and_skip_stay_inside() {
        let buf = IoBuf::from(b"abcdef");
        let mut out = [0; 8];
        assert_eq!((buf.prefix(9).len(), buf.skip(9).len()), (6, 0));
        assert_eq!(gather(&[buf.skip(4), buf.prefix(2)], &mut out), 4);
        assert_eq!(&out[..4], b"efab");
    }

    #[test]
    fn scatter_fills_in_order_and_stops_at_the_end() {
        let (mut a, mut b, mut c) = ([0; 2], [0; 0], [0; 4]);
        let mut bufs = [IoBufMut::from(&mut a), IoBufMut::from(&mut b), IoBufMut::from(&mut c)];
        assert_eq!(total_len_mut(&bufs), 6);
        assert_eq!(scatter(b"xyz", &mut bufs), 3);
        assert_eq!((&a, &c), (b"xy", b"z\0\0\0"));
    }

    #[test]
    fn gaps_take_what_is_between_headers() {
        let (mut headers, mut gap) = ([[0; 2]; 3], [0; 3]);
        assert_eq!(scatter(b"abCDEfgHIJkl", &mut with_gaps(&mut headers, &mut gap)), 12);
        assert_eq!((headers, gap), ([*b"ab", *b"fg", *b"kl"], *b"HIJ"));
    }

    #[test]
    fn gather_stops_where_there_is_no_room() {
        let mut out = [0; 3];
        assert_eq!(gather(&[IoBuf::from(b"ab"), IoBuf::from(b"cd")], &mut out), 3);
        assert_eq!(&out, b"abc");
    }
}
