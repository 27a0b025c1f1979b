//! From a chain to the descriptors of its packets: bytes are copied or referenced, and checksums computed
//! here or requested.

use std::ops::Range;
use std::sync::Arc;

use towline_vhost_user::Chain;

use super::arena::{Arena, LARGE_DATA_BYTES, UmemChunk};
use super::references::{DescriptorLimits, Reference, UmemRange, references};
use super::socket::{METADATA_BYTES, TX_ENTRIES};
use super::umem::Umem;
use crate::FRAME_BYTES_MAX;
use crate::segment::{HEADERS_BYTES_MAX, Offload, OffloadRequest, PartialChecksum, REQUEST_BYTES, Segmenter};
use crate::statistics::CopyReason;
use crate::sys::umem_mapping::ArenaSection;

/// Maximum length of a frame that is always copied, which is cheaper (as `VHOST_GOODCOPY_LEN`).
const COPY_BYTES: usize = 256;
/// Minimum length of the first descriptor: Ethernet, VLAN, IP and TCP headers.
const FIRST_BYTES: u32 = 128;
/// Maximum length of the virtio header.
const VIRTIO_BYTES_MAX: usize = 12;
/// Maximum number of descriptors of a frame.
const DESCRIPTORS_MAX: usize = TX_ENTRIES as usize / 2;
/// `XDP_PKT_CONTD`: the packet continues with the next descriptor.
const CONTINUED: u32 = libc::XDP_PKT_CONTD;
/// `XDP_TX_METADATA`: metadata precedes the data.
const METADATA: u32 = libc::XDP_TX_METADATA;

/// A descriptor of the TX ring, without its frame's tag.
#[derive(Debug)]
pub(super) struct Descriptor {
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) options: u32,
}

/// Permission to refer to guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuestReferences {
    Allowed,
    Forbidden(CopyReason),
}

/// Result of building a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BuildOutcome {
    /// Descriptors refer to guest memory: the chain is in flight until they are complete.
    Referenced,
    /// Descriptors refer to the arena only: the chain can be completed at once.
    Copied(CopyReason),
    /// Out of room at the moment.
    NoRoom,
    /// The frame must be sent by the tap.
    Unsupported,
    /// The frame is longer than the interface's MTU permits.
    TooLong,
}

/// Builds the descriptors of one frame at a time.
#[derive(Debug)]
pub(super) struct FrameBuilder {
    umem: Arc<Umem>,
    section: ArenaSection,
    arena: Arena,
    limits: DescriptorLimits,
    /// Maximum length of a frame of the interface.
    frame_bytes_max: usize,
    /// Descriptors of the frame, and the chunks to which they refer.
    pub(super) descriptors: Vec<Descriptor>,
    pub(super) chunks: Vec<UmemChunk>,
    // Kept for their allocations: parts of the frame, references of a packet, copies of a frame and of a
    // packet.
    parts: Vec<UmemRange>,
    references: Vec<Reference>,
    frame: Vec<u8>,
    packet: Vec<u8>,
}

/// A frame whose headers have been copied and parsed.
struct Frame<'f> {
    chain: Chain<'f>,
    /// Length of the virtio header.
    virtio_bytes: usize,
    /// Copy of the first [`HEADERS_BYTES_MAX`] bytes at most.
    headers: &'f [u8],
    bytes: usize,
    offload: Offload<'f>,
}

impl FrameBuilder {
    pub(super) fn new(
        umem: Arc<Umem>,
        section: ArenaSection,
        limits: DescriptorLimits,
        frame_bytes_max: usize,
    ) -> Self {
        Self {
            umem,
            section,
            arena: Arena::new(),
            limits,
            frame_bytes_max,
            descriptors: Vec::new(),
            chunks: Vec::new(),
            parts: Vec::new(),
            references: Vec::new(),
            frame: Vec::new(),
            packet: Vec::new(),
        }
    }

