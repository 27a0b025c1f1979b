//! Two ends of a connection within this process, without a descriptor.
//!
//! For tests, and to join two halves of one program. It is slow: each byte is copied in and out, under a
//! lock. Each direction holds at most `capacity` bytes; a sender blocks until the other end has read.

use crate::flags::{check_recv, check_send, check_timeouts};
use crate::lock::lock;
use crate::socket::STREAM;
use crate::{
    CallCounters, Capabilities, Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, gather,
    scatter, total_len, total_len_mut,
};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Makes two connected ends. Each direction holds `capacity` bytes, at least one.
pub fn pair(capacity: usize) -> (PairChannel, PairChannel) {
    let half = || Arc::new(Half { capacity: capacity.max(1), ..Half::default() });
    let (there, back) = (half(), half());
    let end = |output: &Arc<Half>, input: &Arc<Half>, peer| PairChannel {
        output: Arc::clone(output),
        input: Arc::clone(input),
        timeouts: Mutex::default(),
        calls: Arc::default(),
        peer,
    };
    (end(&there, &back, "memory:1"), end(&back, &there, "memory:0"))
}

/// One end of a [`pair`]. Dropping it ends both halves for the other.
#[derive(Debug)]
pub struct PairChannel {
    output: Arc<Half>,
    input: Arc<Half>,
    /// To receive, and to send.
    timeouts: Mutex<[Option<Duration>; 2]>,
    calls: Arc<CallCounters>,
    peer: &'static str,
}

/// One direction.
#[derive(Debug, Default)]
struct Half {
    capacity: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    writer_ended: bool,
    reader_ended: bool,
}

impl Channel for PairChannel {
    fn peer(&self) -> &str {
        self.peer
    }

    fn capabilities(&self) -> Capabilities {
        STREAM
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        check_send(self.peer, STREAM, flags)?;
        let wanted = total_len(bufs);
        if wanted == 0 {
            return Ok(0);
        }
        self.calls.count_send(bufs.len());
        let [_, timeout] = *lock(&self.timeouts);
        let full = |state: &State| {
            state.bytes.len() >= self.output.capacity && !state.writer_ended && !state.reader_ended
        };
        let mut state = self
            .output
            .wait_while(timeout, full)
            .map_err(|after| Error::timeout("send", self.peer, after))?;
        if state.writer_ended || state.reader_ended {
            return Err(Error::io("send", self.peer, rustix::io::Errno::PIPE));
        }
        let mut bytes = vec![0; wanted.min(self.output.capacity - state.bytes.len())];
        let sent = gather(bufs, &mut bytes);
        state.bytes.extend(&bytes[..sent]);
        self.output.changed.notify_all();
        Ok(sent)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        check_recv(self.peer, STREAM, flags)?;
        if total_len_mut(bufs) == 0 {
            return Ok(0);
        }
        self.calls.count_receive(bufs.len());
        let [timeout, _] = *lock(&self.timeouts);
        let empty = |state: &State| state.bytes.is_empty() && !state.writer_ended && !state.reader_ended;
        let mut state = self
            .input
            .wait_while(timeout, empty)
            .map_err(|after| Error::timeout("recv", self.peer, after))?;
        let received = scatter(state.bytes.make_contiguous(), bufs);
        if !flags.contains(RecvFlags::PEEK) {
            state.bytes.drain(..received);
            self.input.changed.notify_all();
        }
        Ok(received)
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        if how != Shutdown::Write {
            self.input.end(|state| state.reader_ended = true);
        }
        if how != Shutdown::Read {
            self.output.end(|state| state.writer_ended = true);
        }
        Ok(())
    }

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()> {
        check_timeouts(self.peer, [recv, send])?;
        *lock(&self.timeouts) = [recv, send];
        Ok(())
    }

    fn calls(&self) -> Option<Arc<CallCounters>> {
        Some(Arc::clone(&self.calls))
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for PairChannel {
    fn drop(&mut self) {
        self.input.end(|state| state.reader_ended = true);
        self.output.end(|state| state.writer_ended = true);
    }
}

impl Half {
    /// Waits until `busy` is false; the error is the time waited.
    fn wait_while(
        &self,
        timeout: Option<Duration>,
        busy: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, Duration> {
        let began = Instant::now();
        let mut state = lock(&self.state);
        while busy(&state) {
            state = match timeout {
                None => self.changed.wait(state).expect("no panic while it is held"),
                Some(timeout) => {
                    let left = timeout.checked_sub(began.elapsed()).ok_or(timeout)?;
                    self.changed.wait_timeout(state, left).expect("no panic while it is held").0
                }
            };
        }
        Ok(state)
    }

    fn end(&self, how: impl FnOnce(&mut State)) {
        how(&mut lock(&self.state));
        self.changed.notify_all();
    }
}
