//! Packets of a framed stream: how they are encoded and decoded.

use std::fmt::Debug;
use std::ops::Range;

use crate::{Error, IoBufMut, IoCursor, Result};

/// Makes packets.
pub(crate) trait Pack: Debug + Send {
    /// Encodes control packets that must precede further data, if any; returns their range in `room`.
    ///
    /// # Errors
    /// The packet cannot be made, so nothing more can be sent.
    fn due(&mut self, room: &mut [u8], peer: &str) -> Result<Option<Range<usize>>>;

    /// Fills `room` with packets of data; returns their range. At least one byte is consumed.
    fn pack(&mut self, data: &mut IoCursor<'_, '_>, room: &mut [u8]) -> Range<usize>;

    /// The packet that ends the stream.
    fn end(&mut self, room: &mut [u8]) -> Range<usize>;
}

/// Takes packets apart.
#[expect(unused_variables, reason = "defaults need none of their arguments")]
pub(crate) trait Unpack: Debug + Send {
    /// Maximum number of bytes that must be received before a packet, or its next piece, can be decoded.
    const PACKET_BYTES_MAX: usize;

    /// Decodes the first packet received, or a piece of one.
    ///
    /// # Errors
    /// The error; the stream ends there.
    fn unpack(&mut self, bytes: &mut [u8], peer: &str) -> Result<Unpacked>;

    /// Decodes the first packet received straight into `room`, if it is whole and has data for which there is
    /// room; `None`: use [`Self::unpack`]. In any case the room may be overwritten.
    ///
    /// # Errors
    /// As [`Self::unpack`].
    fn unpack_into(
        &mut self,
        bytes: &[u8],
        room: &mut [IoBufMut<'_>],
        peer: &str,
    ) -> Result<Option<UnpackedInto>> {
        Ok(None)
    }

    /// The same error again, for later calls.
    fn fault(peer: &str, why: String) -> Error;
}

/// The decoded packet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unpacked {
    /// Not enough yet.
    Incomplete,
    /// A packet without data, of this length.
    Idle(usize),
    /// Data in this range, and the number of bytes consumed.
    Data(Range<usize>, usize),
    /// The peer ends the stream.
    End,
}

/// A packet whose data are at their destination.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnpackedInto {
    /// Length of its data.
    pub(crate) data: usize,
    /// Number of bytes consumed.
    pub(crate) taken: usize,
}
