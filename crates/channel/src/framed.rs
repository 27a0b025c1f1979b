//! Channels that frame their data over another channel: TLS records, WebSocket frames.
//!
//! ```text
//!   send ─▶ Outbox (its own lock) ──Pack──▶ ┐
//!                                           ├─ channel below
//!   recv ◀─ Inbox (its own lock) ◀─Unpack── ┘
//! ```
//!
//! The two directions share nothing here, so one thread sends while another receives, and `shutdown` waits
//! for neither. A packet announces the end of the stream; an end without it is [`Error::Cut`].

mod inbox;
mod outbox;
mod packet;

use crate::channel::forward_channel;
use crate::flags::{check_recv, check_send};
use crate::lock::lock;
use crate::wait::{Woken, wait};
use crate::{
    Cancel, Capabilities, Channel, Flushed, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len,
    total_len_mut,
};
use inbox::Inbox;
use outbox::Outbox;
#[cfg(feature = "tls")]
pub(crate) use packet::UnpackedInto;
pub(crate) use packet::{Pack, Unpack, Unpacked};
use rustix::event::PollFlags;
use std::fmt::Debug;
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// See the module.
#[derive(Debug)]
pub(crate) struct Framed<P, U> {
    inner: Box<dyn Channel>,
    outbox: Mutex<Outbox<P>>,
    inbox: Mutex<Inbox<U>>,
    /// We ended these halves.
    ended_send: AtomicBool,
    ended_recv: AtomicBool,
}

impl<P: Pack, U: Unpack> Framed<P, U> {
    /// Starts with data received ahead, and packets that were not decoded. `room` is for one batch of
    /// packets.
    pub(crate) fn new(
        inner: Box<dyn Channel>,
        pack: P,
        room: usize,
        unpack: U,
        data: &[u8],
        packets: &[u8],
    ) -> Self {
        Self {
            inner,
            outbox: Mutex::new(Outbox::new(pack, room)),
            inbox: Mutex::new(Inbox::new(unpack, data, packets)),
            ended_send: AtomicBool::new(false),
            ended_recv: AtomicBool::new(false),
        }
    }

    pub(crate) fn has_ended_send(&self) -> bool {
        self.ended_send.load(Ordering::Acquire)
    }

    /// Sends the control packets of [`Pack::due`], unless another thread is sending.
    fn send_due_control_packets(&self) {
        if !self.has_ended_send()
            && let Ok(mut outbox) = self.outbox.try_lock()
        {
            outbox.send_due_control_packets(self.inner.as_ref(), || self.is_writable());
        }
    }

    /// The peer accepts no more data: returns the error that it announced before, if there is one.
    #[cfg(feature = "tls")]
    pub(crate) fn last_words(&self) -> Option<crate::Error> {
        // A thread that waits there must release the lock; data that has arrived can still be read.
        let _ = self.inner.shutdown(Shutdown::Both);
        let mut byte = [0];
        let mut room = [IoBufMut::from(&mut byte)];
        lock(&self.inbox).recv(self.inner.as_ref(), &mut room, RecvFlags::PEEK, || true, || {}).err()
    }

    /// Announces the end of the sending half, if no send is in progress and the channel below accepts it
    /// without blocking.
    pub(crate) fn close(&self) {
        if self.ended_send.swap(true, Ordering::AcqRel) {
            return;
        }
        // The holder of the lock is blocked in the channel below, and the stream ends within a packet.
        let Ok(mut outbox) = self.outbox.try_lock() else { return };
        outbox.close(self.inner.as_ref(), || self.is_writable());
    }

    fn is_writable(&self) -> bool {
        let ready = |fd| wait(fd, PollFlags::OUT, None, Some(Instant::now()));
        self.inner.as_fd().is_some_and(|fd| ready(fd) == Ok(Woken::Ready))
    }
}

impl<P: Pack, U: Unpack> Channel for Framed<P, U> {
    forward_channel!(inner: peer, calls, reset, set_timeouts, as_fd);

    fn capabilities(&self) -> Capabilities {
        let through =
            Capabilities::SEND | Capabilities::RECV | Capabilities::BIDIRECTIONAL | Capabilities::SHUTDOWN;
        (self.inner.capabilities() & through) | Capabilities::PEEK
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        check_send(self.inner.peer(), self.capabilities(), flags)?;
        match total_len(bufs) {
            0 => Ok(0),
            _ => lock(&self.outbox).send(self.inner.as_ref(), bufs, flags),
        }
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        check_recv(self.inner.peer(), self.capabilities(), flags)?;
        let ended = || self.ended_recv.load(Ordering::Acquire);
        match total_len_mut(bufs) {
            0 => Ok(0),
            _ => {
                let due = || self.send_due_control_packets();
                lock(&self.inbox).recv(self.inner.as_ref(), bufs, flags, ended, due)
            }
        }
    }

    fn flush(&self) -> Result<Flushed> {
        lock(&self.outbox).drain(self.inner.as_ref(), SendFlags::empty())?;
        self.inner.flush()
    }

    fn wait_recv(&self, until: &Cancel) -> Result<bool> {
        // The received bytes may contain no data, or only the beginning of a packet.
        while !lock(&self.inbox).has_something(self.inner.peer()) {
            self.send_due_control_packets();
            if !self.inner.wait_recv(until)? {
                return Ok(false);
            }
            if !matches!(lock(&self.inbox).receive_more(self.inner.as_ref()), Ok(1..)) {
                return Ok(true);
            }
        }
        Ok(true)
    }

    fn has_buffered(&self) -> bool {
        // A thread that holds the lock receives what is there.
        self.inbox.try_lock().is_ok_and(|mut inbox| inbox.has_something(self.inner.peer()))
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        if how != Shutdown::Write {
            self.ended_recv.store(true, Ordering::Release);
        }
        if how != Shutdown::Read {
            self.close();
        }
        self.inner.shutdown(how)
    }
}
