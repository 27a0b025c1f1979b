//! Errors that end a migration.

use std::time::Duration;

use crate::convergence::CannotConverge;

/// The first error of a migration; later ones are its consequences.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A channel failed.
    #[error("{0}")]
    Channel(#[from] towline_channel::Error),
    /// The peer's bytes violate the protocol.
    #[error("{peer}: {source}")]
    Protocol {
        /// The sender.
        peer: String,
        /// The fault.
        source: towline_protocol::Error,
    },
    /// A lane failed.
    #[error("lane {lane}: {source}")]
    Lane {
        /// Number of the lane.
        lane: usize,
        /// The cause.
        source: Box<Error>,
    },
    /// The guest could not be read, or its destination could not take it.
    #[error("{0}")]
    Guest(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The other end closed the connection in the middle.
    #[error("{peer} closed the connection while {awaiting} was awaited")]
    Ended {
        /// The peer.
        peer: String,
        /// The expected item.
        awaiting: &'static str,
    },
    /// The source closed its connection before it was acknowledged.
    #[error(
        "{peer} closed the connection before the guest's arrival was acknowledged: it has its guest back"
    )]
    SourceGone {
        /// The peer.
        peer: String,
    },
    /// A lane's connection ended before outstanding data or a barrier.
    #[error("the connection ended before its last barrier")]
    LaneEnded,
    /// Fewer lanes than expected connected.
    #[error(
        "{connected} of {expected} lanes connected within {:.1} s: the source must have multifd on, and multifd-channels {expected} as here",
        waited.as_secs_f64()
    )]
    LanesMissing {
        /// Number of connections.
        connected: usize,
        /// Number of this that side has.
        expected: usize,
        /// The time that was waited.
        waited: Duration,
    },
    /// The source has more lanes than this side.
    #[error(
        "the source has a lane {}, but the number of lanes here is {expected}: give both ends the same multifd-channels",
        u16::from(*id) + 1
    )]
    LaneTooMany {
        /// The number it gave itself.
        id: u8,
        /// Number of this that side has.
        expected: usize,
    },
    /// The destination has not acknowledged the guest.
    #[error("{peer} ended without saying that it has the guest: it refused it or died, its own log says why")]
    NotAcknowledged {
        /// The destination.
        peer: String,
    },
    /// The destination is silent.
    #[error(
        "{peer} did not answer within {:.1} s: it is not a QEMU that waits for this guest, or its multifd-channels is not {lanes}",
        waited.as_secs_f64()
    )]
    NoAnswer {
        /// The destination.
        peer: String,
        /// The time that was waited.
        waited: Duration,
        /// Number of lanes on this side.
        lanes: usize,
    },
    /// A towline at the destination has stopped, on a host that still acknowledges what it is sent.
    #[error("{peer} sent no heartbeat for {:.1} s: its towline has stopped", silence.as_secs_f64())]
    PeerStopped {
        /// The destination.
        peer: String,
        /// Time since its last message.
        silence: Duration,
    },
    /// Compression or decompression fails on this side.
    #[error("{method} fails on this side: {text}")]
    Compressor {
        /// QEMU's name of the method.
        method: &'static str,
        /// Its error message.
        text: String,
    },
    /// Zero-copy sends are required and unavailable.
    #[error("zero-copy sends are not possible: {why}")]
    NoZeroCopy {
        /// The reason.
        why: String,
    },
    /// A lane sent pages that no barrier follows, so their order is not known.
    #[error(
        "pages arrived after the last barrier: the source broke off, or its multifd is not as its machine type says"
    )]
    BehindBarrier,
    /// The migration failed, and the guest that was stopped for it is still stopped.
    #[error("{source}; it must be started again by hand, since that failed: {start}")]
    NotStarted {
        /// The migration's error.
        source: Box<Error>,
        /// The error of the restart.
        start: Box<Error>,
    },
    /// The guest writes faster than it can be sent; it runs on at its source.
    #[error("{0}")]
    CannotConverge(#[from] CannotConverge),
    /// The guest has no block of a name that is reported as present at the destination.
    #[error(
        "the guest has no RAM block {block:?}, whose memory is reported as present at the destination; its blocks are {}", found.join(", ")
    )]
    NoSuchBlock {
        /// The block's name.
        block: String,
        /// Names of the guest's blocks.
        found: Vec<String>,
    },
    /// Postcopy has the destination discard its memory.
    #[error("postcopy would discard RAM block {block:?}, whose memory the destination already has")]
    PresentInPostcopy {
        /// The block's name.
        block: String,
    },
    /// A thread of this migration panicked; its own message has the location.
    #[error("a thread of the migration panicked; this is a bug of towline, please report its message")]
    Panicked,
    /// The migration was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// The result of every fallible operation of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Wraps an error of a [`crate::Guest`] or [`crate::Sink`].
    pub fn guest(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Guest(Box::new(error))
    }

    pub(crate) fn protocol(peer: &str) -> impl Fn(towline_protocol::Error) -> Self {
        move |source| Self::Protocol { peer: peer.to_owned(), source }
    }

    pub(crate) fn lane(lane: usize) -> impl Fn(Self) -> Self {
        move |source| Self::Lane { lane, source: Box::new(source) }
    }
}
