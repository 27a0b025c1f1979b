//! The layers over a connected channel, TLS and WebSocket, where this build has them.

use crate::tls::{TlsClient, TlsServer};
use crate::{Cancel, Channel, Result};
use std::time::Instant;

/// Does a client's TLS handshake over `channel`.
pub(crate) fn tls_client(
    channel: Box<dyn Channel>,
    tls: &TlsClient,
    host: &str,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Box<dyn Channel>> {
    #[cfg(feature = "tls")]
    return Ok(Box::new(crate::tls::TlsChannel::client(channel, tls, host, deadline, cancel)?));
    #[cfg(not(feature = "tls"))]
    {
        let _ = (channel, host, deadline, cancel);
        match *tls {}
    }
}

/// Does a server's TLS handshake over `channel`.
pub(crate) fn tls_server(
    channel: Box<dyn Channel>,
    tls: &TlsServer,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Box<dyn Channel>> {
    #[cfg(feature = "tls")]
    return Ok(Box::new(crate::tls::TlsChannel::server(channel, tls, deadline, cancel)?));
    #[cfg(not(feature = "tls"))]
    {
        let _ = (channel, deadline, cancel);
        match *tls {}
    }
}

/// Does a client's WebSocket handshake over `channel`: requests `path` of `host` (with its port).
#[cfg_attr(
    not(feature = "websocket"),
    expect(clippy::needless_pass_by_value, reason = "the layer is absent")
)]
pub(crate) fn websocket_client(
    channel: Box<dyn Channel>,
    host: &str,
    path: &str,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Box<dyn Channel>> {
    #[cfg(feature = "websocket")]
    return Ok(Box::new(crate::websocket::WebSocketChannel::client(channel, host, path, deadline, cancel)?));
    #[cfg(not(feature = "websocket"))]
    {
        let _ = (host, path, deadline, cancel);
        Err(crate::Error::unsupported(channel.peer(), WITHOUT_WEBSOCKET))
    }
}

/// Does a server's WebSocket handshake over `channel`; a request for another path than `path` is refused.
#[cfg_attr(
    not(feature = "websocket"),
    expect(clippy::needless_pass_by_value, reason = "the layer is absent")
)]
pub(crate) fn websocket_server(
    channel: Box<dyn Channel>,
    path: &str,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Box<dyn Channel>> {
    #[cfg(feature = "websocket")]
    return Ok(Box::new(crate::websocket::WebSocketChannel::server(channel, path, deadline, cancel)?));
    #[cfg(not(feature = "websocket"))]
    {
        let _ = (path, deadline, cancel);
        Err(crate::Error::unsupported(channel.peer(), WITHOUT_WEBSOCKET))
    }
}

#[cfg(not(feature = "websocket"))]
pub(crate) const WITHOUT_WEBSOCKET: &str = "WebSocket; build towline-channel with its feature `websocket`";
