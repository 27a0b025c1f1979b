//! A witness.

use crate::channel::forward_channel;
use crate::lock::lock;
use crate::{Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, gather};
use std::fmt;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// Records the streams of both directions, in the order of the wire.
///
/// Limits: records bytes only, not descriptors, bytes read with `PEEK` or transfers at offsets. Sent bytes
/// are read for the recording after the call: if the memory has changed, the recording may differ from the
/// wire.
pub struct Capture {
    inner: Box<dyn Channel>,
    /// Held during a transfer, so the record has the order of the wire.
    sent: Mutex<Box<dyn Write + Send>>,
    received: Mutex<Box<dyn Write + Send>>,
}

/// Bytes recorded in memory. A clone is the same tape.
#[derive(Clone, Default)]
pub struct Recording(Arc<Mutex<Vec<u8>>>);

impl Capture {
    /// Records the bytes that pass over `inner`: sent bytes to one writer, received bytes to the other. A
    /// writer that fails makes the call fail, though its bytes have passed.
    pub fn new(
        inner: Box<dyn Channel>,
        sent: Box<dyn Write + Send>,
        received: Box<dyn Write + Send>,
    ) -> Self {
        Self { inner, sent: Mutex::new(sent), received: Mutex::new(received) }
    }

    /// Records to memory; returns the recordings of the sent and of the received bytes.
    pub fn to_memory(inner: Box<dyn Channel>) -> (Self, Recording, Recording) {
        let (sent, received) = (Recording::default(), Recording::default());
        (Self::new(inner, Box::new(sent.clone()), Box::new(received.clone())), sent, received)
    }

    fn record(&self, writer: &mut dyn Write, bufs: &[IoBuf<'_>], len: usize) -> Result<()> {
        let mut bytes = vec![0; len];
        let copied = gather(bufs, &mut bytes);
        writer.write_all(&bytes[..copied]).map_err(|source| Error::io("record", self.inner.peer(), source))
    }
}

impl Channel for Capture {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, shutdown, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        let mut writer = lock(&self.sent);
        let sent = self.inner.send(bufs, flags)?;
        self.record(&mut **writer, bufs, sent)?;
        Ok(sent)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        if flags.contains(RecvFlags::PEEK) {
            return self.inner.recv(bufs, flags);
        }
        let mut writer = lock(&self.received);
        let received = self.inner.recv(bufs, flags)?;
        let bufs: Vec<IoBuf<'_>> = bufs.iter().map(IoBufMut::as_io_buf).collect();
        self.record(&mut **writer, &bufs, received)?;
        Ok(received)
    }

    fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        let mut writer = lock(&self.sent);
        let sent = self.inner.send_fds(bytes, fds)?;
        self.record(&mut **writer, &[bytes.into()], sent)?;
        Ok(sent)
    }

    fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let mut writer = lock(&self.received);
        let received = self.inner.recv_fds(bytes, fds)?;
        self.record(&mut **writer, &[(&*bytes).into()], received)?;
        Ok(received)
    }
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Recording {
    /// All that is recorded so far.
    pub fn bytes(&self) -> Vec<u8> {
        lock(&self.0).clone()
    }
}

impl Write for Recording {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recording({} bytes)", lock(&self.0).len())
    }
}
