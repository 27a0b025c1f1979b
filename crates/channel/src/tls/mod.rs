//! TLS 1.3 over any channel that has a descriptor to poll, with certificates at both ends, as QEMU's `tls-creds-x509`.
//!
//! ```text
//!   send ─▶ Sender (its own lock) ─seal─▶ ┐                         rustls: handshake, certificates, next keys
//!                                         ├─ channel below (tcp:, unix:)
//!   recv ◀─ Receiver (its own lock) ◀open─┘                         ring: ciphers
//! ```
//!
//! Each connection does its own handshake, at once when it is there ([`connect_with`](crate::connect_with) and
//! [`Listener::accept`](crate::Listener::accept) give channels that are through it). Behind it the two directions have
//! nothing in common but the source of new keys, so one thread sends while another receives, and `shutdown` waits for
//! neither.
//!
//! The end of a stream is told by a close_notify: `shutdown` and dropping the channel send one. An end without it is
//! [`Error::Cut`], since anybody on the way could have made it.
//!
//! Limits: TLS 1.3 only (GnuTLS has it since 3.6.5). No session is resumed. Zero-copy and descriptors do not go through a
//! cipher, so [`Capabilities`] has neither. Each channel has 0.5 MiB of buffers.

mod credentials;
mod failure;
mod handshake;
mod keys;
mod record;
mod recv;
mod send;

pub use credentials::{TlsClient, TlsServer};
pub use failure::describe_plain;

use crate::channel::{check_recv, check_send};
use crate::wait::{Patience, Woken, wait};
use crate::{
    Cancel, Capabilities, Channel, Error, Flushed, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len,
    total_len_mut,
};
use handshake::Handshaken;
use keys::Keys;
use recv::Receiver;
use rustix::event::PollFlags;
use rustls::pki_types::ServerName;
use send::Sender;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A connection that is through its handshake.
#[derive(Debug)]
pub struct TlsChannel {
    inner: Box<dyn Channel>,
    keys: Keys,
    sender: Mutex<Sender>,
    receiver: Mutex<Receiver>,
    /// We ended these halves.
    ended_send: AtomicBool,
    ended_recv: AtomicBool,
    /// What it may mean that the peer ends the connection at its beginning.
    doubt: String,
    heard: AtomicBool,
    sent: AtomicU64,
}

/// How much may have been sent to a peer that is suspected not to have looked at our certificate by then.
const DOUBTED_BYTES_MAX: u64 = 1 << 20;

impl TlsChannel {
    /// Does a client's handshake over a connected channel. `host` is what the server's certificate must be for.
    ///
    /// # Errors
    /// [`Error::Tls`] with the reason, [`Error::Cancelled`], [`Error::Timeout`], those of `inner`, and
    /// [`Error::Unsupported`] for one that has no descriptor or only one direction.
    pub fn client(
        inner: Box<dyn Channel>,
        tls: &TlsClient,
        host: &str,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Self> {
        let patience = Patience::of_peer("TLS handshake", inner.peer().to_owned(), deadline, cancel);
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            let why =
                format!("\"{host}\" is no name that a certificate could be for: give it with tls-hostname");
            Error::tls(inner.peer(), why)
        })?;
        can_carry(inner.as_ref())?;
        let done = handshake::client(inner.as_ref(), tls, name, &patience)?;
        Self::new(inner, done)
    }

    /// Does a server's handshake over a connected channel.
    ///
    /// # Errors
    /// As [`Self::client`].
    pub fn server(
        inner: Box<dyn Channel>,
        tls: &TlsServer,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Self> {
        let patience = Patience::of_peer("TLS handshake", inner.peer().to_owned(), deadline, cancel);
        can_carry(inner.as_ref())?;
        let done = handshake::server(inner.as_ref(), tls, &patience)?;
        Self::new(inner, done)
    }

    fn new(inner: Box<dyn Channel>, done: Handshaken) -> Result<Self> {
        let Handshaken { tx, rx, keys, contents, records, doubt } = done;
        Ok(Self {
            inner,
            keys,
            sender: Mutex::new(Sender::new(tx)),
            receiver: Mutex::new(Receiver::new(rx, &contents, &records)),
            ended_send: AtomicBool::new(false),
            ended_recv: AtomicBool::new(false),
            doubt,
            heard: AtomicBool::new(false),
            sent: AtomicU64::new(0),
        })
    }

    fn lock_receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends our sending half, if nobody is in the middle of it and the channel below takes that at once.
    fn close(&self) {
        if self.ended_send.swap(true, Ordering::AcqRel) {
            return;
        }
        // Whoever holds it waits in the channel below, and the stream ends in the middle of something.
        let Ok(mut sender) = self.sender.try_lock() else { return };
        sender.close(self.inner.as_ref(), || self.is_writable());
    }

    fn is_writable(&self) -> bool {
        let ready = |fd| wait(fd, PollFlags::OUT, None, Some(Instant::now()));
        self.inner.as_fd().is_some_and(|fd| ready(fd) == Ok(Woken::Ready))
    }

    fn received(&self, result: Result<usize>) -> Result<usize> {
        match result {
            Ok(1..) => self.heard.store(true, Ordering::Relaxed),
            Err(error) if is_gone(&error) => return Err(self.doubted(error)),
            _ => {}
        }
        result
    }

    /// Why the peer takes no more: it may have said so.
    fn send_failed(&self, error: Error) -> Error {
        if !is_gone(&error) || self.ended_send.load(Ordering::Acquire) {
            return error;
        }
        // Whoever waits there has to let us in; what has arrived can still be read.
        let _ = self.inner.shutdown(Shutdown::Both);
        let mut byte = [0];
        let mut room = [IoBufMut::from(&mut byte)];
        let (inner, flags) = (self.inner.as_ref(), RecvFlags::PEEK);
        match self.lock_receiver().recv(inner, &self.keys, &mut room, flags, || true) {
            Err(said @ Error::Tls { .. }) => said,
            _ => self.doubted(error),
        }
    }

    fn doubted(&self, error: Error) -> Error {
        match self.heard.load(Ordering::Relaxed) || self.sent.load(Ordering::Relaxed) > DOUBTED_BYTES_MAX {
            true => error,
            false => Error::tls(self.peer(), self.doubt.clone()),
        }
    }
}

