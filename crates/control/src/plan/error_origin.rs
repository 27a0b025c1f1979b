//! Whose failure it was that ended a stream: the first error names a connection, and the connection one of the two QEMUs.
//! What the other QEMU then says of itself is a consequence, and would only hide the reason.

use std::path::Path;

use towline_channel::Error as ChannelError;
use towline_migration::Compression;
use towline_migration::Error as MigrationError;
use towline_qmp as qmp;

use super::error::Error;
use crate::qemu;

/// Whether `error` is of the monitor at `monitor`, or of the stream over the socket at `stream`.
pub(super) fn is_from(error: &Error, monitor: &str, stream: &Path) -> bool {
    match error {
        Error::Channel(error) => peer(error).is_some_and(|peer| is_socket(peer, stream)),
        Error::Migration(error) => stream_peer(error).is_some_and(|peer| is_socket(peer, stream)),
        Error::Qemu(qemu::Error::Qmp(qmp::Error::Disconnected { socket, .. })) => socket == monitor,
        _ => false,
    }
}

/// Whether nothing more can be learned from this monitor.
pub(super) fn is_monitor_lost(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(error)) if error.is_disconnected())
}

/// Whether QEMU did not answer in time, and may later.
pub(super) fn is_timeout(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(qmp::Error::Timeout { .. })))
}

/// Whether QEMU answered, and would not.
pub(super) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(qmp::Error::Refusal { .. })))
}

/// Whether the guest could not be read.
pub(super) fn is_guest_error(error: &MigrationError) -> bool {
    matches!(error, MigrationError::Guest(_))
}

/// Whether a thread ended because the user wanted to stop.
pub(super) fn is_cancelled(error: &MigrationError) -> bool {
    match error {
        MigrationError::Cancelled => true,
        MigrationError::Lane { source, .. } => is_cancelled(source),
        _ => false,
    }
}

/// Whether it is neither end of the stream: the user's wish, the image's damage, a full disk.
pub(super) fn is_local(error: &Error) -> bool {
    fn is(error: &MigrationError) -> bool {
        match error {
            MigrationError::Guest(_) | MigrationError::Cancelled => true,
            MigrationError::Lane { source, .. } => is(source),
            _ => false,
        }
    }
    match error {
        Error::Cancelled | Error::Image(_) => true,
        Error::Migration(error) => is(error),
        _ => false,
    }
}

/// Says of lanes to somebody else's destination what it may mean that they are lost: one that wants fewer takes or keeps no
/// others, and one that expects another compression none of these.
pub(super) fn explain_lane_loss(error: Error, lanes: usize, compression: Compression) -> Error {
    let compression = compression.method().name();
    match error {
        Error::Migration(MigrationError::Channel(ChannelError::Timeout {
            op: "connect" | "TLS handshake" | "WebSocket handshake",
            peer,
            after,
        })) if lanes > 0 => Error::LanesNotTaken { peer, lanes, waited: after },
        Error::Migration(MigrationError::Lane { lane, source })
            if matches!(*source, MigrationError::Channel(_)) =>
        {
            Error::LaneLost { lanes, compression, source: MigrationError::Lane { lane, source } }
        }
        error => error,
    }
}

/// Whether it is of a stream's connection to this peer.
pub(super) fn is_from_peer(error: &Error, peer: &str) -> bool {
    matches!(error, Error::Migration(error) if stream_peer(error) == Some(peer))
}

/// Whether this monitor did not answer, rather than refuse something.
pub(super) fn is_monitor_unreachable(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(error)) if !matches!(error, qmp::Error::Refusal { .. }))
}

fn is_socket(peer: &str, stream: &Path) -> bool {
    peer.strip_prefix("unix:").is_some_and(|path| Path::new(path) == stream)
}

fn stream_peer(error: &MigrationError) -> Option<&str> {
    match error {
        MigrationError::Channel(error) => peer(error),
        MigrationError::Protocol { peer, .. }
        | MigrationError::Ended { peer, .. }
        | MigrationError::NotAcknowledged { peer }
        | MigrationError::NoAnswer { peer, .. } => Some(peer),
        MigrationError::Lane { source, .. } => stream_peer(source),
        _ => None,
    }
}

fn peer(error: &ChannelError) -> Option<&str> {
    match error {
        ChannelError::Unsupported { peer, .. }
        | ChannelError::Io { peer, .. }
        | ChannelError::Timeout { peer, .. }
        | ChannelError::Closed { peer, .. }
        | ChannelError::Cut { peer }
        | ChannelError::Tls { peer, .. }
        | ChannelError::WebSocket { peer, .. } => Some(peer),
        _ => None,
    }
}
