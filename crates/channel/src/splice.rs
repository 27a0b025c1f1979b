//! Moves bytes from one socket to another within the kernel (`splice(2)`).
//!
//! ```text
//! socket ──splice──► pipe ──splice──► socket       pages of the sender's message are moved, not copied
//! ```
//! For forwarding without inspection. Not for channels that transform bytes or have received some ahead:
//! these have no [`Channel::splice_fd`].

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use crate::sys::tcp::is_unacknowledged;
use crate::{Channel, Error, Result};

/// Preferred capacity of the pipe: a packet of QEMU's multifd, in pages of which some are half filled. The
/// total size of larger pipes is limited for unprivileged users (pipe(7)); smaller ones work too.
const PIPE_BYTES: usize = 1 << 20;

/// A pipe that bytes go through.
#[derive(Debug)]
pub struct Splice {
    read: OwnedFd,
    write: OwnedFd,
}

impl Splice {
    /// Creates a pipe.
    ///
    /// # Errors
    /// [`Error::Io`] if the process has no descriptor left.
    pub fn new() -> Result<Self> {
        let pipe = pipe_with(PipeFlags::CLOEXEC);
        let (read, write) = pipe.map_err(|errno| Error::io("pipe", "this process", errno))?;
        // The default capacity suffices.
        let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
        Ok(Self { read, write })
    }

    /// Returns true if bytes can be spliced from the one to the other.
    pub fn joins(from: &dyn Channel, to: &dyn Channel) -> bool {
        from.splice_fd().is_some() && to.splice_fd().is_some()
    }

    /// Moves `length` bytes; returns the number of system calls. After an error some bytes may be lost in the
    /// pipe, which is unusable then.
    ///
    /// Sending raises `SIGPIPE` where a plain send does not: it must be ignored, which Rust programs do by
    /// default.
    ///
    /// # Errors
    /// [`Error::Closed`] if `from` ends before, [`Error::Unsupported`] for a channel that has no descriptor
    /// for this, otherwise as [`Channel::recv`] of `from` and [`Channel::send`] of `to`.
    pub fn move_exact(&self, from: &dyn Channel, to: &dyn Channel, length: usize) -> Result<u64> {
        let what = "splicing; receive into memory and send from there";
        let unsupported = |channel: &dyn Channel| Error::unsupported(channel.peer(), what);
        let source = from.splice_fd().ok_or_else(|| unsupported(from))?;
        let destination = to.splice_fd().ok_or_else(|| unsupported(to))?;
        let (mut system_calls, mut done) = (0, 0);
        while done < length {
            let (wanted, flags) = (length - done, SpliceFlags::empty());
            let taken = retry_on_intr(|| splice(source, None, &self.write, None, wanted, flags));
            let taken = taken.map_err(|errno| failed("recv", from, errno))?;
            if taken == 0 {
                return Err(Error::Closed { peer: from.peer().to_owned(), wanted: length, got: done });
            }
            system_calls += 1;
            let mut given = 0;
            while given < taken {
                let moved =
                    retry_on_intr(|| splice(&self.read, None, destination, None, taken - given, flags));
                given += moved.map_err(|errno| failed("send", to, reason(errno, destination)))?;
                system_calls += 1;
            }
            done += taken;
        }
        Ok(system_calls)
    }
}

/// A call that has moved some bytes when the connection fails returns their number, and the kernel forgets the reason: the next
/// call returns `EPIPE`.
fn reason(errno: Errno, socket: BorrowedFd<'_>) -> Errno {
    if errno == Errno::PIPE && is_unacknowledged(socket) { Errno::TIMEDOUT } else { errno }
}

fn failed(op: &'static str, channel: &dyn Channel, errno: Errno) -> Error {
    Error::io(op, channel.peer(), errno)
}
