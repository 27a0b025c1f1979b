//! Where the headers of a frame are, and what of them differs from packet to packet.

use super::Partial;
use super::checksum::Sum;

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
/// MF and the offset: of a packet that is no fragment they are 0.
const FRAGMENT: u16 = 0x3fff;
/// Of the byte at 13 of a TCP header.
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Network {
    V4,
    V6,
}

/// Where each header begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) network: Network,
    pub(super) tcp: bool,
    ip: usize,
    transport: usize,
    pub(super) payload: usize,
}

impl Layout {
    /// Finds them; `None` if they are others, or not whole.
    pub(super) fn of(headers: &[u8]) -> Option<Self> {
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

    pub(super) fn partial(&self) -> Partial {
        let start = u16::try_from(self.transport).expect("headers are short");
        Partial { start, offset: if self.tcp { 16 } else { 6 } }
    }

    /// The IP header of packet `index`, with `length` bytes of payload.
    pub(super) fn network(&self, out: &mut [u8], index: usize, length: usize) {
        let (ip, end) = (self.ip, self.payload + length);
        match self.network {
            Network::V4 => {
                put(out, ip + 2, end - ip);
                let id = word(out, ip + 4).expect("it is in the header");
                put(out, ip + 4, usize::from(id) + index);
                put(out, ip + 10, 0);
                let mut sum = Sum::default();
                sum.add(&out[ip..self.transport]);
                // To who compares, all ones are as good as 0.
                out[ip + 10..ip + 12].copy_from_slice(&sum.finish());
            }
            Network::V6 => put(out, ip + 4, end - self.transport),
        }
    }

    /// The TCP or UDP header of a packet whose `length` bytes of payload come `behind` others; in the checksum's field is
    /// the sum of the pseudo-header.
    pub(super) fn transport(
        &self,
        out: &mut [u8],
        (index, last): (usize, bool),
        (behind, length): (usize, usize),
    ) {
        let (at, whole) = (self.transport, self.payload - self.transport + length);
        if self.tcp {
            let bytes = [out[at + 4], out[at + 5], out[at + 6], out[at + 7]];
            let behind = u32::try_from(behind).expect("a frame is short");
            let sequence = u32::from_be_bytes(bytes).wrapping_add(behind);
            out[at + 4..at + 8].copy_from_slice(&sequence.to_be_bytes());
            if !last {
                out[at + 13] &= !(FIN | PSH);
            }
            if index > 0 {
                out[at + 13] &= !CWR;
            }
        } else {
            put(out, at + 4, whole);
        }
        let (field, addresses) = match self.network {
            Network::V4 => (self.partial(), self.ip + 12..self.ip + 20),
            Network::V6 => (self.partial(), self.ip + 8..self.ip + 40),
        };
        let mut pseudo = Sum::default();
        pseudo.add(&out[addresses]);
        pseudo.word(u16::from(if self.tcp { TCP } else { UDP }));
        pseudo.word(u16::try_from(whole).expect("a packet is shorter than 64 KiB"));
        let field = at + usize::from(field.offset);
        out[field..field + 2].copy_from_slice(&pseudo.partial());
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// The low 16 bits of a number.
fn put(bytes: &mut [u8], at: usize, number: usize) {
    let number = u16::try_from(number & 0xffff).expect("16 bits");
    bytes[at..at + 2].copy_from_slice(&number.to_be_bytes());
}
