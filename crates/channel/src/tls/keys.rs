//! Key updates on an established connection: rustls derives the keys, the halves request them.

use super::record::Protection;
use crate::{Error, Result};
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The secrets of a finished handshake, from which the next keys are derived.
pub(super) struct Keys {
    connection: Mutex<TlsConnection>,
    /// The peer wants us to use a new key from the next record on.
    requested: AtomicBool,
}

pub(super) enum TlsConnection {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Keys {
    pub(super) fn new(connection: TlsConnection) -> Self {
        Self { connection: Mutex::new(connection), requested: AtomicBool::new(false) }
    }

    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::Release);
    }

    pub(super) fn take_request(&self) -> bool {
        self.requested.load(Ordering::Acquire) && self.requested.swap(false, Ordering::AcqRel)
    }

    /// The secrets. A panic under the lock leaves them undefined: no key is derived from them again.
    fn connection(&self) -> MutexGuard<'_, TlsConnection> {
        self.connection.lock().expect("no panic while it is held")
    }

    pub(super) fn next_to_send(&self, peer: &str) -> Result<Protection> {
        let next = match &mut *self.connection() {
            TlsConnection::Client(connection) => connection.update_tx_secret(),
            TlsConnection::Server(connection) => connection.update_tx_secret(),
        };
        protection(next, peer)
    }

    pub(super) fn next_to_receive(&self, peer: &str) -> Result<Protection> {
        let next = match &mut *self.connection() {
            TlsConnection::Client(connection) => connection.update_rx_secret(),
            TlsConnection::Server(connection) => connection.update_rx_secret(),
        };
        protection(next, peer)
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

fn protection(
    next: Result<(u64, rustls::ConnectionTrafficSecrets), rustls::Error>,
    peer: &str,
) -> Result<Protection> {
    let (sequence, secrets) = next.map_err(|error| Error::tls(peer, format!("no new key: {error}")))?;
    Protection::new(sequence, &secrets).ok_or_else(|| Error::tls(peer, "no new key: its cipher is unknown"))
}
