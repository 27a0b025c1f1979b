//! The lanes: QEMU's multifd channels (`migration/multifd.[ch]`).
//!
//! ```text
//!   lane     init (64 bytes) · { packet header (1344 bytes for 4 KiB pages) · pages }*
//!   header   magic version flags pages_alloc | normal_pages data_bytes packet_num | zero_pages 0… | block[256] | offsets
//! ```
//!
//! All pages of a packet belong to one block, at most 128 of 4 KiB; their contents follow in the order of the
//! offsets. A packet with SYNC ends a lane's part of a pass: the destination's lane waits there until the
//! main channel's barrier.
//!
//! QEMU ≥ 9.0 clears the header for each packet and sends SYNC in a separate one, whose `pages_alloc` is 0.
//! Older ones set SYNC on the lane's last packet with pages if that is still queued, send an empty packet
//! after it, and do not clear unused header fields: without pages, size, number, name and offsets are those
//! of the packet before.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::limits;
use crate::ram::{BlockIndex, PAGE_SIZE, RamBlock};
use crate::wire::{Reader, lossy};
use crate::{InvalidMessage, PeerIncompatible, PeerMisbehaved, Result};

/// The first word of an init packet and of every header.
pub const MAGIC: u32 = 0x1122_3344;
/// The second.
pub const VERSION: u32 = 1;
/// Pages of one packet.
pub const PACKET_PAGES: usize = limits::PACKET_DATA_BYTES_MAX / PAGE_SIZE as usize;
/// Bytes of a packet's header, which is always sent whole.
pub const HEADER_BYTES: usize = OFFSETS + 8 * PACKET_PAGES;
/// Bytes of an init packet.
pub const INIT_BYTES: usize = 64;

const NAME: usize = 64;
const NAME_BYTES: usize = 256;
const OFFSETS: usize = NAME + NAME_BYTES;
const SYNC: u32 = 1;
const METHOD: u32 = 0b11_1110;
const DEVICE_STATE: u32 = 0x40;

/// The first bytes of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Init {
    /// The VM's uuid, all zero if it has none. A QEMU destination requires its own.
    pub uuid: [u8; 16],
    /// The lane's number.
    pub id: u8,
}

impl Init {
    /// Encodes it.
    pub fn encode(&self) -> [u8; INIT_BYTES] {
        let mut bytes = [0; INIT_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_be_bytes());
        bytes[8..24].copy_from_slice(&self.uuid);
        bytes[24] = self.id;
        bytes
    }

    /// Reads an init packet.
    pub fn decode(bytes: &[u8; INIT_BYTES]) -> Result<Self> {
        let mut input = Reader::new(bytes);
        check_magic(&mut input)?;
        let uuid = field(input.array());
        Ok(Self { uuid, id: field(input.u8()) })
    }
}

/// Checks that the lanes of one migration number themselves 0..N-1 and carry one uuid.
#[derive(Debug)]
pub struct LaneRegistry {
    seen: Vec<bool>,
    uuid: Option<[u8; 16]>,
}

impl LaneRegistry {
    /// For `lanes` lanes.
    pub fn new(lanes: usize) -> Self {
        Self { seen: alloc::vec![false; lanes], uuid: None }
    }

    /// Takes a lane in; returns its index.
    pub fn register(&mut self, init: &Init) -> Result<usize> {
        let index = usize::from(init.id);
        let lanes = self.seen.len();
        let taken = self.seen.get_mut(index);
        let taken = taken.ok_or(PeerMisbehaved::LaneOutOfRange { id: init.id, lanes })?;
        if *taken {
            return Err(PeerMisbehaved::DuplicateLane { id: init.id }.into());
        }
        let uuid = *self.uuid.get_or_insert(init.uuid);
        if uuid != init.uuid {
            let (found, expected) = (uuid_text(&init.uuid), uuid_text(&uuid));
            return Err(PeerMisbehaved::LaneUuid { found, expected }.into());
        }
        *taken = true;
        Ok(index)
    }

    /// The uuid that the lanes carry, once known.
    pub fn uuid(&self) -> Option<[u8; 16]> {
        self.uuid
    }
}

