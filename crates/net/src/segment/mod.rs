//! Segmentation and checksums in software, for devices that have neither: headers are made, payload is only pointed at.
//!
//! ```text
//!   a super-frame   [headers][payload ................................]
//!   its packets     [headers'][payload 0..mss]  [headers'][mss..2 mss]  …     headers' differ in lengths, ids, sequence
//! ```
//! The rules are the kernel's (`tcp_gso_segment`, `udp_gso_segment`, `inet_gso_segment`), so that a guest's packets look
//! the same as through a tap. No I/O, and no look at payload; what the guest says is copied before it is decided upon.
//!
//! What it is not: what is rare is left to the kernel (`None`): IP fragments (UFO), tunnels, IPv6 extension headers, more
//! than two VLAN tags, headers of more than [`HEADERS_BYTES_MAX`] bytes, more than [`SEGMENTS_MAX`] packets.

pub mod checksum;
mod headers;

use std::ops::Range;

use virtio_bindings::virtio_net as virtio;

use checksum::Sum;
use headers::{Layout, Network};

/// The most bytes of Ethernet, VLAN, IP and TCP headers that are looked at.
pub const HEADERS_BYTES_MAX: usize = 256;
/// The most packets that one super-frame becomes: 64 KiB at the smallest segments of use, 536 bytes.
pub const SEGMENTS_MAX: usize = 128;
/// The longest packet: what the lengths in its headers can say.
const PACKET_BYTES_MAX: usize = 65535;
/// What is read of the virtio header: all but `num_buffers`.
pub const REQUEST_BYTES: usize = 10;

const NEEDS_CHECKSUM: u8 = virtio::VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
const NONE: u8 = virtio::VIRTIO_NET_HDR_GSO_NONE as u8;
const TCP4: u8 = virtio::VIRTIO_NET_HDR_GSO_TCPV4 as u8;
const TCP6: u8 = virtio::VIRTIO_NET_HDR_GSO_TCPV6 as u8;
const UDP: u8 = virtio::VIRTIO_NET_HDR_GSO_UDP_L4 as u8;
const ECN: u8 = virtio::VIRTIO_NET_HDR_GSO_ECN as u8;

/// What the virtio header asks for (`struct virtio_net_hdr`, virtio 1.2, 5.1.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Request {
    flags: u8,
    kind: u8,
    segment_bytes: u16,
    partial: Partial,
}

/// A checksum that is to be made: over all from `start` on, stored `offset` bytes behind it, where the sum of the
/// pseudo-header stands. In bytes of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Partial {
    /// Where what is summed begins.
    pub start: u16,
    /// Where the sum is stored, from there.
    pub offset: u16,
}

/// What there is to do before a frame can go.
#[derive(Debug, Clone, Copy)]
pub enum Work<'h> {
    /// Nothing.
    Plain,
    /// This checksum. Its field lies within the headers.
    Checksum(Partial),
    /// Packets, each with a checksum.
    Segments(Segmenter<'h>),
}

/// A super-frame as packets, counted from 0.
#[derive(Debug, Clone, Copy)]
pub struct Segmenter<'h> {
    headers: &'h [u8],
    layout: Layout,
    segment_bytes: usize,
    payload_bytes: usize,
}

impl Request {
    /// Reads it.
    pub fn new(header: &[u8; REQUEST_BYTES]) -> Self {
        let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        // `hdr_len` at 2 is only a hint, and not needed.
        let partial = Partial { start: word(6), offset: word(8) };
        Self { flags: header[0], kind: header[1], segment_bytes: word(4), partial }
    }

    /// What it asks for, of a frame of `frame_bytes` that begins with `headers`: all of them, or the first
    /// [`HEADERS_BYTES_MAX`] bytes of a longer frame. `None` if that is left to the kernel: to do, or to refuse.
    pub fn work<'h>(&self, headers: &'h [u8], frame_bytes: usize) -> Option<Work<'h>> {
        debug_assert_eq!(headers.len(), frame_bytes.min(HEADERS_BYTES_MAX), "the beginning of the frame");
        let checksum = self.flags & NEEDS_CHECKSUM != 0;
        match self.kind & !ECN {
            _ if headers.len() < headers::ETHERNET_BYTES => None,
            NONE if self.kind != NONE => None,
            NONE if !checksum => Some(Work::Plain),
            NONE => (self.partial.end() <= headers.len()).then_some(Work::Checksum(self.partial)),
            TCP4 | TCP6 | UDP if checksum => self.segments(headers, frame_bytes).map(Work::Segments),
            _ => None,
        }
    }

    fn segments<'h>(&self, headers: &'h [u8], frame_bytes: usize) -> Option<Segmenter<'h>> {
        let layout = Layout::of(headers)?;
        let fits = match self.kind & !ECN {
            TCP4 => layout.tcp && layout.network == Network::V4,
            TCP6 => layout.tcp && layout.network == Network::V6,
            _ => !layout.tcp && self.kind & ECN == 0,
        };
        if !fits || self.partial != layout.partial() {
            return None;
        }
        let headers = &headers[..layout.payload];
        let payload_bytes = frame_bytes - layout.payload;
        let segmenter =
            Segmenter { headers, layout, segment_bytes: usize::from(self.segment_bytes), payload_bytes };
        let bounded = self.segment_bytes > 0
            && payload_bytes > 0
            && segmenter.count() <= SEGMENTS_MAX
            && segmenter.packet_bytes_max() <= PACKET_BYTES_MAX;
        bounded.then_some(segmenter)
    }
}

impl Partial {
    /// Behind the field.
    fn end(self) -> usize {
        usize::from(self.start) + usize::from(self.offset) + 2
    }

    /// Makes it in software: `headers` is the packet's beginning, with the field in it, and `behind` gives the sum of all
    /// that follows.
    ///
    /// # Panics
    /// If the field does not lie within `headers`.
    pub fn finish(self, headers: &mut [u8], behind: impl FnOnce(&mut Sum)) {
        let mut sum = Sum::default();
        sum.add(&headers[usize::from(self.start)..]);
        behind(&mut sum);
        let end = self.end();
        headers[end - 2..end].copy_from_slice(&sum.finish());
    }
}

impl Segmenter<'_> {
    /// How many packets.
    pub fn count(&self) -> usize {
        self.payload_bytes.div_ceil(self.segment_bytes.max(1))
    }

    /// Bytes of headers of each packet.
    pub fn header_bytes(&self) -> usize {
        self.layout.payload
    }

    /// The longest packet, in bytes.
    pub fn packet_bytes_max(&self) -> usize {
        self.layout.payload + self.segment_bytes.min(self.payload_bytes)
    }

    /// Which bytes of the super-frame are the payload of this packet.
    pub fn payload(&self, index: usize) -> Range<usize> {
        let start = index * self.segment_bytes;
        let end = (start + self.segment_bytes).min(self.payload_bytes);
        self.layout.payload + start..self.layout.payload + end
    }

    /// Writes the headers of this packet to the beginning of `out`; what is left to be summed.
    ///
    /// # Panics
    /// If there is no room for [`Segmenter::header_bytes`].
    pub fn write(&self, index: usize, out: &mut [u8]) -> Partial {
        let out = &mut out[..self.headers.len()];
        out.copy_from_slice(self.headers);
        let (length, last) = (self.payload(index).len(), index + 1 == self.count());
        self.layout.network(out, index, length);
        let behind = index * self.segment_bytes;
        self.layout.transport(out, (index, last), (behind, length));
        self.layout.partial()
    }
}
