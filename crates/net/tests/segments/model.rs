//! Packets from their fields, byte by byte, checksums word by word. Shares nothing with the code under test.

const FIN_PSH: u8 = 0x09;
const CWR: u8 = 0x80;

#[derive(Debug, Clone)]
pub(crate) enum Ip {
    V4 { addresses: [u8; 8], id: u16, options: usize, tos: u8 },
    V6 { addresses: [u8; 32] },
}

#[derive(Debug, Clone)]
pub(crate) enum Transport {
    Tcp { sequence: u32, flags: u8, options: usize },
    Udp,
}

/// Contents of a checksum field of TCP or UDP.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Checksum {
    /// The sum of the pseudo-header, to be completed by an offload.
    Partial,
    Complete,
}

#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) vlans: usize,
    pub(crate) ip: Ip,
    pub(crate) transport: Transport,
    pub(crate) payload: Vec<u8>,
}

impl Packet {
    fn network_at(&self) -> usize {
        14 + 4 * self.vlans
    }

    fn transport_at(&self) -> usize {
        self.network_at()
            + match &self.ip {
                Ip::V4 { options, .. } => 20 + options,
                Ip::V6 { .. } => 40,
            }
    }

    fn protocol(&self) -> u8 {
        if matches!(self.transport, Transport::Tcp { .. }) { 6 } else { 17 }
    }

    /// The virtio header's first ten bytes: segments of this size, or only a checksum.
    pub(crate) fn request(&self, segment: Option<u16>) -> [u8; 10] {
        let kind = match (&self.transport, &self.ip, segment) {
            (_, _, None) => 0,
            (Transport::Tcp { flags, .. }, Ip::V4 { .. }, _) => 1 | flags & CWR,
            (Transport::Tcp { flags, .. }, Ip::V6 { .. }, _) => 4 | flags & CWR,
            (Transport::Udp, ..) => 5,
        };
        let [start_low, start_high] = u16::try_from(self.transport_at()).unwrap().to_le_bytes();
        let [low, high] = segment.unwrap_or(0).to_le_bytes();
        let offset = if self.protocol() == 6 { 16 } else { 6 };
        [1, kind, 0, 0, low, high, start_low, start_high, offset, 0]
    }

    /// The segments of the packet.
    pub(crate) fn segments(&self, bytes: usize) -> Vec<Packet> {
        let count = self.payload.len().div_ceil(bytes);
        let segment = |(index, payload): (usize, &[u8])| {
            let mut packet = Packet { payload: payload.to_vec(), ..self.clone() };
            if let Ip::V4 { id, .. } = &mut packet.ip {
                *id = id.wrapping_add(u16::try_from(index).unwrap());
            }
            if let Transport::Tcp { sequence, flags, .. } = &mut packet.transport {
                *sequence = sequence.wrapping_add(u32::try_from(index * bytes).unwrap());
                *flags &= if index + 1 < count { !FIN_PSH } else { 0xff };
                *flags &= if index > 0 { !CWR } else { 0xff };
            }
            packet
        };
        self.payload.chunks(bytes).enumerate().map(segment).collect()
    }

    /// The bytes of the packet.
    pub(crate) fn frame(&self, checksum: Checksum) -> Vec<u8> {
        let mut frame = vec![0x11; 12];
        for vlan in 0..self.vlans {
            frame.extend(if vlan == 0 && self.vlans == 2 { [0x88, 0xa8, 0, 5] } else { [0x81, 0, 0, 9] });
        }
        let transport = self.transport_bytes(checksum);
        match &self.ip {
            Ip::V4 { addresses, id, options, tos } => {
                let length = u16::try_from(20 + options + transport.len()).unwrap().to_be_bytes();
                let words = u8::try_from(5 + options / 4).unwrap();
                let mut header = vec![0x40 | words, *tos, length[0], length[1]];
                header.extend(id.to_be_bytes());
                header.extend([0x40, 0, 64, self.protocol(), 0, 0]);
                header.extend(addresses);
                header.extend(vec![1; *options]);
                let sum = invert(sum(&header));
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                frame.extend([8, 0]);
                frame.extend(header);
            }
            Ip::V6 { addresses } => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend(u16::try_from(transport.len()).unwrap().to_be_bytes());
                frame.extend([self.protocol(), 64]);
                frame.extend(addresses);
            }
        }
        frame.extend(transport);
        frame
    }

    fn transport_bytes(&self, checksum: Checksum) -> Vec<u8> {
        let mut bytes = vec![0x12, 0x34, 0x56, 0x78];
        let field = match &self.transport {
            Transport::Tcp { sequence, flags, options } => {
                bytes.extend(sequence.to_be_bytes());
                bytes.extend([9, 9, 9, 9, u8::try_from((20 + options) / 4).unwrap() << 4, *flags]);
                bytes.extend([0x20, 0, 0, 0, 0, 0]);
                bytes.extend(vec![1; *options]);
                16
            }
            Transport::Udp => {
                bytes.extend(u16::try_from(8 + self.payload.len()).unwrap().to_be_bytes());
                bytes.extend([0, 0]);
                6
            }
        };
        bytes.extend(&self.payload);
        let mut pseudo = match &self.ip {
            Ip::V4 { addresses, .. } => addresses.to_vec(),
            Ip::V6 { addresses } => addresses.to_vec(),
        };
        pseudo.extend([0, self.protocol()]);
        pseudo.extend(u16::try_from(bytes.len()).unwrap().to_be_bytes());
        let pseudo = sum(&pseudo);
        let field_value = match checksum {
            Checksum::Partial => pseudo,
            Checksum::Complete => invert(end_around(u32::from(pseudo) + u32::from(sum(&bytes)))),
        };
        bytes[field..field + 2].copy_from_slice(&field_value.to_be_bytes());
        bytes
    }
}

/// Sum of 16-bit words, as defined in RFC 1071.
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    let mut sum = 0;
    for word in bytes.chunks(2) {
        let word = u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]);
        sum = u32::from(end_around(sum + u32::from(word)));
    }
    u16::try_from(sum).unwrap()
}

fn end_around(sum: u32) -> u16 {
    u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap()
}

fn invert(sum: u16) -> u16 {
    if sum == 0xffff { sum } else { !sum }
}