/// A uuid as people write it.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let uuid = u128::from_be_bytes(*uuid);
    let [b, c, d] = [80, 64, 48].map(|shift| uuid >> shift & 0xffff);
    format!("{:08x}-{b:04x}-{c:04x}-{d:04x}-{:012x}", uuid >> 96, uuid & 0xffff_ffff_ffff)
}

/// Compression of a packet's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "QEMU's `multifd-compression` values")]
pub enum Method {
    #[default]
    None = 0x00,
    Zlib = 0x02,
    Zstd = 0x04,
    Qpl = 0x08,
    Uadk = 0x10,
    Qatzip = 0x20,
}

impl Method {
    fn decode(bits: u32) -> Option<Self> {
        let all = [Self::None, Self::Zlib, Self::Zstd, Self::Qpl, Self::Uadk, Self::Qatzip];
        all.into_iter().find(|method| *method as u32 == bits)
    }

    /// QEMU's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Qpl => "qpl",
            Self::Uadk => "uadk",
            Self::Qatzip => "qatzip",
        }
    }
}

/// A packet, without its pages' contents.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Packet {
    /// The lane's part of the pass ends after this packet's pages.
    pub sync: bool,
    /// Compression of the contents.
    pub method: Method,
    /// `None` in a packet without pages.
    pub block: Option<BlockIndex>,
    /// Bytes of contents that follow the header.
    pub data_bytes: u32,
    /// One counter over all lanes, with repetitions before QEMU 9.0; nothing depends on it.
    pub packet_num: u64,
    /// Capacity of the offset array in the header: 128, or 0 in the SYNC packets of QEMU ≥ 9.0. Not used.
    pub pages_alloc: u32,
    /// Offsets of the pages whose contents follow.
    pub normal: Vec<u64>,
    /// Offsets of zero pages (machine types ≥ 9.0).
    pub zero: Vec<u64>,
}

impl Packet {
    /// A packet that only ends a pass.
    pub fn sync(packet_num: u64) -> Self {
        Self { sync: true, packet_num, ..Self::default() }
    }

    /// Writes the header.
    ///
    /// # Panics
    /// If there are more than [`PACKET_PAGES`] pages.
    pub fn encode(&self, blocks: &[RamBlock], out: &mut [u8; HEADER_BYTES]) {
        let flags = u32::from(self.sync) | self.method as u32;
        let count = |pages: &[u64]| u32::try_from(pages.len()).expect("bounded by PACKET_PAGES");
        let words = [MAGIC, VERSION, flags, self.pages_alloc, count(&self.normal), self.data_bytes];
        out[..OFFSETS].fill(0);
        for (slot, word) in out.chunks_exact_mut(4).zip(words) {
            slot.copy_from_slice(&word.to_be_bytes());
        }
        out[24..32].copy_from_slice(&self.packet_num.to_be_bytes());
        out[32..36].copy_from_slice(&count(&self.zero).to_be_bytes());
        if let Some(block) = self.block {
            let name = blocks[block.index()].name.as_bytes();
            out[NAME..NAME + name.len()].copy_from_slice(name);
        }
        let offsets = &mut out[OFFSETS..];
        let used = self.normal.len() + self.zero.len();
        assert!(used <= PACKET_PAGES, "{used} pages in one packet");
        for (slot, offset) in offsets.chunks_exact_mut(8).zip(self.normal.iter().chain(&self.zero)) {
            slot.copy_from_slice(&offset.to_be_bytes());
        }
        offsets[8 * used..].fill(0);
    }

