//! TLS 1.3 over any channel that has a descriptor to poll, with certificates at both ends, as QEMU's
//! `tls-creds-x509`.
//!
//! ```text
//!   send ─▶ Sealer ─▶ ┐                                 rustls: handshake, certificates, next keys
//!                     ├─ Framed ─ channel below (tcp:, unix:)
//!   recv ◀─ Opener ◀─ ┘                                 aws-lc: ciphers
//! ```
//!
//! Each connection does its own handshake as soon as it is established ([`connect_with`](crate::connect_with)
//! and [`Listener::accept`](crate::Listener::accept) return channels whose handshake is complete). After it
//! the two directions share nothing but the source of new keys, so one thread sends while another receives,
//! and `shutdown` waits for neither.
//!
//! A close_notify announces the end of a stream: `shutdown` and dropping the channel send one. An end without
//! it is [`Error::Cut`], since anything on the path could have caused it.
//!
//! Limits: TLS 1.3 only (GnuTLS has it since 3.6.5). No session is resumed. Zero-copy and descriptor passing
//! do not work through a cipher, so [`Capabilities`] has neither. Each channel has 0.5 MiB of buffers.

mod alert;
mod credentials;
mod handshake;
mod keys;
mod record;
mod recv;
mod send;

pub use credentials::{OneTimeCredentials, OneTimeKey, TlsClient, TlsServer};

use crate::channel::forward_channel;
use crate::framed::Framed;
use crate::wait::Deadline;
use crate::{Cancel, Capabilities, Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use handshake::Handshaken;
use recv::Opener;
use rustls::pki_types::ServerName;
use send::Sealer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A connection whose handshake is complete.
#[derive(Debug)]
pub struct TlsChannel {
    framed: Framed<Sealer, Opener>,
    /// Hint for a connection that the peer closes at its beginning.
    doubt: String,
    has_received: AtomicBool,
    sent: AtomicU64,
}

/// Number of bytes that may have been sent before the peer verified this end's certificate.
const DOUBTED_BYTES_MAX: u64 = 1 << 20;

impl TlsChannel {
    /// Does a client's handshake over a connected channel. `host` is the name that the server's certificate
    /// must have.
    ///
    /// # Errors
    /// [`Error::Tls`] with the reason, [`Error::Cancelled`], [`Error::Timeout`], those of `inner`, and
    /// [`Error::Unsupported`] for a channel without a descriptor or with only one direction.
    pub fn client(
        inner: Box<dyn Channel>,
        tls: &TlsClient,
        host: &str,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Self> {
        let deadline = Deadline::new("TLS handshake", inner.peer().to_owned(), deadline, cancel);
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            let why =
                format!("\"{host}\" is not a name that a certificate can be for; give one with tls-hostname");
            Error::tls(inner.peer(), why)
        })?;
        can_carry(inner.as_ref())?;
        let done = handshake::client(inner.as_ref(), tls, name, &deadline)?;
        Ok(Self::new(inner, done))
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
        let deadline = Deadline::new("TLS handshake", inner.peer().to_owned(), deadline, cancel);
        can_carry(inner.as_ref())?;
        let done = handshake::server(inner.as_ref(), tls, &deadline)?;
        Ok(Self::new(inner, done))
    }

    fn new(inner: Box<dyn Channel>, done: Handshaken) -> Self {
        let Handshaken { tx, rx, keys, contents, records, doubt } = done;
        let keys = Arc::new(keys);
        let (sealer, opener) = (Sealer::new(tx, Arc::clone(&keys)), Opener::new(rx, keys));
        let framed = Framed::new(inner, sealer, send::BATCH_BYTES, opener, &contents, &records);
        Self { framed, doubt, has_received: AtomicBool::new(false), sent: AtomicU64::new(0) }
    }

    fn received(&self, result: Result<usize>) -> Result<usize> {
        match result {
            Ok(1..) => self.has_received.store(true, Ordering::Relaxed),
            Err(error) if is_gone(&error) => return Err(self.doubted(error)),
            _ => {}
        }
        result
    }

    /// The reason for which the peer accepts no more data: it may have sent an alert.
    fn send_failed(&self, error: Error) -> Error {
        if !is_gone(&error) || self.framed.has_ended_send() {
            return error;
        }
        match self.framed.last_words() {
            Some(said @ Error::Tls { .. }) => said,
            _ => self.doubted(error),
        }
    }

    fn doubted(&self, error: Error) -> Error {
        match self.has_received.load(Ordering::Relaxed)
            || self.sent.load(Ordering::Relaxed) > DOUBTED_BYTES_MAX
        {
            true => error,
            false => Error::tls(self.peer(), self.doubt.clone()),
        }
    }
}

