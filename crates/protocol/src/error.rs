//! Errors of a stream, by the party at fault.

use alloc::string::String;

use crate::limits;

/// A stream that cannot be decoded any further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes violate the format.
    #[error("invalid migration stream: {0}")]
    Invalid(#[from] InvalidMessage),
    /// Well-formed, but not at this place.
    #[error("the peer broke the migration protocol: {0}")]
    Misbehaved(#[from] PeerMisbehaved),
    /// Legal, but not supported by this side.
    #[error("the peer wants what cannot be done here: {0}")]
    Incompatible(#[from] PeerIncompatible),
}

/// Bytes that no version of the format has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum InvalidMessage {
    #[error(
        "it begins with {found:#010x}, not with QEMU's magic 0x5145564d: is the other end really migrating a guest here?"
    )]
    Magic { found: u32 },
    #[error("stream version {found}, expected 3")]
    Version { found: u32 },
    #[error("section type {found:#04x} where {expected} was expected")]
    SectionType { found: u8, expected: &'static str },
    #[error("{what} is {found} bytes long, the limit is {limit}")]
    TooLong { what: &'static str, found: u64, limit: u64 },
    #[error("{what} is not UTF-8: {shown:?}")]
    Text { what: &'static str, shown: String },
    #[error("section footer names section {found}, the open section is {expected}")]
    Footer { found: u32, expected: u32 },
    #[error("the block list announces {total} bytes of RAM, more than {}", limits::RAM_BYTES_MAX)]
    RamTotal { total: u64 },
    #[error("block {name:?} has {length} bytes, but only {left} of the announced total are left")]
    BlockLength { name: String, length: u64, left: u64 },
    #[error("block {name:?} has {length} bytes, not a multiple of the page size {page_size}")]
    BlockAlignment { name: String, length: u64, page_size: u64 },
    #[error("more than {} RAM blocks", limits::BLOCKS_MAX)]
    TooManyBlocks,
    #[error("block {name:?} is listed twice")]
    DuplicateBlock { name: String },
    #[error("record flags {flags:#x} at offset {offset:#x} of the ram section")]
    RecordFlags { flags: u64, offset: u64 },
    #[error("a record continues the block before it, but there is none")]
    NothingToContinue,
    #[error("page offset {offset:#x} of block {block:?} lies outside its {length} bytes")]
    PageOffset { block: String, offset: u64, length: u64 },
    #[error("fill byte {found:#04x} of a zero page in block {block:?}")]
    FillByte { block: String, found: u8 },
    #[error("XBZRLE: {0}")]
    Xbzrle(&'static str),
    #[error("command {command} has {found} bytes of data, expected {expected}")]
    CommandLength { command: u16, found: usize, expected: usize },
    #[error("the checkpoint does not fit the {limit} bytes that are set for one")]
    CheckpointTooLarge { limit: usize },
    #[error("return-path message {kind} has {found} bytes of data, expected {expected}")]
    ReturnPathLength { kind: u16, found: usize, expected: usize },
    #[error("multifd magic {found:#010x}, expected 0x11223344")]
    MultifdMagic { found: u32 },
    #[error("multifd version {found}, expected 1")]
    MultifdVersion { found: u32 },
    #[error("multifd packet: {what} is {found}, at most {limit} is allowed")]
    Packet { what: &'static str, found: u64, limit: u64 },
    #[error("multifd packet announces {found} bytes for {pages} pages, expected {expected}")]
    PacketSize { found: u64, pages: u32, expected: u64 },
    #[error("multifd packet: its {method} data cannot be decompressed: {fault}")]
    Compressed { method: &'static str, fault: String },
    #[error("multifd packet: its {method} data decompresses to {found} bytes of pages, expected {expected}")]
    CompressedTooShort { method: &'static str, found: usize, expected: usize },
    #[error("multifd packet: its {method} data decompresses to more than the {expected} bytes of its pages")]
    CompressedTooLong { method: &'static str, expected: usize },
    #[error("multifd packet: block name without its end")]
    PacketName,
    #[error("mapped-ram header of block {block:?}: {what} is {found}, expected {expected}")]
    MappedRam { block: String, what: &'static str, found: u64, expected: u64 },
    #[error("the description after the device state is not a JSON object with devices: {0}")]
    Description(String),
    #[error(
        "the description lists device {name:?} instance {instance}, whose section is not in the device state"
    )]
    DeviceMissing { name: String, instance: u32 },
    #[error(
        "pages are asked for at {start:#x}, {length:#x} bytes, of block {block:?}, which has {total:#x} bytes"
    )]
    Request { block: String, start: u64, length: u64, total: u64 },
    #[error("bitmap of received pages of block {block:?}: {what} {found:#x}, expected {expected:#x}")]
    Bitmap { block: String, what: &'static str, found: u64, expected: u64 },
    #[error("the stream ends inside {what}")]
    Truncated { what: &'static str },
    #[error("the other end replies with TLS: turn TLS on here, or off there")]
    Tls,
}

/// Legal bytes, illegal behaviour.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum PeerMisbehaved {
    #[error("{found} came where {expected} was expected")]
    Unexpected { found: String, expected: &'static str },
    #[error("block {name:?} is used, but the block list does not have it")]
    UnknownBlock { name: String },
    #[error("section {id} is continued, but the open iterable section is {expected}")]
    UnknownSection { id: u32, expected: u32 },
    #[error("lane {id} connected twice")]
    DuplicateLane { id: u8 },
    #[error(
        "a lane announced itself as number {id}; {lanes} are expected (multifd-channels differs between the two ends)"
    )]
    LaneOutOfRange { id: u8, lanes: usize },
    #[error("a lane carries the VM uuid {found}, the others {expected}")]
    LaneUuid { found: String, expected: String },
    #[error(
        "compression method {found} on a lane, expected {expected} (multifd-compression differs between the two ends)"
    )]
    Compression { found: &'static str, expected: &'static str },
    #[error("PONG {found} answers no PING that was sent")]
    Pong { found: u32 },
    #[error("the destination says that it failed to load the guest (SHUT {status})")]
    ShutWithError { status: u32 },
}

/// A feature that another implementation may use and this one lacks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum PeerIncompatible {
    #[error("{what} (switch {switch} off at the source)")]
    Feature { what: &'static str, switch: &'static str },
    #[error(
        "section {name:?} (instance {instance}) is transferred piecewise, and its length is nowhere in the stream: only `ram` can be read so"
    )]
    IterableSection { name: String, instance: u32 },
    #[error(
        "device {name:?} (instance {instance}) comes before the memory (early setup, as virtio-mem does), and its length is nowhere in the stream"
    )]
    EarlyDevice { name: String, instance: u32 },
    #[error("section {name:?} has version {found}, this side knows up to {known}")]
    SectionVersion { name: String, found: u32, known: u32 },
    #[error(
        "the stream opens no return path, so the source would not learn of a failure: set the capability return-path at the source"
    )]
    NoReturnPath,
}

/// Refuses what is longer than its limit.
pub(crate) fn check_length(what: &'static str, found: u64, limit: usize) -> Result<(), InvalidMessage> {
    let limit = limit as u64;
    if found > limit { Err(InvalidMessage::TooLong { what, found, limit }) } else { Ok(()) }
}
