//! The [`Channel`] trait: the operations that the engine needs of any byte transport.

use crate::flags::{Capabilities, Flushed, RecvFlags, SendFlags};
use crate::wait::{Woken, wait};
use crate::{
    CallCounters, Cancel, Error, IoBuf, IoBufMut, IoCursor, IoCursorMut, Result, ZeroCopyStatistics,
    ZeroCopyTicket,
};
use rustix::event::PollFlags;
use std::fmt::Debug;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of file descriptors in one message: that of QEMU's socket channel takes (`SOCKET_MAX_FDS`
/// in `io/channel-socket.c`). The kernel's own limit is 253 (`SCM_MAX_FD`).
pub const FDS_MAX: usize = 16;

/// A stream of bytes in one or both directions.
///
/// All calls block, take `&self` and may be made from several threads at once; the expected use is one thread
/// that sends, one that receives and a third that shuts down. If two threads send at once, the bytes of one
/// call stay together only if the operating system keeps them together. A call interrupted by a signal is
/// resumed.
#[expect(unused_variables, reason = "defaults need none of their arguments")]
pub trait Channel: Debug + Send + Sync {
    /// Name of the other end in messages, for instance `tcp:127.0.0.1:4444`.
    fn peer(&self) -> &str;

    /// Capabilities of this channel; constant during its lifetime.
    fn capabilities(&self) -> Capabilities;

    /// Sends a prefix of the buffers and returns its length in bytes; 0 only if the buffers are all empty. At
    /// most 1,024 buffers (`IOV_MAX`) are used. See [`ChannelExt::send_all`] for all of it.
    ///
    /// With [`SendFlags::ZERO_COPY`] the memory must stay valid, and its content may not be replaced by
    /// something else, until [`Channel::flush`] returns. (A guest may change its own pages: they are dirty
    /// then.)
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a flag without its capability or a channel that only receives,
    /// [`Error::Timeout`] if no byte was accepted in time, [`Error::Io`] (`EPIPE`, `ECONNRESET`) if the other
    /// end is gone.
    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize>;

    /// Waits for at least one byte and fills a prefix of the buffers; returns its length in bytes, 0 at the
    /// end of the stream (and for buffers that are all empty). At most 1,024 buffers (`IOV_MAX`) are used.
    /// See [`ChannelExt::recv_exact`] for all of it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a flag without its capability or a channel that only sends,
    /// [`Error::Timeout`] if no byte arrived in time, [`Error::Command`] if a failed command ended the
    /// stream, otherwise [`Error::Io`].
    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize>;

    /// Waits until every zero-copy send so far has finished and its buffers may be reused. Does not imply
    /// that the peer has read them, nor, for a file, that they are on the disk.
    ///
    /// # Errors
    /// [`Error::Io`] if a zero-copy send failed after its call had returned, or with `EPIPE` if some are not
    /// finished and both halves are shut down; [`Error::Timeout`] if none finished within the send timeout.
    fn flush(&self) -> Result<Flushed> {
        Ok(Flushed::Done)
    }

    /// Returns a ticket for the zero-copy sends so far, with which the owner of the memory learns when these
    /// have finished, independently of later sends. It is done from the beginning if there are none.
    fn zero_copy_ticket(&self) -> ZeroCopyTicket {
        ZeroCopyTicket::default()
    }

    /// Counters of the system calls that send and receive; `None` for a channel that does not count.
    fn calls(&self) -> Option<Arc<CallCounters>> {
        None
    }

    /// Statistics of the zero-copy sends; `None` without [`Capabilities::ZERO_COPY`].
    fn zero_copy_statistics(&self) -> Option<ZeroCopyStatistics> {
        None
    }

    /// Ends one or both halves and wakes threads blocked in them. After `Write` (or `Both`) the peer sees the
    /// end of the stream after the bytes sent before, and `send` fails with `EPIPE`. After `Read` (or `Both`)
    /// `recv` does not block: it returns what had already arrived, or 0. A second shutdown is not an error.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`Capabilities::SHUTDOWN`], otherwise [`Error::Io`].
    fn shutdown(&self, how: Shutdown) -> Result<()>;

