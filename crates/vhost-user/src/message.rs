//! The messages of vhost-user, as bytes and as values, without I/O.
//!
//! ```text
//!   0        4        8        12
//!   | request | flags  | length | payload ...            descriptors belong to the first byte
//!               bits 0-1 version 1, bit 2 reply, bit 3 need_reply
//! ```
//! Numbers are little-endian (native in the specification; both ends share a machine). The source of the
//! format is QEMU's `docs/interop/vhost-user.rst`. Lengths of payloads and numbers of descriptors must match
//! their request; everything else is a [`MessageError`] before the request has any effect.

mod code;
mod error;
mod reply;
mod request;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use code::{PAYLOAD_BYTES_MAX, RequestCode, TABLE_REGIONS_MAX};
pub use error::MessageError;
pub use reply::Reply;
pub use request::{LogMemory, Request, TransferDirection, VringFd};

/// Size of a header.
pub const HEADER_BYTES: usize = 12;
/// Maximum size of the configuration space in one message (`VHOST_USER_MAX_CONFIG_SIZE`).
pub const CONFIG_BYTES_MAX: usize = 256;

pub(crate) const VERSION: u32 = 1;
pub(crate) const VERSION_MASK: u32 = 3;
pub(crate) const FLAG_REPLY: u32 = 1 << 2;
pub(crate) const FLAG_NEED_REPLY: u32 = 1 << 3;
/// In the payload of requests with one descriptor: the descriptor is absent (`VHOST_USER_VRING_NOFD_MASK`).
pub(crate) const NO_FD: u64 = 1 << 8;

/// Header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHeader {
    /// The request.
    pub code: RequestCode,
    /// True if the frontend requests an acknowledgement.
    pub need_reply: bool,
    /// Length of the payload in bytes, at most [`PAYLOAD_BYTES_MAX`].
    pub length: usize,
}

impl MessageHeader {
    /// Parses a frontend's header.
    ///
    /// # Errors
    /// [`MessageError::Version`], [`MessageError::ReplyAsRequest`], [`MessageError::TooLong`]. The stream
    /// cannot be read further.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let words: [U32; 3] = zerocopy::transmute!(*bytes);
        let [code, flags, length] = words.map(U32::get);
        let code = RequestCode(code);
        if flags & VERSION_MASK != VERSION {
            return Err(MessageError::Version { code, found: flags & VERSION_MASK });
        }
        if flags & FLAG_REPLY != 0 {
            return Err(MessageError::ReplyAsRequest { code });
        }
        let length = length as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Err(MessageError::TooLong { code, found: length });
        }
        Ok(Self { code, need_reply: flags & FLAG_NEED_REPLY != 0, length })
    }

    /// Encodes the header of a request.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let need_reply = if self.need_reply { FLAG_NEED_REPLY } else { 0 };
        header_bytes(self.code, VERSION | need_reply, self.length)
    }
}

/// Encodes the header of a request or reply.
pub(crate) fn header_bytes(code: RequestCode, flags: u32, length: usize) -> [u8; HEADER_BYTES] {
    let length = u32::try_from(length).expect("a payload has at most PAYLOAD_BYTES_MAX bytes");
    zerocopy::transmute!([code.0, flags, length].map(U32::new))
}

/// A region of guest memory (`VhostUserMemoryRegion`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// Guest address.
    pub guest_address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Address in the frontend's process, which is also used for rings.
    pub user_address: u64,
    /// Offset in the file of its descriptor.
    pub mmap_offset: u64,
}

impl RegionInfo {
    pub(crate) fn from_wire(fields: RawRegion) -> Self {
        let [guest_address, size, user_address, mmap_offset] = fields.map(U64::get);
        Self { guest_address, size, user_address, mmap_offset }
    }

    pub(crate) fn to_wire(self) -> RawRegion {
        [self.guest_address, self.size, self.user_address, self.mmap_offset].map(U64::new)
    }
}

/// User addresses of the parts of a ring (`vhost_vring_addr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringAddress {
    /// Number of the ring.
    pub index: u32,
    /// Bit 0: writes to the used ring are logged, at `log`.
    pub flags: u32,
    /// The descriptor table.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub available: u64,
    /// Guest address of the used ring, for the log.
    pub log: u64,
}

/// A ring and a number: its size, index, or enabled state (`vhost_vring_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringState {
    /// Number of the ring.
    pub index: u32,
    /// The number.
    pub number: u32,
}

// Fields of structures, in the order of the wire.

/// [`RegionInfo`].
pub(crate) type RawRegion = [U64; 4];
/// [`VringState`].
pub(crate) type RawVringState = [U32; 2];
/// Before a part of the configuration space: offset, size, flags (`VhostUserConfig`).
pub(crate) type RawConfig = [U32; 3];
/// Before the regions of a table: their number, padding (`VhostUserMemory`).
pub(crate) type RawTable = [U32; 2];

/// A descriptor of a ring (`struct virtq_desc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawDescriptor {
    pub(crate) address: U64,
    pub(crate) length: U32,
    pub(crate) flags: U16,
    pub(crate) next: U16,
}
