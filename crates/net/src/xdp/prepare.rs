//! From a chain to descriptors: what is copied, what is referred to, and whose checksum is made where.

use std::ops::Range;

use towline_vhost_user::Chain;

use super::arena::LARGE_ROOM;
use super::link::{Drafted, Link};
use super::plan;
use super::socket::{METADATA_BYTES, TRANSMIT_DESCRIPTORS};
use crate::FRAME_BYTES_MAX;
use crate::segment::{HEADERS_BYTES_MAX, Partial, REQUEST_BYTES, Request, Segmenter, Work};

/// Frames up to so many bytes are copied (`VHOST_GOODCOPY_LEN`): they cost less so.
const COPY_BYTES: usize = 256;
/// What the first descriptor has at least: Ethernet, VLAN, IP and TCP headers.
const FIRST_BYTES: u32 = 128;
/// The longest virtio header.
const VIRTIO_BYTES_MAX: usize = 12;
/// More descriptors than this are not for one frame.
const DESCRIPTORS_MAX: usize = TRANSMIT_DESCRIPTORS as usize / 2;
/// `XDP_PKT_CONTD`: the next descriptor is of this packet too.
const CONTINUED: u32 = libc::XDP_PKT_CONTD;
/// `XDP_TX_METADATA`: there is metadata before it.
const METADATA: u32 = libc::XDP_TX_METADATA;

impl Link {
    /// Makes descriptors of a frame, which may be referred to, behind its virtio header of `skip` bytes.
    pub(super) fn draft(&mut self, chain: Chain<'_>, skip: usize, may_refer: bool) -> Drafted {
        let length = chain.readable_bytes() as usize;
        if length <= skip || length > FRAME_BYTES_MAX {
            return Drafted::Tap;
        }
        let frame_bytes = length - skip;
        // Copied once, then decided upon.
        let mut bytes = [0; VIRTIO_BYTES_MAX + HEADERS_BYTES_MAX];
        let there = skip + frame_bytes.min(HEADERS_BYTES_MAX);
        chain.read_at(0, &mut bytes[..there]);
        let (virtio, headers) = bytes[..there].split_at(skip);
        let request = virtio.first_chunk::<REQUEST_BYTES>().expect("a virtio header has 10 bytes at least");
        let Some(work) = Request::new(request).work(headers, frame_bytes) else { return Drafted::Tap };
        let longest = match &work {
            Work::Segments(segments) => segments.packet_bytes_max(),
            _ => frame_bytes,
        };
        if longest > self.frame_bytes_max {
            return Drafted::TooLong;
        }
        let worth_it = frame_bytes > COPY_BYTES && !self.budget.is_spent();
        let drafted = if may_refer && worth_it && self.refer(chain, skip, (headers, frame_bytes), &work) {
            Drafted::Referring
        } else {
            self.undo();
            self.copy(chain, skip, (headers, frame_bytes), &work)
        };
        let copies = matches!(drafted, Drafted::Referring | Drafted::Copied);
        if copies && self.has_room(self.draft.descriptors.len()) {
            return drafted;
        }
        self.undo();
        if copies { Drafted::Full } else { drafted }
    }

    fn undo(&mut self) {
        self.draft.descriptors.clear();
        self.draft.chunks.drain(..).for_each(|chunk| self.arena.free(chunk));
    }

    /// Headers into the arena, if something about them has to be done, and all else where it is. False if it cannot be.
    fn refer(
        &mut self,
        chain: Chain<'_>,
        skip: usize,
        (headers, frame_bytes): (&[u8], usize),
        work: &Work<'_>,
    ) -> bool {
        self.draft.pieces.clear();
        let mut skip = u32::try_from(skip).expect("10 or 12");
        for mut place in chain.readable_ranges() {
            let skipped = skip.min(place.len);
            skip -= skipped;
            (place.offset, place.len) = (place.offset + u64::from(skipped), place.len - skipped);
            if place.len > 0 {
                self.draft.pieces.push(self.umem.piece(place));
            }
        }
        let mut buffer = [0; HEADERS_BYTES_MAX];
        match work {
            // Who sends it on looks at the headers, and expects them in one place.
            Work::Plain if self.draft.pieces[0].len >= FIRST_BYTES => {
                self.packet(&mut [], None, 0..frame_bytes)
            }
            Work::Plain => {
                let prefix = &mut buffer[..headers.len()];
                prefix.copy_from_slice(headers);
                self.packet(prefix, None, headers.len()..frame_bytes)
            }
            Work::Checksum(partial) => {
                let prefix = &mut buffer[..headers.len()];
                prefix.copy_from_slice(headers);
                self.packet(prefix, Some(*partial), headers.len()..frame_bytes)
            }
            Work::Segments(segments) => (0..segments.count()).all(|index| {
                let prefix = &mut buffer[..segments.header_bytes()];
                let partial = segments.write(index, prefix);
                self.packet(prefix, Some(partial), segments.payload(index))
            }),
        }
    }

