//! Options of streams: TLS, and limits.

use towline_channel::{ConnectOptions, ListenOptions, TlsClient, TlsServer};

use super::error::Error;
use super::request::CopyRequest;
use super::request::Tls;
use super::zero_copy;

/// Options for a listener.
pub(super) fn listening(options: &CopyRequest) -> Result<ListenOptions, Error> {
    let tls = options.tls.as_ref().map(|tls| TlsServer::load(&tls.credentials)).transpose()?;
    Ok(ListenOptions { tls, peer_timeout: Some(options.peer_timeout), ..ListenOptions::default() })
}

/// Options for a connection.
pub(super) fn connecting(options: &CopyRequest) -> Result<ConnectOptions, Error> {
    let load = |tls: &Tls| TlsClient::load(&tls.credentials, tls.hostname.as_deref());
    let tls = options.tls.as_ref().map(load).transpose()?;
    let zero_copy = zero_copy::is_wanted(options);
    let peer_timeout = Some(options.peer_timeout);
    Ok(ConnectOptions { zero_copy, tls, peer_timeout, ..ConnectOptions::default() })
}
