//! A connection that ends.

use super::{Direction, limit_mut};
use crate::channel::forward_channel;
use crate::sys::iobuf::limit;
use crate::{Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len, total_len_mut};
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};

/// Ends the connection exactly after byte N of one direction, for any division into transfers.
///
/// As soon as byte N has passed, the channel inside is shut down both ways. Then `send` is [`Error::Fault`]
/// if sending was counted (and the channel's own `EPIPE` if receiving was), and `recv` returns what had
/// arrived and then the end of the stream. Bytes read with `PEEK` do not count, but none after N are
/// returned.
#[derive(Debug)]
pub struct Cut {
    inner: Box<dyn Channel>,
    after: u64,
    direction: Direction,
    /// Number of bytes that may still pass. Held during a transfer of the direction that is counted, and only
    /// that.
    left: Mutex<u64>,
}

impl Cut {
    /// Ends `inner` after `after` bytes in `direction`; at once if that is 0.
    pub fn new(inner: Box<dyn Channel>, after: u64, direction: Direction) -> Self {
        let cut = Self { inner, after, direction, left: Mutex::new(after) };
        if after == 0 {
            cut.end();
        }
        cut
    }

    fn send_counted(&self, len: usize, send: impl FnOnce(usize) -> Result<usize>) -> Result<usize> {
        if self.direction != Direction::Send || len == 0 {
            return send(len);
        }
        let mut left = self.left();
        match budget(*left, len) {
            0 => Err(Error::Fault {
                peer: self.peer().to_owned(),
                what: format!("the connection was cut after {} bytes sent", self.after),
            }),
            allowed => send(allowed).inspect(|sent| self.count(&mut left, *sent)),
        }
    }

    fn recv_counted(&self, len: usize, recv: impl FnOnce(usize) -> Result<(usize, usize)>) -> Result<usize> {
        if self.direction != Direction::Recv || len == 0 {
            return recv(len).map(|(received, _)| received);
        }
        let mut left = self.left();
        match budget(*left, len) {
            0 => Ok(0),
            allowed => {
                let (received, counted) = recv(allowed)?;
                self.count(&mut left, counted);
                Ok(received)
            }
        }
    }

    fn count(&self, left: &mut u64, bytes: usize) {
        *left -= bytes as u64;
        if *left == 0 && bytes > 0 {
            self.end();
        }
    }

    fn end(&self) {
        // Where the channel inside cannot be shut down, our own count still ends it.
        let _ = self.inner.shutdown(Shutdown::Both);
    }

    fn left(&self) -> MutexGuard<'_, u64> {
        self.left.lock().expect("channels do not panic")
    }
}

impl Channel for Cut {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, shutdown, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        self.send_counted(total_len(bufs), |len| self.inner.send(&limit(bufs, len), flags))
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        self.recv_counted(total_len_mut(bufs), |len| {
            let received = self.inner.recv(&mut limit_mut(bufs, len), flags)?;
            Ok((received, if flags.contains(RecvFlags::PEEK) { 0 } else { received }))
        })
    }

    fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        self.send_counted(bytes.len(), |len| self.inner.send_fds(&bytes[..len], fds))
    }

    fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
        self.recv_counted(bytes.len(), |len| self.inner.recv_fds(&mut bytes[..len], fds).map(|n| (n, n)))
    }
}

fn budget(left: u64, len: usize) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(len)
}
