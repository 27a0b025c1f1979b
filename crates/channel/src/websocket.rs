//! WebSocket (RFC 6455) over TCP or TLS: a stream of bytes as binary messages, for network paths that permit
//! nothing else.
//!
//! ```text
//!   connect ─▶ GET /PATH, Upgrade ─▶ 101 ─┐                       ┌─ FrameWriter: batches of frames, masked by the client
//!   accept  ◀─ GET /PATH, Upgrade ◀─ 101 ─┴─ tungstenite ─▶ Framed┴─ FrameReader: binary messages, whole or in fragments
//! ```
//!
//! tungstenite does the handshake and knows a frame's header. The borders of messages mean nothing: bytes are
//! bytes. A ping is answered before the next data, or when its receiver waits for more. The end of a stream
//! is a Close frame; unlike others, our own two ends still send in the other direction after receiving one.
//!
//! Limits: no extensions (compression), no subprotocols, no redirects; text messages are refused. A frame has
//! at most [`frame::PAYLOAD_BYTES_MAX`] bytes; messages are not put together, so they may be of any length.

mod frame;
mod handshake;

use crate::channel::forward_channel;
use crate::framed::Framed;
use crate::wait::Deadline;
use crate::{Cancel, Channel, Result};
use frame::{FrameReader, FrameWriter, UnansweredPing, WebSocketRole};
use std::sync::Arc;
use std::time::Instant;

/// A connection whose handshake is complete.
#[derive(Debug)]
pub struct WebSocketChannel {
    framed: Framed<FrameWriter, FrameReader>,
}

impl WebSocketChannel {
    /// Performs a client's handshake over a connected channel: requests `path` of `host` (with its port).
    ///
    /// # Errors
    /// [`Error::WebSocket`](crate::Error::WebSocket) with the reason,
    /// [`Error::Cancelled`](crate::Error::Cancelled), [`Error::Timeout`](crate::Error::Timeout), those of
    /// `inner`, and [`Error::Unsupported`](crate::Error::Unsupported) for a channel that cannot be polled and
    /// peeked.
    pub fn client(
        inner: Box<dyn Channel>,
        host: &str,
        path: &str,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Self> {
        let deadline = Deadline::new("WebSocket handshake", inner.peer().to_owned(), deadline, cancel);
        handshake::client(inner.as_ref(), host, path, &deadline)?;
        Ok(Self::new(inner, WebSocketRole::Client))
    }

    /// Performs a server's handshake over a connected channel. A request for another path than `path` is
    /// refused.
    ///
    /// # Errors
    /// As [`Self::client`].
    pub fn server(inner: Box<dyn Channel>, path: &str, deadline: Instant, cancel: &Cancel) -> Result<Self> {
        let deadline = Deadline::new("WebSocket handshake", inner.peer().to_owned(), deadline, cancel);
        handshake::server(inner.as_ref(), path, &deadline)?;
        Ok(Self::new(inner, WebSocketRole::Server))
    }

    fn new(inner: Box<dyn Channel>, side: WebSocketRole) -> Self {
        let ping = Arc::new(UnansweredPing::default());
        let writer = FrameWriter::new(side, Arc::clone(&ping));
        let framed = Framed::new(inner, writer, frame::BATCH_BYTES, FrameReader::new(side, ping), &[], &[]);
        Self { framed }
    }
}

impl Channel for WebSocketChannel {
    forward_channel!(framed: peer, calls, capabilities, send, recv, flush, wait_recv, has_buffered, shutdown, reset, set_timeouts, as_fd);
}

impl Drop for WebSocketChannel {
    fn drop(&mut self) {
        self.framed.close();
    }
}
