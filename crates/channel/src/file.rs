//! Files: a stream with its own cursor.
//!
//! The stream's cursor is kept here, in bytes from the start of the file, and moves only with `send` and
//! `recv`; it starts at the address's offset. The descriptor's own position is neither used nor moved.
//!
//! Out of scope: durability, and direct I/O (for `O_DIRECT` the caller opens the file and keeps to its
//! alignment). A file never waits for a peer, so timeouts have no effect.

use crate::flags::{check_recv, check_send, check_timeouts};
use crate::lock::lock;
use crate::sys::io;
use crate::{CallCounters, Capabilities, Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use rustix::fs::{OFlags, fcntl_getfl};
use std::fs::{File, OpenOptions};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An open file or block device.
#[derive(Debug)]
pub struct FileChannel {
    file: File,
    peer: String,
    capabilities: Capabilities,
    calls: Arc<CallCounters>,
    /// Where the stream is, in bytes.
    cursor: Mutex<u64>,
    recv_ended: AtomicBool,
    send_ended: AtomicBool,
}

impl FileChannel {
    /// Opens a file to write a stream from `offset`: it is created with access for its owner only if it is
    /// missing, and truncated at the offset, as in QEMU.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path, offset: u64) -> Result<Self> {
        let peer = format!("file:{}", path.display());
        let failed = |source| Error::io("create", &peer, source);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(failed)?;
        if file.metadata().map_err(failed)?.is_file() {
            file.set_len(offset).map_err(failed)?;
        }
        Self::new(file, offset, peer)
    }

    /// Opens a file to read a stream from `offset`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path, offset: u64) -> Result<Self> {
        let peer = format!("file:{}", path.display());
        let file = File::open(path).map_err(|source| Error::io("open", &peer, source))?;
        Self::new(file, offset, peer)
    }

    /// Wraps an open file; its capabilities follow from its open flags.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(file: File, offset: u64, peer: impl Into<String>) -> Result<Self> {
        let peer = peer.into();
        let flags = fcntl_getfl(&file).map_err(|errno| Error::io("fcntl", &peer, errno))?;
        let mut capabilities = match flags & OFlags::RWMODE {
            OFlags::WRONLY => Capabilities::SEND,
            OFlags::RDWR => Capabilities::SEND | Capabilities::RECV,
            _ => Capabilities::RECV,
        } | Capabilities::SHUTDOWN;
        capabilities.set(Capabilities::PEEK, capabilities.contains(Capabilities::RECV));
        let (recv_ended, send_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let (calls, cursor) = (Arc::default(), Mutex::new(offset));
        Ok(Self { file, peer, capabilities, calls, cursor, recv_ended, send_ended })
    }
}

impl Channel for FileChannel {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        check_send(&self.peer, self.capabilities, flags)?;
        if self.send_ended.load(Ordering::Acquire) {
            return Err(Error::io("send", &self.peer, rustix::io::Errno::PIPE));
        }
        let mut cursor = lock(&self.cursor);
        self.calls.count_send(bufs.len());
        let sent = io::pwritev(self.file.as_fd(), bufs, *cursor)
            .map_err(|source| Error::io("send", &self.peer, source))?;
        *cursor += sent as u64;
        Ok(sent)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        check_recv(&self.peer, self.capabilities, flags)?;
        if self.recv_ended.load(Ordering::Acquire) {
            return Ok(0);
        }
        let mut cursor = lock(&self.cursor);
        self.calls.count_receive(bufs.len());
        let received = io::preadv(self.file.as_fd(), bufs, *cursor)
            .map_err(|source| Error::io("recv", &self.peer, source))?;
        if !flags.contains(RecvFlags::PEEK) {
            *cursor += received as u64;
        }
        Ok(received)
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        if how != Shutdown::Write {
            self.recv_ended.store(true, Ordering::Release);
        }
        if how != Shutdown::Read {
            self.send_ended.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()> {
        check_timeouts(&self.peer, [recv, send])
    }

    fn calls(&self) -> Option<Arc<CallCounters>> {
        Some(Arc::clone(&self.calls))
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}