    /// Builds descriptors for the frame of a chain.
    pub(super) fn build(
        &mut self,
        chain: Chain<'_>,
        virtio_bytes: usize,
        references: GuestReferences,
    ) -> BuildOutcome {
        let length = chain.readable_bytes() as usize;
        if length <= virtio_bytes || length > FRAME_BYTES_MAX {
            return BuildOutcome::Unsupported;
        }
        let frame_bytes = length - virtio_bytes;
        // Copied once, as the guest may change it: all decisions are made on the copy.
        let mut bytes = [0; VIRTIO_BYTES_MAX + HEADERS_BYTES_MAX];
        let copied = virtio_bytes + frame_bytes.min(HEADERS_BYTES_MAX);
        chain.read_at(0, &mut bytes[..copied]);
        let (virtio, headers) = bytes[..copied].split_at(virtio_bytes);
        let request = virtio.first_chunk::<REQUEST_BYTES>().expect("a virtio header has 10 bytes at least");
        let Some(offload) = OffloadRequest::new(request).offload(headers, frame_bytes) else {
            return BuildOutcome::Unsupported;
        };
        let packet_bytes_max = match &offload {
            Offload::Segmentation(segments) => segments.packet_bytes_max(),
            _ => frame_bytes,
        };
        if packet_bytes_max > self.frame_bytes_max {
            return BuildOutcome::TooLong;
        }
        let frame = Frame { chain, virtio_bytes, headers, bytes: frame_bytes, offload };
        let referenced = match references {
            _ if frame_bytes <= COPY_BYTES => Err(CopyReason::Short),
            GuestReferences::Forbidden(reason) => Err(reason),
            GuestReferences::Allowed => self.reference(&frame),
        };
        let Err(reason) = referenced else { return BuildOutcome::Referenced };
        self.discard();
        match self.copy(&frame) {
            Ok(()) => BuildOutcome::Copied(reason),
            Err(outcome) => {
                self.discard();
                outcome
            }
        }
    }

    /// Discards the descriptors, and frees their chunks.
    pub(super) fn discard(&mut self) {
        self.descriptors.clear();
        self.chunks.drain(..).for_each(|chunk| self.arena.free(chunk));
    }

    /// Frees a chunk of a frame that was sent.
    pub(super) fn free(&mut self, chunk: UmemChunk) {
        self.arena.free(chunk);
    }

    /// Copies headers to the arena where they must be changed, and refers to the rest. Returns the reason if
    /// that is not possible.
    fn reference(&mut self, frame: &Frame<'_>) -> Result<(), CopyReason> {
        self.parts.clear();
        let mut skip = u32::try_from(frame.virtio_bytes).expect("a virtio header has 10 or 12 bytes");
        for mut range in frame.chain.readable_ranges() {
            let skipped = skip.min(range.len);
            skip -= skipped;
            (range.offset, range.len) = (range.offset + u64::from(skipped), range.len - skipped);
            if range.len > 0 {
                self.parts.push(self.umem.range(range));
            }
        }
        let mut buffer = [0; HEADERS_BYTES_MAX];
        let checksum = match &frame.offload {
            // Receivers parse the headers, and expect them in the first descriptor.
            Offload::None if self.parts[0].len >= FIRST_BYTES => {
                return self.reference_packet(&mut [], None, 0..frame.bytes);
            }
            Offload::None => None,
            Offload::Checksum(checksum) => Some(*checksum),
            Offload::Segmentation(segments) => {
                return (0..segments.count()).try_for_each(|index| {
                    let prefix = &mut buffer[..segments.header_bytes()];
                    let checksum = segments.write(index, prefix);
                    self.reference_packet(prefix, Some(checksum), segments.payload(index))
                });
            }
        };
        let prefix = &mut buffer[..frame.headers.len()];
        prefix.copy_from_slice(frame.headers);
        self.reference_packet(prefix, checksum, frame.headers.len()..frame.bytes)
    }

    /// Appends a packet: `prefix`, which is copied to the arena, and a range of the frame.
    fn reference_packet(
        &mut self,
        prefix: &mut [u8],
        checksum: Option<PartialChecksum>,
        range: Range<usize>,
    ) -> Result<(), CopyReason> {
        self.references.clear();
        let first = self.descriptors.len();
        let limits = self.limits.less(usize::from(!prefix.is_empty()));
        references(&self.parts, range, &limits, &mut self.references)?;
        if !prefix.is_empty() {
            let chunk = self.arena.alloc(prefix.len()).ok_or(CopyReason::NoRoom)?;
            self.chunks.push(chunk);
            let mut options = 0;
            match checksum {
                Some(checksum) if self.umem.metadata_bytes > 0 => {
                    let metadata = metadata(checksum);
                    self.section.write(chunk.offset() - metadata.len(), &metadata);
                    options = METADATA;
                }
                Some(checksum) => {
                    let (mapping, references) = (&self.umem.mapping, &self.references);
                    checksum.finish(prefix, |sum| {
                        for Reference { offset, len } in references {
                            let offset = usize::try_from(*offset).expect("it is an offset in the mapping");
                            mapping.sum(offset, *len as usize, sum);
                        }
                    });
                }
                None => {}
            }
            self.section.write(chunk.offset(), prefix);
            self.push_chunk(chunk, prefix.len(), options);
        }
        for Reference { offset, len } in self.references.drain(..) {
            self.descriptors.push(Descriptor { offset, len, options: 0 });
        }
        if self.end_packet(first) { Ok(()) } else { Err(CopyReason::NoRoom) }
    }

