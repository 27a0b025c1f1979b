//! A client of QEMU's NBD server, which reads a disk and one of its bitmaps (the NBD protocol, "fixed newstyle", structured replies).

use std::io::{self, BufReader, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x668e_33ef;
/// `NBD_FLAG_C_FIXED_NEWSTYLE` and `NBD_FLAG_C_NO_ZEROES`.
const CLIENT_FLAGS: u32 = 3;

const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;
const SET_META_CONTEXT: u32 = 10;
const ACK: u32 = 1;
/// Bit of the kinds of replies to options, and to requests, that are errors.
const OPTION_ERROR: u32 = 1 << 31;
const ERROR: u16 = 1 << 15;

const READ: u16 = 0;
const BLOCK_STATUS: u16 = 7;
const NONE: u16 = 0;
const OFFSET_DATA: u16 = 1;
const OFFSET_HOLE: u16 = 2;
const BLOCK_STATUS_REPLY: u16 = 5;
/// Flag of the last chunk of a reply.
const DONE: u16 = 1;
/// Status of a part of a disk that its bitmap has.
const DIRTY: u32 = 1;

/// Longest reply to an option, and description of a disk's parts or of an error.
const REPLY_BYTES_MAX: u32 = 4 << 20;
/// Replies to one option, of which each announces something else.
const OPTION_REPLIES_MAX: usize = 64;
/// Chunks of one reply: more than there are sectors in what is read at a time.
const CHUNKS_MAX: usize = 1 << 16;
/// Bytes whose status is queried at a time: a multiple of any bitmap's granularity.
const STATUS_BYTES: u64 = 1 << 30;

/// A part of a reply, whose content follows.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    kind: u16,
    bytes: u32,
}

/// A connection to an export.
#[derive(Debug)]
pub(super) struct NbdClient {
    /// Buffered, as replies have small heads.
    stream: BufReader<UnixStream>,
    requests: u64,
}

