//! Frames, built once and sent many times.

use towline_frontend::net::HEADER_BYTES;

/// Address of no interface: every receiver drops the frame.
const UNKNOWN: [u8; 6] = [0x02, 0, 0, 0, 0, 0x99];
const SOURCE: [u8; 6] = [0x02, 0, 0, 0, 0, 0x98];
/// "Local experimental" EtherType (IEEE 802), without a protocol.
const EXPERIMENTAL: [u8; 2] = [0x88, 0xb5];
pub(super) const IPV4: [u8; 2] = [0x08, 0x00];
pub(super) const ETHERNET_BYTES: usize = 14;
const HEADERS_BYTES: usize = ETHERNET_BYTES + 40;
/// virtio-net: a partial checksum; TCP segmentation over IPv4.
pub(super) const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
/// Bytes of TCP in each segment of a super-frame.
const SEGMENT_BYTES: u16 = 1448;
const SEGMENTS: usize = 45;
/// Longest super-frame of whole segments below an interface's limit (64 KiB with all headers); the kernel would split a longer one.
pub(super) const SUPER_BYTES: usize = HEADERS_BYTES + SEGMENTS * SEGMENT_BYTES as usize;

/// Kind of frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A frame of this length, with its Ethernet header and without its checksum.
    Plain(usize),
    /// A TCP super-frame.
    Super,
}

impl FrameKind {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Plain(len) => len,
            Self::Super => SUPER_BYTES,
        }
    }

    /// Returns the number of packets on a wire.
    pub(super) fn segments(self) -> usize {
        if self == Self::Super { SEGMENTS } else { 1 }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Plain(len) => format!("{len} B"),
            Self::Super => "super-frames of 64 KiB".into(),
        }
    }

    /// Returns the frame after a header of 12 bytes.
    pub(super) fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES + self.len()];
        let (header, frame) = bytes.split_at_mut(HEADER_BYTES);
        frame[..6].copy_from_slice(&UNKNOWN);
        frame[6..12].copy_from_slice(&SOURCE);
        frame[12..14].copy_from_slice(&EXPERIMENTAL);
        if self == Self::Super {
            frame[12..14].copy_from_slice(&IPV4);
            header[..2].copy_from_slice(&[NEEDS_CSUM, GSO_TCPV4]);
            header[2..4].copy_from_slice(&(HEADERS_BYTES as u16).to_le_bytes());
            header[4..6].copy_from_slice(&SEGMENT_BYTES.to_le_bytes());
            header[6..8].copy_from_slice(&(ETHERNET_BYTES as u16 + 20).to_le_bytes());
            header[8..10].copy_from_slice(&16u16.to_le_bytes());
            tcp_ip(&mut frame[ETHERNET_BYTES..]);
        }
        bytes
    }
}

/// Writes the IPv4 and TCP headers of `packet`.
fn tcp_ip(packet: &mut [u8]) {
    let len = u16::try_from(packet.len()).expect("a packet of at most 65535 bytes");
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    packet[6] = 0x40;
    packet[8..10].copy_from_slice(&[64, 6]);
    packet[12..20].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
    let sum: u32 = packet[..20].chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !u16::try_from((folded & 0xffff) + (folded >> 16)).expect("the sum is folded");
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet[20..24].copy_from_slice(&[0x30, 0x39, 0x1f, 0x90]);
    packet[32..34].copy_from_slice(&[0x50, 0x10]);
    packet[34..36].copy_from_slice(&[0xff, 0xff]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_an_ip_header_is_all_ones() {
        let bytes = FrameKind::Super.bytes();
        let header = &bytes[HEADER_BYTES + ETHERNET_BYTES..][..20];
        let sum: u32 = header.chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(bytes.len(), HEADER_BYTES + SUPER_BYTES);
    }
}
