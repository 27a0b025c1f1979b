//! Network Block Device (`doc/proto.md` of the NBD project, "fixed newstyle"), as QEMU speaks it: a client that reads a disk, or repeats what
//! another client wrote, and a server whose disks are only written.

mod client;
mod server;

use std::io;
use std::ops::Range;

pub(crate) use client::NbdClient;
pub(crate) use server::{Change, Export, NbdServer};

const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const REPLY: u32 = 0x668e_33ef;

const GO: u32 = 7;
const ACK: u32 = 1;
/// A piece of information about an export, and that with its size.
const INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// Bit of the kinds of replies to options that are errors.
const OPTION_ERROR: u32 = 1 << 31;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

/// Length of a request without its content.
const REQUEST_BYTES: usize = 28;
/// Longest content of a write: QEMU sends no more.
const CONTENT_BYTES_MAX: u32 = 32 << 20;

/// A request, without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    flags: u16,
    kind: u16,
    cookie: u64,
    offset: u64,
    bytes: u32,
}

impl Request {
    fn encode(self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.bytes.to_be_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> io::Result<Self> {
        Self::parse(bytes).ok_or_else(|| invalid("not an NBD request"))
    }

    fn parse(mut bytes: &[u8]) -> Option<Self> {
        if u32::from_be_bytes(take(&mut bytes)?) != REQUEST {
            return None;
        }
        Some(Self {
            flags: u16::from_be_bytes(take(&mut bytes)?),
            kind: u16::from_be_bytes(take(&mut bytes)?),
            cookie: u64::from_be_bytes(take(&mut bytes)?),
            offset: u64::from_be_bytes(take(&mut bytes)?),
            bytes: u32::from_be_bytes(take(&mut bytes)?),
        })
    }

    /// Length of the content that follows it.
    fn content_bytes(&self) -> io::Result<usize> {
        match self.kind {
            WRITE if self.bytes > CONTENT_BYTES_MAX => {
                Err(invalid(format!("an NBD write of {} bytes", self.bytes)))
            }
            WRITE => Ok(self.bytes as usize),
            _ => Ok(0),
        }
    }

    /// The part of a disk of this size that it changes; `None`: it changes none, or one that is not there.
    fn changes(&self, disk_bytes: u64) -> Option<Range<u64>> {
        let end = self.offset.checked_add(self.bytes.into()).filter(|end| *end <= disk_bytes)?;
        [WRITE, TRIM, WRITE_ZEROES].contains(&self.kind).then_some(self.offset..end)
    }
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// Takes the next bytes.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = bytes.split_first_chunk()?;
    *bytes = left;
    Some(*taken)
}