impl NbdClient {
    /// Connects to the export of this name, and selects a bitmap of it. `timeout` is that of each reply.
    ///
    /// # Errors
    /// The system's; the server has no such export or bitmap; `InvalidData` for what is not NBD.
    pub(super) fn connect(
        socket: &Path,
        export: &str,
        bitmap: Option<&str>,
        timeout: Duration,
    ) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let mut this = Self { stream: BufReader::new(stream), requests: 0 };
        if (this.u64()?, this.u64()?) != (GREETING, OPTION) {
            return Err(unexpected("its greeting"));
        }
        let _flags = this.u16()?;
        this.send(&CLIENT_FLAGS.to_be_bytes())?;
        this.option(STRUCTURED_REPLY, &[])?;
        let mut name = length(export.len()).to_vec();
        name.extend(export.as_bytes());
        if let Some(bitmap) = bitmap {
            let query = format!("qemu:dirty-bitmap:{bitmap}");
            let data = [&name[..], &length(1), &length(query.len()), query.as_bytes()].concat();
            if this.option(SET_META_CONTEXT, &data)? < 1 {
                return Err(io::Error::other(format!("{export} has no bitmap {bitmap}")));
            }
        }
        // No information is requested.
        name.extend([0; 2]);
        this.option(GO, &name)?;
        Ok(this)
    }

    /// Sends an option. Returns the number of things that the server has announced before it acknowledged that.
    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<usize> {
        let head = [&OPTION.to_be_bytes()[..], &option.to_be_bytes(), &length(data.len()), data].concat();
        self.send(&head)?;
        for announced in 0..OPTION_REPLIES_MAX {
            let (magic, of) = (self.u64()?, self.u32()?);
            let (kind, bytes) = (self.u32()?, self.u32()?);
            if (magic, of) != (OPTION_REPLY, option) || bytes > REPLY_BYTES_MAX {
                return Err(unexpected("a reply to an option"));
            }
            let data = self.bytes(bytes as usize)?;
            match kind {
                ACK => return Ok(announced),
                kind if kind & OPTION_ERROR != 0 => {
                    return Err(io::Error::other(format!(
                        "NBD option {option}: error {:#x}: {}",
                        kind & !OPTION_ERROR,
                        String::from_utf8_lossy(&data)
                    )));
                }
                _ => {}
            }
        }
        Err(unexpected("many replies to an option"))
    }

    /// Reads the disk from this offset on.
    ///
    /// # Errors
    /// The system's; the disk cannot be read there.
    pub(super) fn read(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut left = buffer.len();
        self.request(READ, offset, buffer.len() as u32, &mut |this, Chunk { kind, bytes }| {
            let header = if kind == OFFSET_HOLE { 12 } else { 8 };
            if ![OFFSET_DATA, OFFSET_HOLE].contains(&kind) || bytes < header {
                return Err(unexpected("a reply to a read"));
            }
            let begin = this.u64()?.checked_sub(offset).and_then(|begin| usize::try_from(begin).ok());
            let count = if kind == OFFSET_HOLE { this.u32()? } else { bytes - header } as usize;
            let part = begin.and_then(|begin| buffer.get_mut(begin..begin.checked_add(count)?));
            let part = part.ok_or_else(|| unexpected("content of another place"))?;
            left = left.checked_sub(count).ok_or_else(|| unexpected("content twice"))?;
            match kind {
                OFFSET_HOLE => part.fill(0),
                _ => this.stream.read_exact(part)?,
            }
            Ok(())
        })?;
        if left == 0 { Ok(()) } else { Err(unexpected("a part of the content")) }
    }

    /// The parts of a disk of this size that the selected bitmap has.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub(super) fn dirty(&mut self, disk_bytes: u64) -> io::Result<Vec<Range<u64>>> {
        let (mut offset, mut dirty) = (0, Vec::new());
        while offset < disk_bytes {
            let begin = offset;
            let bytes = (disk_bytes - begin).min(STATUS_BYTES) as u32;
            self.request(BLOCK_STATUS, begin, bytes, &mut |this, Chunk { kind, bytes }| {
                if kind != BLOCK_STATUS_REPLY || bytes > REPLY_BYTES_MAX || bytes % 8 != 4 {
                    return Err(unexpected("a reply about a bitmap"));
                }
                let _context = this.u32()?;
                for _ in 0..bytes / 8 {
                    let (count, status) = (this.u32()?, this.u32()?);
                    let end = (offset + u64::from(count)).min(disk_bytes);
                    if status & DIRTY != 0 {
                        dirty.push(offset..end);
                    }
                    offset = end;
                }
                Ok(())
            })?;
            if offset == begin {
                return Err(unexpected("a bitmap without a part"));
            }
        }
        Ok(dirty)
    }

    /// Sends a request, and passes each chunk of the reply on, whose content is read there.
    fn request(
        &mut self,
        kind: u16,
        offset: u64,
        bytes: u32,
        each: &mut dyn FnMut(&mut Self, Chunk) -> io::Result<()>,
    ) -> io::Result<()> {
        self.requests += 1;
        let (cookie, flags) = (self.requests, 0u16);
        let head = [&REQUEST.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
        let place = [&cookie.to_be_bytes()[..], &offset.to_be_bytes(), &bytes.to_be_bytes()].concat();
        self.send(&[head, place].concat())?;
        for _ in 0..CHUNKS_MAX {
            let (magic, flags, kind) = (self.u32()?, self.u16()?, self.u16()?);
            let (of, bytes) = (self.u64()?, self.u32()?);
            if (magic, of) != (REPLY, cookie) {
                return Err(unexpected("another reply"));
            }
            if kind & ERROR != 0 {
                return Err(io::Error::from_raw_os_error(self.u32()? as i32));
            }
            if kind != NONE {
                each(self, Chunk { kind, bytes })?;
            }
            if flags & DONE != 0 {
                return Ok(());
            }
        }
        Err(unexpected("a reply without an end"))
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    fn bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
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

fn length(count: usize) -> [u8; 4] {
    (count as u32).to_be_bytes()
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("QEMU's NBD server sent {what}"))
}