    /// Resets the connection and discards unsent data, so the kernel releases the memory of zero-copy sends
    /// ([`Channel::zero_copy_ticket`]). Call it when both halves are shut down; the peer sees a reset. Does
    /// nothing without zero-copy sends.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn reset(&self) -> Result<()> {
        Ok(())
    }

    /// Timeouts of a call's first byte; `None`, the default, waits forever. A channel that never waits for a
    /// peer (a file) ignores them. They apply to calls that begin later.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a timeout of zero, otherwise [`Error::Io`].
    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()>;

    /// Sends a prefix of `bytes` (never empty) with all of `fds` attached to its first byte; at most
    /// [`FDS_MAX`]. If the result is short, send the rest of the bytes with [`Channel::send`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`Capabilities::FD_PASSING`] or with nothing to attach them to,
    /// [`Error::TooManyFds`], otherwise those of `send`.
    fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        Err(Error::unsupported(self.peer(), "sending file descriptors; use a Unix socket"))
    }

    /// Receives like [`Channel::recv`] and appends the descriptors received with the bytes, all
    /// close-on-exec. The kernel ends a receive after bytes that had descriptors attached. (A plain `recv`
    /// closes them unseen.) Descriptors that were received are appended after an error too.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`Capabilities::FD_PASSING`], [`Error::FdsTruncated`] if some were lost
    /// (the bytes are lost too, so the channel is unusable), otherwise those of `recv`.
    fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
        Err(Error::unsupported(self.peer(), "receiving file descriptors; use a Unix socket"))
    }

    /// Waits until [`Channel::recv`] would not block: data arrived, or the stream has ended. Returns false if
    /// `until` was cancelled and there is no data. A channel without a descriptor does not wait here; it is
    /// woken by `shutdown`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot wait.
    fn wait_recv(&self, until: &Cancel) -> Result<bool> {
        let Some(fd) = self.as_fd() else { return Ok(true) };
        let awaited = match wait(fd, PollFlags::IN, Some(until.as_fd()), None) {
            // Both may be readable: data takes precedence.
            Ok(Woken::Stopped) => wait(fd, PollFlags::IN, None, Some(Instant::now())),
            awaited => awaited,
        };
        let awaited = awaited.map_err(|errno| Error::io("wait for input", self.peer(), errno))?;
        Ok(awaited == Woken::Ready)
    }

    /// The descriptor to poll for input (for output where the channel only sends); `None` where there is
    /// none.
    fn as_fd(&self) -> Option<BorrowedFd<'_>>;

    /// The descriptor, where all bytes of the stream pass through it unchanged, for
    /// [`Splice`](crate::Splice). A channel that wraps another, or receives ahead, has none.
    fn splice_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns true if [`Channel::recv`] returns data received ahead (or the end of the stream) although the
    /// descriptor is not readable. Check it before polling.
    fn has_buffered(&self) -> bool {
        false
    }

    /// Shuts down the sending half and waits until the other end has finished: for `exec:` the command, whose
    /// failure is [`Error::Command`]. Other kinds do nothing, not even a shutdown.
    ///
    /// # Errors
    /// [`Error::Command`] with the status, [`Error::Timeout`] if it still runs at `deadline`.
    fn finish(&self, deadline: Instant) -> Result<()> {
        Ok(())
    }
}

