//! A cursor in an array of buffers.
//!
//! A transfer may stop anywhere, also inside a buffer; the next must begin there. The array stays its
//! owner's:
//!
//! ```text
//!   bufs  [ done ][ done ][ do|ne to do ][ to do ][ to do ] ...
//!                           ^ skip
//!   IoCursor     chunk = a short copy of the next elements, the first one narrowed (16 bytes each);
//!                        the array itself once the cursor stands between two buffers
//!   IoCursorMut  chunk = the array itself; its element is narrowed in place and whole again afterwards
//! ```
//!
//! Limits: a chunk has at most [`IOV_MAX`] elements, as the kernel takes no more. Empty buffers at its head
//! are left out, so a chunk of a cursor that is not empty holds at least one byte (a receive of 0 then means
//! the end).

use super::iobuf::{IoBuf, IoBufMut, total_len, total_len_mut};

/// Maximum number of buffers of one system call (`UIO_MAXIOV`).
pub const IOV_MAX: usize = libc::UIO_MAXIOV as usize;

/// Number of elements copied after a transfer that stopped inside a buffer: enough to make the next call
/// worth its cost.
const BRIDGE: usize = 64;

/// The bytes of an array of [`IoBuf`] that are still to be sent.
#[derive(Debug)]
pub struct IoCursor<'s, 'a> {
    /// The unsent buffers, from the one that contains the cursor.
    bufs: &'s [IoBuf<'a>],
    /// Number of bytes of the first one that are sent.
    skip: usize,
    /// Bytes not sent.
    remaining: usize,
    bridge: [IoBuf<'a>; BRIDGE],
}

impl<'s, 'a> IoCursor<'s, 'a> {
    /// Stands before the first byte.
    pub fn new(bufs: &'s [IoBuf<'a>]) -> Self {
        let bridge = [IoBuf::from(&[]); BRIDGE];
        let mut cursor = Self { bufs, skip: 0, remaining: total_len(bufs), bridge };
        cursor.advance(0);
        cursor
    }

    /// Bytes still to be sent.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Returns true if all is sent.
    pub fn is_empty(&self) -> bool {
        self.remaining == 0
    }

    /// The rest of the buffer at the cursor; `None` if all is sent.
    #[cfg(feature = "tls")]
    pub(crate) fn first(&self) -> Option<IoBuf<'a>> {
        self.bufs.first().map(|buf| buf.skip(self.skip))
    }

    /// The next buffers, for one call.
    pub fn chunk(&mut self) -> &[IoBuf<'a>] {
        self.chunk_and_last().0
    }

    /// The next buffers, and true if they are the last.
    pub fn chunk_and_last(&mut self) -> (&[IoBuf<'a>], bool) {
        if self.skip == 0 {
            let n = self.bufs.len().min(IOV_MAX);
            return (&self.bufs[..n], n == self.bufs.len());
        }
        let n = self.bufs.len().min(BRIDGE);
        self.bridge[..n].copy_from_slice(&self.bufs[..n]);
        self.bridge[0] = self.bridge[0].skip(self.skip);
        (&self.bridge[..n], n == self.bufs.len())
    }

    /// Moves over `n` bytes that were sent.
    ///
    /// # Panics
    /// If fewer are left.
    pub fn advance(&mut self, n: usize) {
        self.remaining = self.remaining.checked_sub(n).expect("a call transfers no more than it was given");
        self.skip += n;
        while let Some(first) = self.bufs.first()
            && self.skip >= first.len()
        {
            self.skip -= first.len();
            self.bufs = &self.bufs[1..];
        }
    }
}

/// The unfilled room in an array of [`IoBufMut`]. Dropping this restores the array.
#[derive(Debug)]
pub struct IoCursorMut<'s, 'a> {
    bufs: &'s mut [IoBufMut<'a>],
    /// The buffer the cursor stands in.
    first: usize,
    /// The whole buffer at the cursor, if it is narrowed.
    whole: Option<libc::iovec>,
    /// Bytes not filled.
    remaining: usize,
}

impl<'s, 'a> IoCursorMut<'s, 'a> {
    /// Stands before the first byte.
    pub fn new(bufs: &'s mut [IoBufMut<'a>]) -> Self {
        let remaining = total_len_mut(bufs);
        let mut cursor = Self { bufs, first: 0, whole: None, remaining };
        cursor.advance(0);
        cursor
    }

    /// Bytes still to be filled.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Returns true if all is filled.
    pub fn is_empty(&self) -> bool {
        self.remaining == 0
    }

    /// The next room, for one call.
    pub fn chunk(&mut self) -> &mut [IoBufMut<'a>] {
        let end = self.bufs.len().min(self.first + IOV_MAX);
        &mut self.bufs[self.first..end]
    }

    /// Moves over `n` bytes that were filled.
    ///
    /// # Panics
    /// If fewer are left.
    pub fn advance(&mut self, n: usize) {
        self.remaining = self.remaining.checked_sub(n).expect("a call transfers no more than it was given");
        let mut n = n;
        while let Some(buf) = self.bufs.get_mut(self.first) {
            if n < buf.len() {
                if n > 0 {
                    self.whole.get_or_insert(buf.iov());
                    buf.narrow(n);
                }
                return;
            }
            n -= buf.len();
            self.restore();
            self.first += 1;
        }
    }

    fn restore(&mut self) {
        if let Some(whole) = self.whole.take() {
            self.bufs[self.first].restore(whole);
        }
    }
}