    /// Marks all descriptors from `first` on but the last as continued. Returns false if the frame has too
    /// many.
    fn end_packet(&mut self, first: usize) -> bool {
        let last = self.descriptors.len() - 1;
        self.descriptors[first..last].iter_mut().for_each(|descriptor| descriptor.options |= CONTINUED);
        self.descriptors.len() <= DESCRIPTORS_MAX
    }

    /// Appends a descriptor of `len` bytes of a chunk.
    fn push_chunk(&mut self, chunk: UmemChunk, len: usize, options: u32) {
        let offset = (self.section.start() + chunk.offset()) as u64;
        let len = u32::try_from(len).expect("a chunk has at most 4096 bytes");
        self.descriptors.push(Descriptor { offset, len, options });
    }

    /// Copies the whole frame to the arena. Returns the outcome if that is not possible.
    fn copy(&mut self, frame: &Frame<'_>) -> Result<(), BuildOutcome> {
        let (mut bytes, mut packet) = (std::mem::take(&mut self.frame), std::mem::take(&mut self.packet));
        bytes.resize(frame.bytes, 0);
        frame.chain.read_at(frame.virtio_bytes, &mut bytes);
        // The guest may have changed the headers since they were parsed.
        bytes[..frame.headers.len()].copy_from_slice(frame.headers);
        let copied = match &frame.offload {
            Offload::None => self.copy_packet(&bytes),
            Offload::Checksum(checksum) => {
                checksum.finish(&mut bytes, |_| {});
                self.copy_packet(&bytes)
            }
            Offload::Segmentation(segments) => (0..segments.count()).try_for_each(|index| {
                copy_segment(segments, index, &bytes, &mut packet);
                self.copy_packet(&packet)
            }),
        };
        (self.frame, self.packet) = (bytes, packet);
        copied
    }

    /// Appends a packet whose bytes are copied.
    fn copy_packet(&mut self, packet: &[u8]) -> Result<(), BuildOutcome> {
        if packet.len().div_ceil(LARGE_DATA_BYTES) > self.limits.descriptors {
            return Err(BuildOutcome::Unsupported);
        }
        let first = self.descriptors.len();
        for part in packet.chunks(LARGE_DATA_BYTES) {
            let chunk = self.arena.alloc(part.len()).ok_or(BuildOutcome::NoRoom)?;
            self.chunks.push(chunk);
            self.section.write(chunk.offset(), part);
            self.push_chunk(chunk, part.len(), 0);
        }
        if self.end_packet(first) { Ok(()) } else { Err(BuildOutcome::Unsupported) }
    }
}

/// Copies a segment of a super-frame, and completes its checksum.
fn copy_segment(segments: &Segmenter<'_>, index: usize, frame: &[u8], packet: &mut Vec<u8>) {
    packet.clear();
    packet.resize(segments.header_bytes(), 0);
    let checksum = segments.write(index, packet);
    packet.extend_from_slice(&frame[segments.payload(index)]);
    checksum.finish(packet, |_| {});
}

/// `struct xsk_tx_metadata` with a checksum for the kernel or the network card (`XDP_TXMD_FLAGS_CHECKSUM`).
fn metadata(checksum: PartialChecksum) -> [u8; METADATA_BYTES as usize] {
    let mut metadata = [0; METADATA_BYTES as usize];
    metadata[..8].copy_from_slice(&u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM).to_ne_bytes());
    metadata[8..10].copy_from_slice(&checksum.start.to_ne_bytes());
    metadata[10..12].copy_from_slice(&checksum.offset.to_ne_bytes());
    metadata
}