/// Whole transfers over any [`Channel`]: loops over partial ones. For every channel, `dyn` or not.
pub trait ChannelExt: Channel {
    /// Sends every byte of the buffers. After an error an unknown part has been sent and the stream is
    /// unusable.
    ///
    /// # Errors
    /// Those of [`Channel::send`].
    fn send_all(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<()> {
        let mut cursor = IoCursor::new(bufs);
        while !cursor.is_empty() {
            let (chunk, last) = cursor.chunk_and_last();
            let more = if last { SendFlags::empty() } else { SendFlags::MORE };
            let sent = self.send(chunk, flags | more)?;
            cursor.advance(progress(self.peer(), "send", sent)?);
        }
        Ok(())
    }

    /// Fills every buffer.
    ///
    /// # Errors
    /// [`Error::Closed`] if the stream ends first, otherwise those of [`Channel::recv`].
    fn recv_exact(&self, bufs: &mut [IoBufMut<'_>]) -> Result<()> {
        recv_exact(self, bufs, RecvFlags::empty())
    }

    /// Fills every buffer, which may be written before the bytes are authenticated: as [`Self::recv_exact`],
    /// with [`RecvFlags::UNAUTHENTICATED`].
    ///
    /// # Errors
    /// As [`Self::recv_exact`]. None of the buffers may be used then.
    fn recv_exact_unauthenticated(&self, bufs: &mut [IoBufMut<'_>]) -> Result<()> {
        recv_exact(self, bufs, RecvFlags::UNAUTHENTICATED)
    }
}

impl<C: Channel + ?Sized> ChannelExt for C {}

/// Forwards every call but those named before it, to `$inner` of `self`. Keeps wrappers honest: a method
/// added to the trait with a default must be forwarded here.
macro_rules! forward_channel {
    ($inner:ident: $($method:ident),*) => { $($crate::channel::forward_channel!(@$method $inner);)* };
    (@peer $i:ident) => { fn peer(&self) -> &str { self.$i.peer() } };
    (@capabilities $i:ident) => {
        fn capabilities(&self) -> $crate::Capabilities { self.$i.capabilities() }
    };
    (@send $i:ident) => {
        fn send(&self, bufs: &[$crate::IoBuf<'_>], flags: $crate::SendFlags) -> $crate::Result<usize> {
            self.$i.send(bufs, flags)
        }
    };
    (@recv $i:ident) => {
        fn recv(&self, bufs: &mut [$crate::IoBufMut<'_>], flags: $crate::RecvFlags) -> $crate::Result<usize> {
            self.$i.recv(bufs, flags)
        }
    };
    (@flush $i:ident) => { fn flush(&self) -> $crate::Result<$crate::Flushed> { self.$i.flush() } };
    (@calls $i:ident) => {
        fn calls(&self) -> Option<std::sync::Arc<$crate::CallCounters>> { self.$i.calls() }
    };
    (@zero_copy_ticket $i:ident) => { fn zero_copy_ticket(&self) -> $crate::ZeroCopyTicket { self.$i.zero_copy_ticket() } };
    (@zero_copy_statistics $i:ident) => {
        fn zero_copy_statistics(&self) -> Option<$crate::ZeroCopyStatistics> { self.$i.zero_copy_statistics() }
    };
    (@shutdown $i:ident) => {
        fn shutdown(&self, how: std::net::Shutdown) -> $crate::Result<()> { self.$i.shutdown(how) }
    };
    (@reset $i:ident) => { fn reset(&self) -> $crate::Result<()> { self.$i.reset() } };
    (@set_timeouts $i:ident) => {
        fn set_timeouts(
            &self,
            recv: Option<std::time::Duration>,
            send: Option<std::time::Duration>,
        ) -> $crate::Result<()> {
            self.$i.set_timeouts(recv, send)
        }
    };
    (@send_fds $i:ident) => {
        fn send_fds(&self, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> $crate::Result<usize> {
            self.$i.send_fds(bytes, fds)
        }
    };
    (@recv_fds $i:ident) => {
        fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<std::os::fd::OwnedFd>) -> $crate::Result<usize> {
            self.$i.recv_fds(bytes, fds)
        }
    };
    (@wait_recv $i:ident) => {
        fn wait_recv(&self, until: &$crate::Cancel) -> $crate::Result<bool> { self.$i.wait_recv(until) }
    };
    (@as_fd $i:ident) => {
        fn as_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> { self.$i.as_fd() }
    };
    (@has_buffered $i:ident) => {
        fn has_buffered(&self) -> bool { self.$i.has_buffered() }
    };
    (@finish $i:ident) => {
        fn finish(&self, deadline: std::time::Instant) -> $crate::Result<()> { self.$i.finish(deadline) }
    };
}
pub(crate) use forward_channel;

fn recv_exact<C: Channel + ?Sized>(channel: &C, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<()> {
    let mut cursor = IoCursorMut::new(bufs);
    let wanted = cursor.remaining();
    while !cursor.is_empty() {
        match channel.recv(cursor.chunk(), flags)? {
            0 => return Err(closed(channel.peer(), wanted, &cursor)),
            received => cursor.advance(received),
        }
    }
    Ok(())
}

/// Guards the loops above against a channel that reports success without progress.
fn progress(peer: &str, op: &'static str, bytes: usize) -> Result<usize> {
    match bytes {
        0 => Err(Error::io(op, peer, std::io::ErrorKind::WriteZero)),
        n => Ok(n),
    }
}

fn closed(peer: &str, wanted: usize, cursor: &IoCursorMut<'_, '_>) -> Error {
    Error::Closed { peer: peer.to_owned(), wanted, got: wanted - cursor.remaining() }
}
