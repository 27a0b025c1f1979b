//! A client of QEMU's NBD server, which reads a disk and one of its bitmaps, or writes it (structured replies).

use std::io::{self, BufReader, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::{
    ACK, BLOCK_STATUS, FLUSH, GO, GREETING, INFO, INFO_EXPORT, OPTION, OPTION_ERROR, OPTION_REPLY, READ,
    REPLY, REQUEST_BYTES, ReadNumbers as _, Request, SIMPLE_REPLY, invalid,
};

/// `NBD_FLAG_C_FIXED_NEWSTYLE` and `NBD_FLAG_C_NO_ZEROES`.
const CLIENT_FLAGS: u32 = 3;

const STRUCTURED_REPLY: u32 = 8;
const SET_META_CONTEXT: u32 = 10;
/// Bit of the kinds of replies to requests that are errors.
const ERROR: u16 = 1 << 15;

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

/// Writes whose replies are awaited together: as many as QEMU works on at a time.
const WRITES_MAX: usize = 16;

/// A part of a reply, whose content follows.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    kind: u16,
    bytes: u32,
}

/// A connection to an export.
#[derive(Debug)]
pub(crate) struct NbdClient {
    /// Buffered, as replies have small heads.
    stream: BufReader<UnixStream>,
    requests: u64,
    disk_bytes: Option<u64>,
}

impl NbdClient {
    /// Connects to the export of this name, and selects a bitmap of it. `timeout` is that of each reply.
    ///
    /// # Errors
    /// The system's; the server has no such export or bitmap; `InvalidData` for what is not NBD.
    pub(crate) fn connect(
        socket: &Path,
        export: &str,
        bitmap: Option<&str>,
        timeout: Duration,
    ) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let mut this = Self { stream: BufReader::new(stream), requests: 0, disk_bytes: None };
        if (this.stream.u64()?, this.stream.u64()?) != (GREETING, OPTION) {
            return Err(unexpected("its greeting"));
        }
        let _flags = this.stream.u16()?;
        this.send(&CLIENT_FLAGS.to_be_bytes())?;
        // A server that refuses it can still be written to.
        match this.option(STRUCTURED_REPLY, &[]) {
            Err(error) if error.kind() != io::ErrorKind::Other => return Err(error),
            _ => {}
        }
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
            let (magic, of) = (self.stream.u64()?, self.stream.u32()?);
            let (kind, bytes) = (self.stream.u32()?, self.stream.u32()?);
            if (magic, of) != (OPTION_REPLY, option) || bytes > REPLY_BYTES_MAX {
                return Err(unexpected("a reply to an option"));
            }
            let mut data = vec![0; bytes as usize];
            self.stream.read_exact(&mut data)?;
            match kind {
                ACK => return Ok(announced),
                INFO => {
                    let mut data = &data[..];
                    if data.u16().ok() == Some(INFO_EXPORT) {
                        self.disk_bytes = data.u64().ok();
                    }
                }
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

    /// Size of the disk; `None`: the server has not said it.
    pub(crate) fn disk_bytes(&self) -> Option<u64> {
        self.disk_bytes
    }

    /// Repeats requests of another client that have changed its disk, and returns when all are done; those of the same part in their order.
    ///
    /// # Errors
    /// The system's; one is refused; `InvalidData`: they are not such requests, or not of this disk.
    pub(crate) fn replay(&mut self, mut requests: &[u8]) -> io::Result<()> {
        let disk_bytes = self.disk_bytes.unwrap_or_default();
        let mut pending: Vec<Range<u64>> = Vec::with_capacity(WRITES_MAX);
        while !requests.is_empty() {
            let request = Request::decode(requests).map_err(|_| invalid("not an NBD request"))?;
            let whole = requests.split_at_checked(REQUEST_BYTES + request.content_bytes()?);
            let (Some((whole, left)), Some(changed)) = (whole, request.changes(disk_bytes)) else {
                let Request { bytes, offset, .. } = request;
                return Err(invalid(format!("a write of {bytes} bytes at {offset} of {disk_bytes}")));
            };
            let overlaps = |other: &Range<u64>| other.start < changed.end && changed.start < other.end;
            if pending.len() == WRITES_MAX || pending.iter().any(overlaps) {
                self.await_written(pending.len())?;
                pending.clear();
            }
            self.send(whole)?;
            pending.push(changed);
            requests = left;
        }
        self.await_written(pending.len())
    }

    /// Returns when all that was written is on the storage.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.send(&Request { flags: 0, kind: FLUSH, cookie: 0, offset: 0, bytes: 0 }.encode())?;
        self.await_written(1)
    }

    /// Waits for this number of replies without content.
    pub(super) fn await_written(&mut self, count: usize) -> io::Result<()> {
        for _ in 0..count {
            match self.stream.u32()? {
                SIMPLE_REPLY => {}
                // QEMU describes errors: flags, kind, cookie and length before the error.
                REPLY => {
                    let _head: [u8; 16] = self.stream.array()?;
                    return Err(io::Error::from_raw_os_error(self.stream.u32()? as i32));
                }
                _ => return Err(unexpected("another reply")),
            }
            let (error, _cookie) = (self.stream.u32()?, self.stream.u64()?);
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error as i32));
            }
        }
        Ok(())
    }

    /// Reads the disk from this offset on.
    ///
    /// # Errors
    /// The system's; the disk cannot be read there.
    pub(crate) fn read(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut left = buffer.len();
        self.request(READ, offset, buffer.len() as u32, &mut |this, Chunk { kind, bytes }| {
            let header = if kind == OFFSET_HOLE { 12 } else { 8 };
            if ![OFFSET_DATA, OFFSET_HOLE].contains(&kind) || bytes < header {
                return Err(unexpected("a reply to a read"));
            }
            let begin = this.stream.u64()?.checked_sub(offset).and_then(|begin| usize::try_from(begin).ok());
            let count = if kind == OFFSET_HOLE { this.stream.u32()? } else { bytes - header } as usize;
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
    pub(crate) fn dirty(&mut self, disk_bytes: u64) -> io::Result<Vec<Range<u64>>> {
        let (mut offset, mut dirty) = (0, Vec::new());
        while offset < disk_bytes {
            let begin = offset;
            let bytes = (disk_bytes - begin).min(STATUS_BYTES) as u32;
            self.request(BLOCK_STATUS, begin, bytes, &mut |this, Chunk { kind, bytes }| {
                if kind != BLOCK_STATUS_REPLY || bytes > REPLY_BYTES_MAX || bytes % 8 != 4 {
                    return Err(unexpected("a reply about a bitmap"));
                }
                let _context = this.stream.u32()?;
                for _ in 0..bytes / 8 {
                    let (count, status) = (this.stream.u32()?, this.stream.u32()?);
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
        let cookie = self.requests;
        self.send(&Request { flags: 0, kind, cookie, offset, bytes }.encode())?;
        for _ in 0..CHUNKS_MAX {
            let (magic, flags, kind) = (self.stream.u32()?, self.stream.u16()?, self.stream.u16()?);
            let (of, bytes) = (self.stream.u64()?, self.stream.u32()?);
            if (magic, of) != (REPLY, cookie) {
                return Err(unexpected("another reply"));
            }
            if kind & ERROR != 0 {
                return Err(io::Error::from_raw_os_error(self.stream.u32()? as i32));
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

    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }
}

fn length(count: usize) -> [u8; 4] {
    (count as u32).to_be_bytes()
}

fn unexpected(what: &str) -> io::Error {
    invalid(format!("QEMU's NBD server sent {what}"))
}
