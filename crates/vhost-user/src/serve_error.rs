//! Errors of a connection and of the sockets of a device.

use std::io;

use crate::backend_error::Persistence;
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

    pub(crate) fn persistence(&self) -> Persistence {
        match self {
            Self::Channel(error) if towline_channel::is_out_of_resources(error) => Persistence::Exhausted,
            Self::Descriptor(error) => Persistence::of(error),
            Self::Session { source, .. } => source.persistence(),
            _ => Persistence::Permanent,
        }
    }
}
