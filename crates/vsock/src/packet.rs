//! Packet header of virtio-vsock (virtio 1.2, section 5.10) and the values of its fields.

use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 44;
/// Maximum payload of one packet in bytes, the same as in Linux.
pub const PAYLOAD_BYTES_MAX: u32 = 64 << 10;
/// CID of the host (`VMADDR_CID_HOST`).
pub const HOST_CID: u64 = 2;

/// A header (`struct virtio_vsock_hdr`), whose bytes are those of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C, packed)]
pub struct PacketHeader {
    /// CID of the sender.
    pub source_cid: u64,
    /// CID of the receiver.
    pub destination_cid: u64,
    /// Port of the sender.
    pub source_port: u32,
    /// Port of the receiver.
    pub destination_port: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// Number of a [`SocketType`].
    pub kind: u16,
    /// Number of an [`Operation`].
    pub operation: u16,
    /// [`ShutdownFlags`] or [`SeqFlags`], by operation.
    pub flags: u32,
    /// Size of the sender's receive buffer for the connection.
    pub buf_alloc: u32,
    /// Number of received bytes that left this buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

// The wire is little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// Operation of a packet, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Operation {
    /// Request for a connection.
    Request = 1,
    /// Acceptance of a connection.
    Response = 2,
    /// End of a connection, or answer to a packet of an unknown one (RST).
    Reset = 3,
    /// The sender sends, or receives, no more.
    Shutdown = 4,
    /// Payload (RW).
    ReadWrite = 5,
    /// Nothing but the sender's credit, which every header has.
    CreditUpdate = 6,
    /// Request for a credit update.
    CreditRequest = 7,
}

impl Operation {
    /// Returns the operation with this number. The specification reserves 0 as invalid.
    pub fn from_number(number: u16) -> Option<Self> {
        use Operation::{CreditRequest, CreditUpdate, ReadWrite, Request, Reset, Response, Shutdown};
        let all = [Request, Response, Reset, Shutdown, ReadWrite, CreditUpdate, CreditRequest];
        all.into_iter().find(|operation| operation.number() == number)
    }

    /// Returns its number.
    pub fn number(self) -> u16 {
        self as u16
    }
}

/// Type of a socket, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum SocketType {
    /// A stream of bytes (`SOCK_STREAM`).
    Stream = 1,
    /// Messages (`SOCK_SEQPACKET`).
    Seqpacket = 2,
}

impl SocketType {
    /// Returns the type with this number.
    pub fn from_number(number: u16) -> Option<Self> {
        [Self::Stream, Self::Seqpacket].into_iter().find(|kind| kind.number() == number)
    }

    /// Returns its number.
    pub fn number(self) -> u16 {
        self as u16
    }
}

bitflags::bitflags! {
    /// Flags of [`Operation::Shutdown`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct ShutdownFlags: u32 {
        /// The sender receives no more.
        const RECEIVE = 1;
        /// The sender sends no more.
        const SEND = 2;
    }

    /// Flags of [`Operation::ReadWrite`] between `SOCK_SEQPACKET` sockets.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SeqFlags: u32 {
        /// End of a message.
        const EOM = 1;
        /// End of a record (`MSG_EOR`).
        const EOR = 2;
    }
}

impl PacketHeader {
    /// Reads a header from its bytes, which are copied out of the guest's memory once, before they are
    /// interpreted.
    #[inline]
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        zerocopy::transmute!(*bytes)
    }

    /// Returns its bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        zerocopy::transmute!(*self)
    }

    /// Returns the RST in response to this packet.
    pub fn reset(&self) -> Self {
        Self {
            source_cid: self.destination_cid,
            destination_cid: self.source_cid,
            source_port: self.destination_port,
            destination_port: self.source_port,
            kind: self.kind,
            operation: Operation::Reset.number(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_byte_layout_of_the_specification() {
        let header = PacketHeader {
            source_cid: 3,
            destination_cid: 2,
            source_port: 0x1_0203,
            destination_port: 52,
            len: 7,
            kind: 1,
            operation: 5,
            flags: 0,
            buf_alloc: 0x4_0000,
            fwd_cnt: 9,
        };
        let bytes = [
            3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 2, 1, 0, 52, 0, 0, 0, 7, 0, 0, 0, 1, 0, 5, 0,
            0, 0, 0, 0, 0, 0, 4, 0, 9, 0, 0, 0,
        ];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(PacketHeader::parse(&bytes), header);
        let reset = header.reset();
        assert_eq!((reset.source_cid, reset.destination_port), (2, 0x1_0203));
        assert_eq!(Operation::from_number(reset.operation), Some(Operation::Reset));
    }

    #[test]
    fn operations_and_kinds_round_trip_through_their_numbers() {
        for number in 0..=u16::MAX {
            if let Some(operation) = Operation::from_number(number) {
                assert_eq!(operation.number(), number);
            }
            if let Some(kind) = SocketType::from_number(number) {
                assert_eq!(kind.number(), number);
            }
        }
        assert_eq!(Operation::from_number(0), None);
    }
}
