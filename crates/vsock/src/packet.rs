//! The header of a packet, as section 5.10 of virtio 1.2 has it, and what its fields can be.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 44;
/// The most bytes of payload in one packet; what Linux sends and takes at most.
pub const PAYLOAD_BYTES_MAX: u32 = 64 << 10;
/// The context of the host (`VMADDR_CID_HOST`).
pub const HOST_CID: u64 = 2;

/// A header, in wire order. Copied out of the guest's memory once, then decided upon.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Header {
    /// Context of whom it comes from.
    pub source_cid: U64,
    /// Context of whom it is for.
    pub destination_cid: U64,
    /// Port that it comes from.
    pub source_port: U32,
    /// Port that it is for.
    pub destination_port: U32,
    /// Bytes behind the header.
    pub len: U32,
    /// See [`Kind`].
    pub kind: U16,
    /// See [`Operation`].
    pub operation: U16,
    /// By operation: [`ShutdownFlags`] or [`SeqFlags`].
    pub flags: U32,
    /// How many bytes the sender of this can hold for the connection.
    pub buf_alloc: U32,
    /// How many of all that it received its user has taken, modulo 2^32.
    pub fwd_cnt: U32,
}

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Please let us be connected.
    Request,
    /// We are.
    Response,
    /// There is no such connection (any more).
    Reset,
    /// The sender will not send, or not receive, any more.
    Shutdown,
    /// Payload.
    ReadWrite,
    /// The sender's credit, which is in every header.
    CreditUpdate,
    /// Tell me your credit.
    CreditRequest,
}

impl Operation {
    /// By its number; 0 and what the standard does not know are none.
    pub fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::ReadWrite,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }

    /// Its number.
    pub fn number(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::ReadWrite => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// What a connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Bytes (`SOCK_STREAM`).
    Stream,
    /// Messages (`SOCK_SEQPACKET`).
    Seqpacket,
}

impl Kind {
    /// By its number.
    pub fn from_number(number: u16) -> Option<Self> {
        match number {
            1 => Some(Self::Stream),
            2 => Some(Self::Seqpacket),
            _ => None,
        }
    }

    /// Its number.
    pub fn number(self) -> u16 {
        match self {
            Self::Stream => 1,
            Self::Seqpacket => 2,
        }
    }
}

bitflags::bitflags! {
    /// The flags of a [`Operation::Shutdown`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct ShutdownFlags: u32 {
        /// Its sender receives no more.
        const RECEIVE = 1;
        /// Its sender sends no more.
        const SEND = 2;
    }

    /// The flags of a [`Operation::ReadWrite`] of messages.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SeqFlags: u32 {
        /// The message ends here.
        const EOM = 1;
        /// And so does the record.
        const EOR = 2;
    }
}

impl Header {
    /// A header out of its bytes.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self::read_from_bytes(bytes).expect("any bytes of this length are a header")
    }

    /// A reset that answers this packet.
    pub fn reset(&self) -> Self {
        Self {
            source_cid: self.destination_cid,
            destination_cid: self.source_cid,
            source_port: self.destination_port,
            destination_port: self.source_port,
            kind: self.kind,
            operation: Operation::Reset.number().into(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_bytes_of_the_standard() {
        let header = Header {
            source_cid: 3.into(),
            destination_cid: 2.into(),
            source_port: 0x1_0203.into(),
            destination_port: 52.into(),
            len: 7.into(),
            kind: 1.into(),
            operation: 5.into(),
            flags: 0.into(),
            buf_alloc: 0x4_0000.into(),
            fwd_cnt: 9.into(),
        };
        let bytes = [
            3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 2, 1, 0, 52, 0, 0, 0, 7, 0, 0, 0, 1, 0, 5, 0,
            0, 0, 0, 0, 0, 0, 4, 0, 9, 0, 0, 0,
        ];
        assert_eq!(header.as_bytes(), bytes);
        assert_eq!(Header::parse(&bytes), header);
        let reset = header.reset();
        assert_eq!((reset.source_cid.get(), reset.destination_port.get()), (2, 0x1_0203));
        assert_eq!(Operation::from_number(reset.operation.get()), Some(Operation::Reset));
    }

    #[test]
    fn numbers_lead_there_and_back() {
        for number in 0..=u16::MAX {
            if let Some(operation) = Operation::from_number(number) {
                assert_eq!(operation.number(), number);
            }
            if let Some(kind) = Kind::from_number(number) {
                assert_eq!(kind.number(), number);
            }
        }
        assert_eq!(Operation::from_number(0), None);
    }
}