impl Channel for TlsChannel {
    forward_channel!(framed: peer, calls, capabilities, flush, wait_recv, has_buffered, shutdown, reset, set_timeouts, as_fd);

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        let sent = self.framed.send(bufs, flags).map_err(|error| self.send_failed(error))?;
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        Ok(sent)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        let received = self.framed.recv(bufs, flags);
        self.received(received)
    }
}

impl Drop for TlsChannel {
    fn drop(&mut self) {
        self.framed.close();
    }
}

/// Returns true if the peer has ended the connection in its own way.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Cut { .. }) || matches!(error.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET))
}

fn can_carry(inner: &dyn Channel) -> Result<()> {
    let capabilities = inner.capabilities();
    let needed = Capabilities::BIDIRECTIONAL | Capabilities::SHUTDOWN;
    if inner.as_fd().is_some() && capabilities.contains(needed) {
        Ok(())
    } else {
        Err(Error::unsupported(inner.peer(), "TLS; use a socket"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChannelExt, UnixChannel};
    use std::time::Duration;
    use towline_lab::certificates::Authority;

    /// Both directions change their first keys after a few records, in the middle of a batch too; nothing is
    /// lost.
    #[test]
    fn a_worn_key_is_replaced() {
        let directory = tempfile::TempDir::new().unwrap();
        Authority::new("the test's CA").unwrap().furnish(directory.path()).unwrap();
        let (client, server) = connection(directory.path(), 5);
        let data: Vec<u8> = (0..3_000_000_u32).map(|at| (at >> 3) as u8).collect();
        std::thread::scope(|scope| {
            for (near, far) in [(&client, &server), (&server, &client)] {
                scope.spawn(|| near.send_all(&[IoBuf::from(&data[..])], SendFlags::empty()).unwrap());
                let mut received = vec![0; data.len()];
                far.recv_exact(&mut [IoBufMut::from(&mut received[..])]).unwrap();
                assert!(received == data);
            }
        });
    }

    /// Both ends of a connection whose first keys expire after `records` records.
    fn connection(directory: &std::path::Path, records: u64) -> (TlsChannel, TlsChannel) {
        let (near, far) = UnixChannel::pair().unwrap();
        let (near, far): (Box<dyn Channel>, Box<dyn Channel>) = (Box::new(near), Box::new(far));
        let (client, server) =
            (TlsClient::load(directory, None).unwrap(), TlsServer::load(directory).unwrap());
        let cancel = Cancel::new().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let deadline = |peer: &str| Deadline::new("TLS handshake", peer.to_owned(), deadline, &cancel);
        let worn = |inner, done: Handshaken| {
            TlsChannel::new(inner, Handshaken { tx: done.tx.wears_out_after(records), ..done })
        };
        std::thread::scope(|scope| {
            let far = scope.spawn(|| {
                let done = handshake::server(far.as_ref(), &server, &deadline("client")).unwrap();
                worn(far, done)
            });
            let name = ServerName::try_from("localhost").unwrap();
            let done = handshake::client(near.as_ref(), &client, name, &deadline("server")).unwrap();
            (worn(near, done), far.join().unwrap())
        })
    }
}
