//! Reading and writing the stream's primitives.
//!
//! A [`Reader`] fails in one way only, [`Incomplete`]: the bytes so far are a proper prefix. The decoder of
//! an item runs in `Reader::whole`, so an item is either consumed whole or not at all.

use alloc::string::String;
use alloc::vec::Vec;

use crate::Error;

/// The input ends inside an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incomplete;

/// Reason why an item was not decoded.
#[derive(Debug)]
pub(crate) enum Stop {
    /// More bytes are needed.
    Incomplete,
    /// It is refused.
    Refused(Error),
}

impl From<Incomplete> for Stop {
    fn from(_: Incomplete) -> Self {
        Self::Incomplete
    }
}

impl<E: Into<Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// A cursor over received bytes.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    /// Starts at the first of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Number of bytes that were consumed.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Seeks to a position that [`Self::position`] returned.
    pub fn rewind(&mut self, position: usize) {
        self.position = position.min(self.bytes.len());
    }

    /// Decodes an item. `None`, and nothing consumed: more bytes are needed.
    pub(crate) fn whole<T>(
        &mut self,
        decode: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<Option<T>, Error> {
        let start = self.position;
        match decode(self) {
            Ok(item) => Ok(Some(item)),
            Err(Stop::Incomplete) => {
                self.rewind(start);
                Ok(None)
            }
            Err(Stop::Refused(error)) => Err(error),
        }
    }

    /// The remaining bytes.
    pub fn rest(&self) -> &'a [u8] {
        &self.bytes[self.position..]
    }

    /// The next `n` bytes.
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Incomplete> {
        let taken = self.rest().get(..n).ok_or(Incomplete)?;
        self.position += n;
        Ok(taken)
    }

    /// The next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Incomplete> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// One byte.
    pub fn u8(&mut self) -> Result<u8, Incomplete> {
        Ok(self.array::<1>()?[0])
    }

    /// A big-endian 16-bit integer.
    pub fn be16(&mut self) -> Result<u16, Incomplete> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    /// A big-endian 32-bit integer.
    pub fn be32(&mut self) -> Result<u32, Incomplete> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    /// A big-endian 64-bit integer.
    pub fn be64(&mut self) -> Result<u64, Incomplete> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A counted string's bytes.
    pub fn counted(&mut self) -> Result<&'a [u8], Incomplete> {
        let length = self.u8()?;
        self.take(usize::from(length))
    }
}

/// Appends a counted string.
///
/// # Panics
/// If it is longer than 255 bytes: names come from a block list or a machine, whose lengths were checked when
/// they were read.
pub fn put_counted(out: &mut Vec<u8>, text: &[u8]) {
    out.push(u8::try_from(text.len()).expect("a counted string has 255 bytes at most"));
    out.extend_from_slice(text);
}

/// Appends a big-endian integer.
pub(crate) fn put16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// Appends a big-endian integer.
pub(crate) fn put32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// Appends a big-endian integer.
pub(crate) fn put64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// Names are ASCII in practice; other bytes are shown, not refused, because it is only used in messages.
pub(crate) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
