//! Comparing packets with their checksums, on receipt.

use std::sync::atomic::Ordering;

use towline_channel::{Channel, ChannelExt, IoBuf, IoBufMut};
use towline_protocol::InvalidMessage;
use towline_protocol::multifd::{Checksum, Damage, HEADER_BYTES, Packet, Sums};

use super::shared::Shared;
use crate::checksum;
use crate::statistics::Statistics;
use crate::{Error, Result};

/// Bytes that are received and then hashed, while they are in the processor's cache.
const HASHED_PART_BYTES: usize = 64 << 10;

/// The checksum of a packet, and the hash of its header as received.
#[derive(Clone, Copy)]
pub(super) struct HeaderChecksum {
    header: u64,
    pub(super) checksum: Option<Checksum>,
}

/// Receives and compares the packets of one lane.
#[derive(Clone, Copy)]
pub(super) struct PacketVerifier<'a> {
    pub(super) channel: &'a dyn Channel,
    pub(super) shared: &'a Shared<'a>,
}

impl PacketVerifier<'_> {
    /// Takes the checksum out of a header, and compares the header with it before any field is used.
    pub(super) fn take_header_checksum(&self, header: &mut [u8; HEADER_BYTES]) -> Result<HeaderChecksum> {
        let checksum = Checksum::take(header);
        let header = checksum.map_or(0, |_| checksum::of_header(header));
        if checksum.is_some_and(|checksum| checksum.header != Checksum::of_header(header)) {
            return Err(self.damaged(checksum::damaged(Damage::Header, &Packet::empty(), &[])));
        }
        Ok(HeaderChecksum { header, checksum })
    }

    /// A source that was informed that checksums are compared omits none, except in packets that it sent before.
    pub(super) fn require_checksum(&self, packet: &Packet, check: HeaderChecksum) -> Result<()> {
        let missing = check.checksum.is_none() && packet.block.is_some();
        if missing && self.shared.compares_checksums.load(Ordering::Acquire) {
            Err(self.damaged(InvalidMessage::ChecksumMissing))
        } else {
            Ok(())
        }
    }

    /// Compares a packet, whose contents lie in these buffers, with what was sent.
    pub(super) fn verify(
        &self,
        packet: &Packet,
        check: HeaderChecksum,
        contents: &[IoBuf<'_>],
    ) -> Result<()> {
        let Some(checksum) = check.checksum else { return Ok(()) };
        let hashed = if checksum.of_pages { contents } else { &[] };
        self.compare(packet, &checksum, &checksum::sums(check.header, packet.method, hashed))
    }

    fn compare(&self, packet: &Packet, checksum: &Checksum, sums: &Sums) -> Result<()> {
        if let Some(damage) = sums.compare(&checksum.sums) {
            return Err(self.damaged(checksum::damaged(damage, packet, self.shared.blocks())));
        }
        let is_whole = checksum.of_pages || packet.normal.is_empty();
        Statistics::add(&self.shared.statistics.checksums_verified, is_whole.into());
        Ok(())
    }

    /// Receives the pages of a packet, and compares them with what was sent: in parts, each of which is hashed while it is in the
    /// processor's cache.
    pub(super) fn receive(
        &self,
        packet: &Packet,
        check: HeaderChecksum,
        mut rooms: Vec<IoBufMut<'_>>,
    ) -> Result<()> {
        let Some(checksum) = check.checksum.filter(|checksum| checksum.of_pages) else {
            self.channel.recv_exact_unauthenticated(&mut rooms)?;
            return self.verify(packet, check, &[]);
        };
        let mut sums = checksum::sums(check.header, packet.method, &[]);
        let mut pieces = pieces(rooms);
        let mut rest = &mut pieces[..];
        while !rest.is_empty() {
            let count = first_part(rest);
            let (part, behind) = rest.split_at_mut(count);
            self.channel.recv_exact_unauthenticated(part)?;
            let landed: Vec<_> = part.iter().map(IoBufMut::as_io_buf).collect();
            checksum::add_pages(&mut sums, &landed);
            rest = behind;
        }
        self.compare(packet, &checksum, &sums)
    }

    fn damaged(&self, message: InvalidMessage) -> Error {
        Error::protocol(self.channel.peer())(message.into())
    }
}

/// Cuts these rooms into pieces, each of which is received at once.
fn pieces(rooms: Vec<IoBufMut<'_>>) -> Vec<IoBufMut<'_>> {
    let mut pieces = Vec::with_capacity(rooms.len());
    for mut room in rooms {
        while room.len() > HASHED_PART_BYTES {
            let (piece, behind) = room.split_at(HASHED_PART_BYTES);
            pieces.push(piece);
            room = behind;
        }
        pieces.push(room);
    }
    pieces
}

/// Number of pieces, at least one, that are received and hashed next.
fn first_part(pieces: &[IoBufMut<'_>]) -> usize {
    let mut bytes = 0;
    let fits = pieces.iter().take_while(|piece| {
        bytes += piece.len();
        bytes <= HASHED_PART_BYTES
    });
    fits.count().max(1)
}
