//! Error of a WebSocket.

use crate::Error;

pub(super) fn error(peer: &str, why: impl Into<String>) -> Error {
    Error::WebSocket { peer: peer.to_owned(), why: why.into() }
}
