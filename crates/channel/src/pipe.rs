//! Pipes: one direction each, or two of them for both.
//!
//! A pipe has neither `shutdown(2)` nor timeouts, so this module provides them:
//!
//! ```text
//!   send/recv:  try ──EAGAIN──▶ poll(pipe, stop, timeout) ──▶ try ...
//!   shutdown:   1. the descriptor's number is made to stand for the end of a dead pipe: reading it gives the end of
//!                  the stream, writing EPIPE. The true end is closed by that, so the peer sees it.
//! 2. stop is raised: a polling thread retries, and meets 1.
//! ```
//!
//! A shutdown restores the pipe's mode, so no call may be under way or begin then: with a blocking pipe it
//! would wait where nothing wakes it. Each call is made with the lock of its end, and none waits.
//!
//! Limits: needs three descriptors per end. While it is open here, the pipe is in non-blocking mode. Every
//! process with the same open file sees that mode (such as a parent with a copy); dropping the channel
//! restores the mode. Other files that can be polled and read or written (a terminal, `/dev/null`) work the
//! same way.

use crate::cancel::{event, raise};
use crate::flags::{check_recv, check_send, check_timeouts};
use crate::lock::lock;
use crate::sys::{fd, io};
use crate::wait::{Woken, wait};
use crate::{CallCounters, Capabilities, Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pipe::{PipeFlags, pipe_with};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A pipe, or two.
#[derive(Debug)]
pub(crate) struct PipeChannel {
    input: Option<PipeEnd>,
    output: Option<PipeEnd>,
    peer: String,
    calls: Arc<CallCounters>,
}

/// Our end of one pipe.
#[derive(Debug)]
struct PipeEnd {
    fd: OwnedFd,
    /// Readable once this end is shut down.
    stop: OwnedFd,
    /// The same end of a pipe without another end.
    dead: OwnedFd,
    /// Original mode of the open file, if we changed it.
    mode: Option<OFlags>,
    /// We ended this half. Held during each call.
    closed: Mutex<bool>,
    timeout: Mutex<Option<Duration>>,
}

impl PipeChannel {
    /// Reads from `input` and writes to `output`; at least one is there.
    pub(crate) fn new(input: Option<OwnedFd>, output: Option<OwnedFd>, peer: String) -> Result<Self> {
        let input = input.map(|fd| PipeEnd::new(fd, PollFlags::IN)).transpose()?;
        let output = output.map(|fd| PipeEnd::new(fd, PollFlags::OUT)).transpose()?;
        Ok(Self { input, output, peer, calls: Arc::default() })
    }

    /// Returns true if we ended the half that receives.
    pub(crate) fn is_input_closed(&self) -> bool {
        self.input.as_ref().is_none_or(PipeEnd::is_closed)
    }

    /// Returns true if we ended the half that sends.
    pub(crate) fn is_output_closed(&self) -> bool {
        self.output.as_ref().is_none_or(PipeEnd::is_closed)
    }
}

impl Channel for PipeChannel {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn capabilities(&self) -> Capabilities {
        let input = self.input.as_ref().map_or(Capabilities::empty(), |_| Capabilities::RECV);
        let output = self.output.as_ref().map_or(Capabilities::empty(), |_| Capabilities::SEND);
        let both = if self.input.is_some() && self.output.is_some() {
            Capabilities::BIDIRECTIONAL
        } else {
            Capabilities::empty()
        };
        input | output | both | Capabilities::SHUTDOWN
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        check_send(&self.peer, self.capabilities(), flags)?;
        let end = self.output.as_ref().expect("checked with the capabilities");
        end.transfer("send", &self.peer, PollFlags::OUT, |fd| {
            self.calls.count_send(bufs.len());
            io::writev(fd, bufs)
        })
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        check_recv(&self.peer, self.capabilities(), flags)?;
        let end = self.input.as_ref().expect("checked with the capabilities");
        end.transfer("recv", &self.peer, PollFlags::IN, |fd| {
            self.calls.count_receive(bufs.len());
            io::readv(fd, bufs)
        })
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        let input = self.input.as_ref().filter(|_| how != Shutdown::Write);
        let output = self.output.as_ref().filter(|_| how != Shutdown::Read);
        // In this order: a command that is killed for writing to a closed pipe ends our own sends too, and a
        // thread in one of them must find that we wanted it.
        for end in [output, input].into_iter().flatten() {
            end.close().map_err(|source| Error::io("shutdown", &self.peer, source))?;
        }
        Ok(())
    }

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()> {
        check_timeouts(&self.peer, [recv, send])?;
        for (end, timeout) in [(&self.input, recv), (&self.output, send)] {
            if let Some(end) = end {
                *lock(&end.timeout) = timeout;
            }
        }
        Ok(())
    }

    fn calls(&self) -> Option<Arc<CallCounters>> {
        Some(Arc::clone(&self.calls))
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().or(self.output.as_ref()).map(|end| end.fd.as_fd())
    }
}

impl PipeEnd {
    fn new(fd: OwnedFd, direction: PollFlags) -> Result<Self> {
        let failed = |errno| Error::io("prepare pipe", "this process", errno);
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        let dead = if direction == PollFlags::IN { reader } else { writer };
        let flags = fcntl_getfl(&fd).map_err(failed)?;
        let mode = (!flags.contains(OFlags::NONBLOCK)).then_some(flags);
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(failed)?;
        Ok(Self { fd, stop: event()?, dead, mode, closed: Mutex::default(), timeout: Mutex::default() })
    }

    fn transfer(
        &self,
        op: &'static str,
        peer: &str,
        events: PollFlags,
        mut call: impl FnMut(BorrowedFd<'_>) -> std::io::Result<usize>,
    ) -> Result<usize> {
        let mut limit = None;
        loop {
            let closed = lock(&self.closed);
            let result = call(self.fd.as_fd());
            drop(closed);
            match result {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                result => return result.map_err(|source| Error::io(op, peer, source)),
            }
            let (timeout, began) = *limit.get_or_insert_with(|| (*lock(&self.timeout), Instant::now()));
            let deadline = timeout.and_then(|timeout| began.checked_add(timeout));
            match wait(self.fd.as_fd(), events, Some(self.stop.as_fd()), deadline) {
                Ok(Woken::TimedOut) => return Err(Error::timeout(op, peer, timeout.unwrap_or_default())),
                Ok(Woken::Ready | Woken::Stopped) => {}
                Err(errno) => return Err(Error::io(op, peer, errno)),
            }
        }
    }

    fn close(&self) -> std::io::Result<()> {
        let mut closed = lock(&self.closed);
        if std::mem::replace(&mut *closed, true) {
            return Ok(());
        }
        self.restore_mode();
        fd::replace(self.fd.as_fd(), self.dead.as_fd())?;
        raise(self.stop.as_fd());
        Ok(())
    }

    fn is_closed(&self) -> bool {
        *lock(&self.closed)
    }

    fn restore_mode(&self) {
        if let Some(mode) = self.mode {
            // Setting the mode worked before; if it fails now, the file is still usable by its other owners.
            let _ = fcntl_setfl(&self.fd, mode);
        }
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        if !self.is_closed() {
            self.restore_mode();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn a_shutdown_ends_receives_that_begin_at_the_same_time() {
        for _ in 0..300 {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            let channel = Arc::new(PipeChannel::new(Some(reader), None, "pipe".into()).unwrap());
            // So that the thread makes one call after the other.
            channel.set_timeouts(Some(Duration::from_nanos(1)), None).unwrap();
            let receiver = Arc::clone(&channel);
            let (tell, told) = mpsc::channel();
            thread::spawn(move || {
                tell.send("begins").unwrap();
                let mut byte = [0];
                while receiver.recv(&mut [IoBufMut::from(&mut byte)], RecvFlags::empty()).ok() != Some(0) {}
                // After a failure there is no listener.
                let _ = tell.send("ends");
            });
            told.recv().unwrap();
            channel.shutdown(Shutdown::Read).unwrap();
            let ended = told.recv_timeout(Duration::from_secs(20));
            assert_eq!(ended, Ok("ends"), "it waits in a pipe that was shut down");
            drop(writer);
        }
    }
}
