//! A lane that sends packets from a mapped memfd by one of the methods.

use std::fs::File;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Result, ensure};
use memmap2::{MmapMut, MmapOptions};
use rustix::pipe::SpliceFlags;
use towline_channel::{Channel, ChannelExt, IoBuf, SendFlags, TcpChannel, gather};

use crate::sys::Ring;

pub(crate) const HEADER_BYTES: usize = 1344;
pub(crate) const PACKET_BYTES: usize = 512 << 10;
const PAGE_BYTES: usize = 4096;
/// QEMU's `IO_BUF_SIZE`, the buffer of plain writes.
const LINEAR_BYTES: usize = 32 << 10;

/// Method of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Vectored { buffers: usize },
    TwoCalls { more: bool },
    Linear,
    PageByPage,
    ZeroCopy { buffers: usize, more: bool },
    SendFile,
    Splice,
    Uring { registered: bool },
}

/// A touched memfd.
pub(crate) struct Memory {
    file: File,
    map: MmapMut,
}

impl Memory {
    pub(crate) fn new(length: usize) -> Result<Self> {
        let file = File::from(rustix::fs::memfd_create("sends", rustix::fs::MemfdFlags::CLOEXEC)?);
        file.set_len(length as u64)?;
        let mut map = crate::sys::map(&file, MmapOptions::new().len(length))?;
        for (number, page) in map.chunks_mut(PAGE_BYTES).enumerate() {
            page.fill(number as u8 | 1);
        }
        Ok(Self { file, map })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// A connection with the resources of its method.
pub(crate) struct Lane<'a> {
    channel: TcpChannel,
    memory: &'a Memory,
    method: Method,
    header: [u8; HEADER_BYTES],
    linear: Vec<u8>,
    pipe: Option<(OwnedFd, OwnedFd)>,
    ring: Option<Ring>,
}

impl<'a> Lane<'a> {
    pub(crate) fn new(stream: TcpStream, memory: &'a Memory, method: Method) -> Result<Self> {
        let mut channel = TcpChannel::new(stream.into())?;
        if matches!(method, Method::ZeroCopy { .. }) {
            channel.enable_zero_copy()?;
        }
        let pipe = match method {
            Method::Splice => {
                let (reader, writer) = rustix::pipe::pipe()?;
                rustix::pipe::fcntl_setpipe_size(&writer, PACKET_BYTES)?;
                Some((reader, writer))
            }
            _ => None,
        };
        let ring = match method {
            Method::Uring { registered } => Some(Ring::new(memory.bytes(), registered)?),
            _ => None,
        };
        let (header, linear) = ([7; HEADER_BYTES], vec![0; LINEAR_BYTES]);
        Ok(Self { channel, memory, method, header, linear, pipe, ring })
    }

    /// Sends the packet whose pages begin at this offset.
    pub(crate) fn send(&mut self, offset: usize) -> Result<()> {
        let pages = &self.memory.bytes()[offset..offset + PACKET_BYTES];
        let header = IoBuf::from(&self.header);
        match self.method {
            Method::Vectored { buffers } => {
                let all: Vec<_> = std::iter::once(header).chain(split(pages, buffers)).collect();
                self.channel.send_all(&all, SendFlags::empty())?;
            }
            Method::TwoCalls { more } => {
                self.send_header(more)?;
                self.channel.send_all(&[IoBuf::from(pages)], SendFlags::empty())?;
            }
            Method::Linear => {
                let mut rest = vec![header, IoBuf::from(pages)];
                while let Some(first) = rest.first().copied() {
                    let copied = gather(&rest, &mut self.linear);
                    self.channel.send_all(&[IoBuf::from(&self.linear[..copied])], SendFlags::empty())?;
                    let beyond = copied.saturating_sub(first.len());
                    rest[0] = first.skip(copied);
                    if rest[0].is_empty() {
                        rest.remove(0);
                        if let Some(next) = rest.first_mut() {
                            *next = next.skip(beyond);
                        }
                    }
                    rest.retain(|buffer| !buffer.is_empty());
                }
            }
            Method::PageByPage => {
                self.send_header(true)?;
                for page in split(pages, PACKET_BYTES / PAGE_BYTES) {
                    self.channel.send_all(&[page], SendFlags::empty())?;
                }
            }
            Method::ZeroCopy { buffers, more } => {
                self.send_header(more)?;
                let pages: Vec<_> = split(pages, buffers).collect();
                self.channel.send_all(&pages, SendFlags::ZERO_COPY)?;
            }
            Method::SendFile => self.send_file(offset)?,
            Method::Splice => self.splice(offset)?,
            Method::Uring { .. } => {
                let fd = self.channel.as_fd().expect("a socket");
                let ring = self.ring.as_mut().expect("created for this method");
                ring.send(fd, &self.header, self.memory.bytes(), offset..offset + PACKET_BYTES)?;
            }
        }
        Ok(())
    }

    /// Waits until the kernel no longer reads the memory.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if let Some(ring) = &mut self.ring {
            return ring.finish();
        }
        self.channel.flush()?;
        Ok(())
    }

    fn send_header(&self, more: bool) -> Result<()> {
        let flags = if more { SendFlags::MORE } else { SendFlags::empty() };
        Ok(self.channel.send_all(&[IoBuf::from(&self.header)], flags)?)
    }

    fn send_file(&self, offset: usize) -> Result<()> {
        self.send_header(true)?;
        let (mut at, mut left) = (offset as u64, PACKET_BYTES);
        while left > 0 {
            let fd = self.channel.as_fd().expect("a socket");
            let sent = rustix::fs::sendfile(fd, self.memory.file.as_fd(), Some(&mut at), left)?;
            ensure!(sent > 0, "sendfile sent nothing");
            left -= sent;
        }
        Ok(())
    }

    fn splice(&self, offset: usize) -> Result<()> {
        self.send_header(true)?;
        let (reader, writer) = self.pipe.as_ref().expect("created for this method");
        let (mut at, mut left) = (offset as u64, PACKET_BYTES);
        while left > 0 {
            let flags = SpliceFlags::empty();
            let spliced = rustix::pipe::splice(&self.memory.file, Some(&mut at), writer, None, left, flags)?;
            ensure!(spliced > 0, "splice moved nothing");
            left -= spliced;
            let mut in_pipe = spliced;
            while in_pipe > 0 {
                let more = if left > 0 { SpliceFlags::MORE } else { flags };
                let fd = self.channel.as_fd().expect("a socket");
                in_pipe -= rustix::pipe::splice(reader, None, fd, None, in_pipe, more)?;
            }
        }
        Ok(())
    }
}

fn split(pages: &[u8], buffers: usize) -> impl Iterator<Item = IoBuf<'_>> {
    pages.chunks(PACKET_BYTES / buffers).map(IoBuf::from)
}
