//! Segmentation and checksums in software, for network cards without offloads. Headers are written, payload
//! is referenced.
//!
//! ```text
//!   a super-frame   [headers][payload ................................]
//!   its segments    [headers'][payload 0..mss]  [headers'][mss..2 mss]  …     lengths, ids, sequence numbers differ
//! ```
//! The rules are those of the kernel (`tcp_gso_segment`, `udp_gso_segment`, `inet_gso_segment`), so packets
//! look the same as through a tap. No I/O, and payload is not read. Decisions are made on a copy of the
//! guest's headers.
//!
//! Out of scope and left to the kernel (`None`): IP fragments (UFO), tunnels, IPv6 extension headers, more
//! than two VLAN tags, headers of more than [`HEADERS_BYTES_MAX`] bytes, more than [`SEGMENTS_MAX`] segments.

pub mod checksum;
mod headers;

use std::ops::Range;

use virtio_bindings::virtio_net as virtio;

pub use checksum::PartialChecksum;
use headers::{Layout, Network, Segment};

/// Maximum length of the Ethernet, VLAN, IP and TCP headers.
pub const HEADERS_BYTES_MAX: usize = 256;
/// Maximum number of segments of a super-frame: 64 KiB in segments of 536 bytes, the smallest in practice.
pub const SEGMENTS_MAX: usize = 128;
/// Maximum length of a packet, as its headers have lengths of 16 bits.
const PACKET_BYTES_MAX: usize = 65535;
/// Length of the virtio header without `num_buffers`.
pub const REQUEST_BYTES: usize = 10;

const NEEDS_CHECKSUM: u8 = virtio::VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
const NONE: u8 = virtio::VIRTIO_NET_HDR_GSO_NONE as u8;
const TCP4: u8 = virtio::VIRTIO_NET_HDR_GSO_TCPV4 as u8;
const TCP6: u8 = virtio::VIRTIO_NET_HDR_GSO_TCPV6 as u8;
const UDP: u8 = virtio::VIRTIO_NET_HDR_GSO_UDP_L4 as u8;
const ECN: u8 = virtio::VIRTIO_NET_HDR_GSO_ECN as u8;

/// Offloads that a virtio header requests (`struct virtio_net_hdr`, virtio 1.2, 5.1.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OffloadRequest {
    flags: u8,
    kind: u8,
    segment_bytes: u16,
    partial: PartialChecksum,
}

/// Work to be done on a frame before it is sent.
#[derive(Debug, Clone, Copy)]
pub enum Offload<'h> {
    /// None; the frame is sent unchanged.
    None,
    /// A checksum, whose field is within the headers.
    Checksum(PartialChecksum),
    /// Segmentation, with a checksum in each segment.
    Segmentation(Segmenter<'h>),
}

/// Splits a super-frame into segments, which are numbered from 0.
#[derive(Debug, Clone, Copy)]
pub struct Segmenter<'h> {
    headers: &'h [u8],
    layout: Layout,
    segment_bytes: usize,
    payload_bytes: usize,
}

impl OffloadRequest {
    /// Parses a virtio header.
    pub fn new(header: &[u8; REQUEST_BYTES]) -> Self {
        let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        // `hdr_len` at offset 2 is only a hint.
        let partial = PartialChecksum { start: word(6), offset: word(8) };
        Self { flags: header[0], kind: header[1], segment_bytes: word(4), partial }
    }

    /// Work for a frame of `frame_bytes` that begins with `headers`: the whole frame, or the first
    /// [`HEADERS_BYTES_MAX`] bytes of a longer one. `None` if it is left to the kernel, which does it or
    /// drops the frame.
    pub fn offload<'h>(&self, headers: &'h [u8], frame_bytes: usize) -> Option<Offload<'h>> {
        debug_assert_eq!(
            headers.len(),
            frame_bytes.min(HEADERS_BYTES_MAX),
            "the beginning of the frame is needed"
        );
        let checksum = self.flags & NEEDS_CHECKSUM != 0;
        match self.kind & !ECN {
            _ if headers.len() < headers::ETHERNET_BYTES => None,
            NONE if self.kind != NONE => None,
            NONE if !checksum => Some(Offload::None),
            NONE => (self.partial.end() <= headers.len()).then_some(Offload::Checksum(self.partial)),
            TCP4 | TCP6 | UDP if checksum => self.segments(headers, frame_bytes).map(Offload::Segmentation),
            _ => None,
        }
    }

    fn segments<'h>(&self, headers: &'h [u8], frame_bytes: usize) -> Option<Segmenter<'h>> {
        let layout = Layout::parse(headers)?;
        let fits = match self.kind & !ECN {
            TCP4 => layout.tcp && layout.network == Network::V4,
            TCP6 => layout.tcp && layout.network == Network::V6,
            _ => !layout.tcp && self.kind & ECN == 0,
        };
        if !fits || self.partial != layout.partial_checksum() {
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

impl Segmenter<'_> {
    /// Number of segments.
    pub fn count(&self) -> usize {
        self.payload_bytes.div_ceil(self.segment_bytes.max(1))
    }

    /// Length of the headers of each segment.
    pub fn header_bytes(&self) -> usize {
        self.layout.payload
    }

    /// Length of the longest segment with its headers.
    pub fn packet_bytes_max(&self) -> usize {
        self.layout.payload + self.segment_bytes.min(self.payload_bytes)
    }

    /// Range of the super-frame that is the payload of a segment.
    pub fn payload(&self, index: usize) -> Range<usize> {
        let start = index * self.segment_bytes;
        let end = (start + self.segment_bytes).min(self.payload_bytes);
        self.layout.payload + start..self.layout.payload + end
    }

    /// Writes the headers of a segment to the beginning of `out`. Returns the checksum to complete.
    ///
    /// # Panics
    /// If `out` is shorter than [`Segmenter::header_bytes`].
    pub fn write(&self, index: usize, out: &mut [u8]) -> PartialChecksum {
        let out = &mut out[..self.headers.len()];
        out.copy_from_slice(self.headers);
        let segment = Segment {
            index,
            is_last: index + 1 == self.count(),
            offset: index * self.segment_bytes,
            length: self.payload(index).len(),
        };
        self.layout.write_network(out, &segment);
        self.layout.write_transport(out, &segment);
        self.layout.partial_checksum()
    }
}