    /// Appends a packet: these headers, and this part of the frame.
    fn packet(&mut self, prefix: &mut [u8], partial: Option<Partial>, rest: Range<usize>) -> bool {
        self.draft.references.clear();
        let (first, most) = (self.draft.descriptors.len(), self.limits.descriptors);
        let most = most - usize::from(!prefix.is_empty());
        if !plan::references(&self.draft.pieces, rest, (&self.limits, most), &mut self.draft.references) {
            return false;
        }
        if !prefix.is_empty() {
            let Some(chunk) = self.arena.take(prefix.len()) else { return false };
            self.draft.chunks.push(chunk);
            let mut options = 0;
            match partial {
                Some(partial) if self.umem.metadata_bytes > 0 => {
                    let metadata = metadata(partial);
                    self.section.write(chunk.place() - metadata.len(), &metadata);
                    options = METADATA;
                }
                Some(partial) => {
                    let (span, references) = (&self.umem.span, &self.draft.references);
                    partial.finish(prefix, |sum| {
                        for (at, len) in references {
                            let at = usize::try_from(*at).expect("it is a place in the span");
                            span.sum(at, *len as usize, sum);
                        }
                    });
                }
                None => {}
            }
            self.section.write(chunk.place(), prefix);
            self.push(chunk.place(), prefix.len(), options);
        }
        for (at, len) in self.draft.references.drain(..) {
            self.draft.descriptors.push((at, len, 0));
        }
        self.end_packet(first)
    }

    /// All but the last descriptor from `first` on are continued. False if there are too many of the frame's.
    fn end_packet(&mut self, first: usize) -> bool {
        let descriptors = &mut self.draft.descriptors;
        let last = descriptors.len() - 1;
        descriptors[first..last].iter_mut().for_each(|descriptor| descriptor.2 |= CONTINUED);
        descriptors.len() <= DESCRIPTORS_MAX
    }

    /// Appends a descriptor of the arena.
    fn push(&mut self, place: usize, len: usize, options: u32) {
        let address = (self.section.start() + place) as u64;
        let len = u32::try_from(len).expect("a chunk is short");
        self.draft.descriptors.push((address, len, options));
    }

    /// All into the arena.
    fn copy(
        &mut self,
        chain: Chain<'_>,
        skip: usize,
        (headers, frame_bytes): (&[u8], usize),
        work: &Work<'_>,
    ) -> Drafted {
        let (mut frame, mut packet) =
            (std::mem::take(&mut self.draft.frame), std::mem::take(&mut self.draft.packet));
        frame.resize(frame_bytes, 0);
        chain.read_at(skip, &mut frame);
        // The guest may have changed what was decided upon.
        frame[..headers.len()].copy_from_slice(headers);
        let mut drafted = Drafted::Copied;
        match work {
            Work::Plain => drafted = self.copied(&frame),
            Work::Checksum(partial) => {
                partial.finish(&mut frame, |_| {});
                drafted = self.copied(&frame);
            }
            Work::Segments(segments) => {
                for index in 0..segments.count() {
                    segment(segments, index, &frame, &mut packet);
                    drafted = self.copied(&packet);
                    if drafted != Drafted::Copied {
                        break;
                    }
                }
            }
        }
        (self.draft.frame, self.draft.packet) = (frame, packet);
        drafted
    }

    /// Appends a packet that is copied.
    fn copied(&mut self, packet: &[u8]) -> Drafted {
        if packet.len().div_ceil(LARGE_ROOM) > self.limits.descriptors {
            return Drafted::Tap;
        }
        let first = self.draft.descriptors.len();
        for part in packet.chunks(LARGE_ROOM) {
            let Some(chunk) = self.arena.take(part.len()) else { return Drafted::Full };
            self.draft.chunks.push(chunk);
            self.section.write(chunk.place(), part);
            self.push(chunk.place(), part.len(), 0);
        }
        if self.end_packet(first) { Drafted::Copied } else { Drafted::Tap }
    }
}

/// The whole of a packet, with its checksum.
fn segment(segments: &Segmenter<'_>, index: usize, frame: &[u8], packet: &mut Vec<u8>) {
    packet.clear();
    packet.resize(segments.header_bytes(), 0);
    let partial = segments.write(index, packet);
    packet.extend_from_slice(&frame[segments.payload(index)]);
    partial.finish(packet, |_| {});
}

/// `struct xsk_tx_metadata` with a checksum that the kernel or the device makes (`XDP_TXMD_FLAGS_CHECKSUM`).
fn metadata(partial: Partial) -> [u8; METADATA_BYTES as usize] {
    let mut metadata = [0; METADATA_BYTES as usize];
    metadata[..8].copy_from_slice(&u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM).to_ne_bytes());
    metadata[8..10].copy_from_slice(&partial.start.to_ne_bytes());
    metadata[10..12].copy_from_slice(&partial.offset.to_ne_bytes());
    metadata
}
