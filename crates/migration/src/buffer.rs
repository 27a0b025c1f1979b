//! The buffer that a lane receives pages into.

use towline_channel::IoBufMut;

use crate::Result;
use crate::sys::Mapping;

/// Page-aligned memory of its own, so that pages can go from it to a file without the page cache (`O_DIRECT`).
#[derive(Debug)]
pub(crate) struct Buffer {
    mapping: Mapping,
}

impl Buffer {
    /// `length` bytes, a multiple of the page size.
    pub(crate) fn new(length: usize) -> Result<Self> {
        let mapping = Mapping::anonymous(length).map_err(crate::Error::guest)?;
        Ok(Self { mapping })
    }

    /// The first `length` bytes, to be received into.
    pub(crate) fn receive(&mut self, length: usize) -> IoBufMut<'_> {
        IoBufMut::from(&mut self.mapping.as_mut_slice()[..length])
    }

    /// The first `length` bytes, to be written.
    pub(crate) fn bytes_mut(&mut self, length: usize) -> &mut [u8] {
        &mut self.mapping.as_mut_slice()[..length]
    }

    /// The first `length` bytes.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        &self.mapping.as_slice()[..length]
    }
}
