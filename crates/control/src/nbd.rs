//! Network Block Device (`doc/proto.md` of the NBD project, "fixed newstyle"), as QEMU speaks it: a client that reads a disk, or repeats what
//! another client wrote, and a server whose disks are only written.

mod client;
mod server;

use std::io::{self, Read};
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
    fn encode(self) -> Vec<u8> {
        let Self { flags, kind, cookie, offset, bytes } = self;
        let head = [&REQUEST.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&head[..], &cookie.to_be_bytes(), &offset.to_be_bytes(), &bytes.to_be_bytes()].concat()
    }

    fn decode(mut bytes: impl Read) -> io::Result<Self> {
        if bytes.u32()? != REQUEST {
            return Err(invalid("not an NBD request"));
        }
        Ok(Self {
            flags: bytes.u16()?,
            kind: bytes.u16()?,
            cookie: bytes.u64()?,
            offset: bytes.u64()?,
            bytes: bytes.u32()?,
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

/// Numbers of NBD are big-endian.
trait ReadNumbers: Read {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u16(&mut self) -> io::Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

impl<R: Read> ReadNumbers for R {}
