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
        let RawHeader { code, flags, length } =
            RawHeader::read_from_bytes(bytes).expect("HEADER_BYTES are a header");
        let (code, flags, length) = (RequestCode(code.get()), flags.get(), length.get());
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
        RawHeader::bytes(self.code, VERSION | need_reply, self.length)
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    code: U32,
    flags: U32,
    length: U32,
}

impl RawHeader {
    pub(crate) fn bytes(code: RequestCode, flags: u32, length: usize) -> [u8; HEADER_BYTES] {
        let length = u32::try_from(length).expect("a payload has at most PAYLOAD_BYTES_MAX bytes");
        let header = Self { code: code.0.into(), flags: flags.into(), length: length.into() };
        zerocopy::transmute!(header)
    }
}

/// Declares a structure with plain integers, and its layout in messages.
macro_rules! structure {
    (
        $(#[$doc:meta])*
        $name:ident, $raw:ident { $($(#[$field_doc:meta])* $field:ident: $integer:ty as $wire:ty,)* }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $integer,)*
        }

        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub(crate) struct $raw {
            $($field: $wire,)*
        }

        impl From<$raw> for $name {
            fn from(raw: $raw) -> Self {
                Self { $($field: raw.$field.get(),)* }
            }
        }

        impl From<$name> for $raw {
            fn from(value: $name) -> Self {
                Self { $($field: value.$field.into(),)* }
            }
        }
    };
}

structure! {
    /// A region of guest memory (`VhostUserMemoryRegion`).
    RegionInfo, RawRegion {
        /// Guest address.
        guest_address: u64 as U64,
        /// Length in bytes.
        size: u64 as U64,
        /// Address in the frontend's process, which is also used for rings.
        user_address: u64 as U64,
        /// Offset in the file of its descriptor.
        mmap_offset: u64 as U64,
    }
}

structure! {
    /// User addresses of the parts of a ring (`vhost_vring_addr`).
    VringAddress, RawVringAddress {
        /// Number of the ring.
        index: u32 as U32,
        /// Bit 0: writes to the used ring are logged, at `log`.
        flags: u32 as U32,
        /// The descriptor table.
        descriptors: u64 as U64,
        /// The used ring.
        used: u64 as U64,
        /// The available ring.
        available: u64 as U64,
        /// Guest address of the used ring, for the log.
        log: u64 as U64,
    }
}

structure! {
    /// A ring and a number: its size, index, or enabled state (`vhost_vring_state`).
    VringState, RawVringState {
        /// Number of the ring.
        index: u32 as U32,
        /// The number.
        number: u32 as U32,
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawLog {
    pub(crate) size: U64,
    pub(crate) offset: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawConfig {
    pub(crate) offset: U32,
    pub(crate) size: U32,
    pub(crate) flags: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawTable {
    pub(crate) regions: U32,
    pub(crate) padding: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawStateTransfer {
    pub(crate) direction: U32,
    pub(crate) phase: U32,
}

/// A descriptor of a ring (`struct virtq_desc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawDescriptor {
    pub(crate) address: U64,
    pub(crate) length: U32,
    pub(crate) flags: U16,
    pub(crate) next: U16,
}