impl Drop for IoCursorMut<'_, '_> {
    fn drop(&mut self) {
        self.restore();
    }
}

/// The buffers of one call: no empty buffers at the head, at most [`IOV_MAX`]. `None`: there is nothing to
/// transfer.
pub(super) fn window<'s, 'a>(bufs: &'s [IoBuf<'a>]) -> Option<&'s [IoBuf<'a>]> {
    let start = bufs.iter().position(|buf| !buf.is_empty())?;
    Some(&bufs[start..bufs.len().min(start + IOV_MAX)])
}

/// As [`window`], to receive.
pub(super) fn window_mut<'s, 'a>(bufs: &'s mut [IoBufMut<'a>]) -> Option<&'s mut [IoBufMut<'a>]> {
    let start = bufs.iter().position(|buf| !buf.is_empty())?;
    let end = bufs.len().min(start + IOV_MAX);
    Some(&mut bufs[start..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::iobuf::{gather, scatter};
    use proptest::prelude::*;

    /// Lengths of buffers, and sizes of steps that are cut to what is possible.
    fn shapes() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
        (prop::collection::vec(0..9usize, 0..200), prop::collection::vec(1..300usize, 1..50))
    }

    fn split<'d>(data: &'d [u8], lengths: &[usize]) -> Vec<IoBuf<'d>> {
        let mut rest = data;
        lengths.iter().map(|n| IoBuf::from(rest.split_off(..*n).expect("as long as its parts"))).collect()
    }

    proptest! {
        #[test]
        fn sending_in_steps_gives_every_byte_once((lengths, steps) in shapes()) {
            let data: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|i| i as u8).collect();
            let bufs = split(&data, &lengths);
            let mut cursor = IoCursor::new(&bufs);
            let (mut seen, mut steps) = (Vec::new(), steps.iter().cycle());
            while !cursor.is_empty() {
                let mut out = vec![0; *steps.next().expect("endless")];
                let n = gather(cursor.chunk(), &mut out);
                prop_assert!(n > 0);
                seen.extend_from_slice(&out[..n]);
                cursor.advance(n);
                prop_assert_eq!(cursor.remaining(), data.len() - seen.len());
            }
            prop_assert_eq!(seen, data);
        }

        #[test]
        fn receiving_in_steps_fills_every_byte_and_restores_the_array((lengths, steps) in shapes()) {
            let data: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|i| i as u8).collect();
            let mut memory = vec![0; data.len()];
            let mut rest = memory.as_mut_slice();
            let mut bufs: Vec<IoBufMut<'_>> = lengths
                .iter()
                .map(|n| IoBufMut::from(rest.split_off_mut(..*n).expect("as long as its parts")))
                .collect();
            let (mut done, mut steps) = (0, steps.iter().cycle());
            let mut cursor = IoCursorMut::new(&mut bufs);
            while !cursor.is_empty() {
                let end = data.len().min(done + steps.next().expect("endless"));
                let n = scatter(&data[done..end], cursor.chunk());
                prop_assert!(n > 0);
                done += n;
                cursor.advance(n);
            }
            drop(cursor);
            prop_assert_eq!(bufs.iter().map(IoBufMut::len).collect::<Vec<_>>(), lengths);
            drop(bufs);
            prop_assert_eq!(memory, data);
        }
    }

    #[test]
    fn an_abandoned_cursor_restores_the_buffer_it_stood_in() {
        let mut memory = [0; 8];
        let mut bufs = [IoBufMut::from(&mut memory)];
        let mut cursor = IoCursorMut::new(&mut bufs);
        cursor.advance(3);
        assert_eq!(cursor.chunk()[0].len(), 5);
        drop(cursor);
        assert_eq!(bufs[0].len(), 8);
    }

    #[test]
    fn a_chunk_is_one_call_s_worth() {
        let bufs = vec![IoBuf::from(b"x"); IOV_MAX + 1];
        let mut cursor = IoCursor::new(&bufs);
        assert_eq!(cursor.chunk_and_last().0.len(), IOV_MAX);
        cursor.advance(IOV_MAX);
        let (chunk, last) = cursor.chunk_and_last();
        assert_eq!((chunk.len(), last), (1, true));
    }
}
