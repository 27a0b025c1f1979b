//! Errors of a connection and of the sockets of a device.

use std::io;

use crate::record::RecordError;
use crate::session::SessionError;

/// Reason for the end of a connection, or of the service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket failed, or was cancelled.
    #[error(transparent)]
    Channel(#[from] towline_channel::Error),
    /// The session failed, or a refused request had no other reply.
    #[error("closing the connection of the frontend at {peer}: {source}")]
    Session {
        /// Address of the frontend.
        peer: String,
        /// The error.
        source: SessionError,
    },
    /// The device cannot be used by any frontend.
    #[error("a device has 1 to {most} queues, this one has {found}", most = crate::QUEUES_MAX)]
    Queues {
        /// Number of queues.
        found: usize,
    },
    /// The in-flight record cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// More sockets than one device uses.
    #[error("the service manager passes {found} sockets, expected 1; give each device its own unit")]
    Sockets {
        /// Number of sockets.
        found: usize,
    },
    /// The descriptor is not a usable socket.
    #[error("the descriptor given as a socket: {0}; give a Unix stream socket, listening or connected")]
    Descriptor(io::Error),
}

impl ServeError {
    pub(crate) fn session(peer: &str, source: SessionError) -> Self {
        Self::Session { peer: peer.to_owned(), source }
    }

    /// Returns true if it passes when descriptors or memory are released.
    pub(crate) fn is_out_of_resources(&self) -> bool {
        match self {
            Self::Channel(error) => towline_channel::is_out_of_resources(error),
            Self::Descriptor(error) => crate::backend_error::is_out_of_resources(error),
            Self::Session { source, .. } => source.is_out_of_resources(),
            _ => false,
        }
    }

    /// Returns true if the device refused this connection and may accept the next.
    pub(crate) fn is_temporary(&self) -> bool {
        matches!(self, Self::Session { source, .. } if source.is_temporary())
    }
}
