//! Layout of a frame's headers, and the fields that differ between its segments.

use super::checksum::{PartialChecksum, Sum};

/// Ethernet without VLAN tags.
pub(super) const ETHERNET_BYTES: usize = 14;
const VLAN_BYTES: usize = 4;
const VLANS_MAX: usize = 2;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: [u16; 2] = [0x8100, 0x88a8];
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const TCP_BYTES: usize = 20;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// MF flag and fragment offset, which are 0 in a packet that is not fragmented.
const FRAGMENT: u16 = 0x3fff;
/// Flags in byte 13 of a TCP header.
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Network {
    V4,
    V6,
}

/// A segment of a super-frame.
pub(super) struct Segment {
    pub(super) index: usize,
    pub(super) is_last: bool,
    /// Offset of its payload in that of the super-frame, and its length.
    pub(super) offset: usize,
    pub(super) length: usize,
}

/// Offsets of the headers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) network: Network,
    pub(super) tcp: bool,
    ip: usize,
    transport: usize,
    pub(super) payload: usize,
}

impl Layout {
    /// Parses the headers; `None` if they are truncated or of other protocols.
    pub(super) fn parse(headers: &[u8]) -> Option<Self> {
        let mut ip = ETHERNET_BYTES;
        for _ in 0..VLANS_MAX {
            if VLAN.contains(&word(headers, ip - 2)?) {
                ip += VLAN_BYTES;
            }
        }
        let byte = |at: usize| headers.get(at).copied();
        let (network, transport, protocol) = match word(headers, ip - 2)? {
            IPV4 => {
                let words = usize::from(byte(ip)? & 0xf);
                let whole = byte(ip)? >> 4 == 4 && words * 4 >= IPV4_BYTES;
                let fragment = word(headers, ip + 6)? & FRAGMENT != 0;
                (whole && !fragment).then_some(())?;
                (Network::V4, ip + words * 4, byte(ip + 9)?)
            }
            IPV6 if byte(ip)? >> 4 == 6 => (Network::V6, ip + IPV6_BYTES, byte(ip + 6)?),
            _ => return None,
        };
        let (tcp, length) = match protocol {
            TCP => (true, usize::from(byte(transport + 12)? >> 4) * 4),
            UDP => (false, UDP_BYTES),
            _ => return None,
        };
        let payload = transport + length;
        let whole = payload <= headers.len() && (!tcp || length >= TCP_BYTES);
        whole.then_some(Self { network, tcp, ip, transport, payload })
    }

    pub(super) fn partial_checksum(&self) -> PartialChecksum {
        let start = u16::try_from(self.transport).expect("headers have at most 256 bytes");
        PartialChecksum { start, offset: if self.tcp { 16 } else { 6 } }
    }

    /// Updates the IP header of a segment.
    pub(super) fn write_network(&self, out: &mut [u8], segment: &Segment) {
        let (ip, end) = (self.ip, self.payload + segment.length);
        match self.network {
            Network::V4 => {
                put(out, ip + 2, end - ip);
                let id = word(out, ip + 4).expect("the header is complete");
                put(out, ip + 4, usize::from(id) + segment.index);
                put(out, ip + 10, 0);
                let mut sum = Sum::default();
                sum.add(&out[ip..self.transport]);
                // All ones are equivalent to 0 for a receiver.
                out[ip + 10..ip + 12].copy_from_slice(&sum.finish());
            }
            Network::V6 => put(out, ip + 4, end - self.transport),
        }
    }

    /// Updates the TCP or UDP header of a segment. The checksum field gets the sum of the pseudo-header.
    pub(super) fn write_transport(&self, out: &mut [u8], segment: &Segment) {
        let at = self.transport;
        let whole = self.payload - self.transport + segment.length;
        if self.tcp {
            let bytes = [out[at + 4], out[at + 5], out[at + 6], out[at + 7]];
            let offset = u32::try_from(segment.offset).expect("a frame is shorter than 4 GiB");
            let sequence = u32::from_be_bytes(bytes).wrapping_add(offset);
            out[at + 4..at + 8].copy_from_slice(&sequence.to_be_bytes());
            if !segment.is_last {
                out[at + 13] &= !(FIN | PSH);
            }
            if segment.index > 0 {
                out[at + 13] &= !CWR;
            }
        } else {
            put(out, at + 4, whole);
        }
        let addresses = match self.network {
            Network::V4 => self.ip + 12..self.ip + 20,
            Network::V6 => self.ip + 8..self.ip + 40,
        };
        let mut pseudo = Sum::default();
        pseudo.add(&out[addresses]);
        pseudo.word(u16::from(if self.tcp { TCP } else { UDP }));
        pseudo.word(u16::try_from(whole).expect("a packet is shorter than 64 KiB"));
        let field = at + usize::from(self.partial_checksum().offset);
        out[field..field + 2].copy_from_slice(&pseudo.partial());
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Writes the low 16 bits of a number, big-endian.
fn put(bytes: &mut [u8], at: usize, number: usize) {
    let number = u16::try_from(number & 0xffff).expect("16 bits");
    bytes[at..at + 2].copy_from_slice(&number.to_be_bytes());
}