impl Channel for TlsChannel {
    fn peer(&self) -> &str {
        self.inner.peer()
    }

    fn capabilities(&self) -> Capabilities {
        let through =
            Capabilities::SEND | Capabilities::RECV | Capabilities::BIDIRECTIONAL | Capabilities::SHUTDOWN;
        (self.inner.capabilities() & through) | Capabilities::PEEK
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        check_send(self.peer(), self.capabilities(), flags)?;
        if total_len(bufs) == 0 {
            return Ok(0);
        }
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = sender.send(self.inner.as_ref(), &self.keys, bufs, flags);
        drop(sender);
        if let Ok(sent) = sent {
            self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        }
        sent.map_err(|error| self.send_failed(error))
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        check_recv(self.peer(), self.capabilities(), flags)?;
        if total_len_mut(bufs) == 0 {
            return Ok(0);
        }
        let ended = || self.ended_recv.load(Ordering::Acquire);
        let received = self.lock_receiver().recv(self.inner.as_ref(), &self.keys, bufs, flags, ended);
        self.received(received)
    }

    fn flush(&self) -> Result<Flushed> {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.drain(self.inner.as_ref(), SendFlags::empty())?;
        self.inner.flush()
    }

    fn wait_recv(&self, until: &Cancel) -> Result<bool> {
        let inner = self.inner.as_ref();
        // What came may be no data, or only the beginning of a record.
        while !self.lock_receiver().has_something(inner.peer(), &self.keys) {
            if !inner.wait_recv(until)? {
                return Ok(false);
            }
            if !matches!(self.lock_receiver().receive_more(inner), Ok(1..)) {
                return Ok(true);
            }
        }
        Ok(true)
    }

    fn has_buffered(&self) -> bool {
        // Whoever holds it gets what there is.
        self.receiver.try_lock().is_ok_and(|receiver| receiver.has_buffered())
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

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()> {
        self.inner.set_timeouts(recv, send)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }
}

impl Drop for TlsChannel {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether the peer has ended the connection in its own way.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Cut { .. }) || matches!(error.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET))
}

fn can_carry(inner: &dyn Channel) -> Result<()> {
    let capabilities = inner.capabilities();
    let needed = Capabilities::BIDIRECTIONAL | Capabilities::SHUTDOWN;
    match inner.as_fd().is_some() && capabilities.contains(needed) {
        true => Ok(()),
        false => Err(Error::unsupported(inner.peer(), "TLS; use a socket")),
    }
}