    /// Reads a header, of a guest with these `blocks`.
    pub fn decode(bytes: &[u8; HEADER_BYTES], blocks: &[RamBlock]) -> Result<Self> {
        let mut input = Reader::new(bytes);
        check_magic(&mut input)?;
        let flags = field(input.be32());
        let (sync, method) = decode_flags(flags)?;
        let pages_alloc = bounded("pages_alloc", field(input.be32()), PACKET_PAGES)?;
        let normal_pages = bounded("normal_pages", field(input.be32()), PACKET_PAGES)?;
        let announced_bytes = field(input.be32());
        let packet_num = field(input.be64());
        let zero_pages = bounded("zero_pages", field(input.be32()), PACKET_PAGES - normal_pages as usize)?;
        // No contents follow a packet without normal pages: an old QEMU leaves a stale size in it.
        let data_bytes = if normal_pages == 0 { 0 } else { announced_bytes };
        check_size(method, normal_pages, data_bytes)?;
        let block = match normal_pages + zero_pages {
            0 => None,
            _ => Some(decode_block(&bytes[NAME..OFFSETS], blocks)?),
        };
        input.rewind(OFFSETS);
        let mut offsets =
            |count| decode_offsets(&mut input, count, block.map(|block| &blocks[block.index()]));
        let (normal, zero) = (offsets(normal_pages)?, offsets(zero_pages)?);
        Ok(Self { sync, method, block, data_bytes, packet_num, pages_alloc, normal, zero })
    }
}

fn check_magic(input: &mut Reader<'_>) -> Result<()> {
    match field(input.be32()) {
        MAGIC => {}
        found => return Err(InvalidMessage::MultifdMagic { found }.into()),
    }
    match field(input.be32()) {
        VERSION => Ok(()),
        found => Err(InvalidMessage::MultifdVersion { found }.into()),
    }
}

fn decode_flags(flags: u32) -> Result<(bool, Method)> {
    if flags & DEVICE_STATE != 0 {
        let what = "device state on a lane (VFIO's x-migration-multifd-transfer)";
        return Err(PeerIncompatible::Feature { what, switch: "x-migration-multifd-transfer" }.into());
    }
    let method = Method::decode(flags & METHOD).filter(|_| flags & !(SYNC | METHOD) == 0);
    let limit = u64::from(SYNC | METHOD);
    let method = method.ok_or(InvalidMessage::Packet { what: "flags", found: flags.into(), limit })?;
    Ok((flags & SYNC != 0, method))
}

fn bounded(what: &'static str, found: u32, limit: usize) -> Result<u32> {
    if found as usize <= limit {
        Ok(found)
    } else {
        Err(InvalidMessage::Packet { what, found: found.into(), limit: limit as u64 }.into())
    }
}

fn check_size(method: Method, pages: u32, data_bytes: u32) -> Result<()> {
    let expected = u64::from(pages) * PAGE_SIZE;
    let limit = limits::PACKET_COMPRESSED_BYTES_MAX;
    match method {
        Method::None if u64::from(data_bytes) != expected => {
            Err(InvalidMessage::PacketSize { found: data_bytes.into(), pages, expected }.into())
        }
        _ => bounded("data size", data_bytes, limit).map(drop),
    }
}

fn decode_block(field: &[u8], blocks: &[RamBlock]) -> Result<BlockIndex> {
    let end = field.iter().position(|&byte| byte == 0).ok_or(InvalidMessage::PacketName)?;
    let name = &field[..end];
    let found = blocks.iter().position(|block| block.name.as_bytes() == name);
    let index = found.ok_or_else(|| PeerMisbehaved::UnknownBlock { name: lossy(name) })?;
    Ok(BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX")))
}

fn decode_offsets(input: &mut Reader<'_>, count: u32, block: Option<&RamBlock>) -> Result<Vec<u64>> {
    let mut offsets = Vec::with_capacity(count as usize);
    let Some(block) = block else { return Ok(offsets) };
    for _ in 0..count {
        let offset = field(input.be64());
        check_offset(offset, block)?;
        offsets.push(offset);
    }
    Ok(offsets)
}

/// Checks that `offset` names a page of `block`.
pub(crate) fn check_offset(offset: u64, block: &RamBlock) -> Result<()> {
    if offset.is_multiple_of(PAGE_SIZE)
        && offset.checked_add(PAGE_SIZE).is_some_and(|end| end <= block.length)
    {
        return Ok(());
    }
    Err(InvalidMessage::PageOffset { block: block.name.clone(), offset, length: block.length }.into())
}

/// Fixed-size arrays cannot end early.
fn field<T>(value: Result<T, crate::wire::Incomplete>) -> T {
    value.expect("the field lies within the fixed-size packet")
}
