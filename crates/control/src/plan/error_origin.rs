//! Origin of an error that ended a stream: the first error names a connection, and the connection one of the
//! two QEMUs. What the other QEMU then reports is a consequence, and would only hide the reason.

use rustix::io::Errno;
use towline_channel::{Address, Error as ChannelError};
use towline_migration::{Compression, Error as MigrationError};
use towline_qmp as qmp;

use super::error::Error;
use crate::qemu;

/// Returns true if `error` comes from the monitor at `monitor`, or from the stream by the address `stream`.
pub(super) fn is_from(error: &Error, monitor: &str, stream: &Address) -> bool {
    let stream = stream.to_string();
    match error {
        Error::Channel(error) => peer(error) == Some(&stream),
        Error::Migration(error) => stream_peer(error) == Some(&stream),
        Error::Qemu(qemu::Error::Qmp(qmp::Error::Disconnected { socket, .. })) => socket == monitor,
        _ => false,
    }
}

/// Returns true if the other host has refused a connection.
pub(super) fn is_connection_refused(error: &Error) -> bool {
    let Error::Channel(ChannelError::Io { source, .. }) = error else { return false };
    source.kind() == std::io::ErrorKind::ConnectionRefused
}

/// Returns true if the monitor is disconnected.
pub(super) fn is_monitor_lost(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(error)) if error.is_disconnected())
}

/// Returns true if QEMU did not reply in time; it may later.
pub(super) fn is_timeout(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(qmp::Error::Timeout { .. })))
}

/// Returns true if QEMU refused the command.
pub(super) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(qmp::Error::Refusal { .. })))
}

/// Returns true if the guest could not be read from its store, and may be readable later.
pub(super) fn may_pass(error: &MigrationError) -> bool {
    let MigrationError::Guest(error) = error else { return false };
    error.downcast_ref().is_some_and(towline_image::Error::may_pass)
}

/// Returns true if a thread ended because of a cancellation.
pub(super) fn is_cancelled(error: &MigrationError) -> bool {
    match error {
        MigrationError::Cancelled => true,
        MigrationError::Lane { source, .. } => is_cancelled(source),
        _ => false,
    }
}

/// Returns true if neither end of the stream failed: a cancellation, a damaged image, a full disk.
pub(super) fn is_local(error: &Error) -> bool {
    fn is(error: &MigrationError) -> bool {
        match error {
            MigrationError::Guest(_)
            | MigrationError::Cancelled
            | MigrationError::Channel(ChannelError::NoThread(_)) => true,
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

/// Adds the probable reason to the loss of lanes at a destination that another party drives: it expects fewer
/// lanes, and accepts or keeps no others, or it expects another compression.
pub(super) fn explain_lane_loss(error: Error, lanes: usize, compression: Compression) -> Error {
    let compression = compression.method().name();
    match error {
        Error::Migration(MigrationError::Channel(ChannelError::Timeout {
            op: "connect" | "TLS handshake" | "WebSocket handshake",
            peer,
            after,
        })) if lanes > 0 => Error::LanesNotTaken { peer, lanes, waited: after },
        Error::Migration(MigrationError::Lane { lane, source }) if matches!(&*source, MigrationError::Channel(error) if !is_silence(error)) => {
            Error::LaneLost { lanes, compression, source: MigrationError::Lane { lane, source } }
        }
        error => error,
    }
}

/// Returns true if the connection was lost because its peer was silent: options have nothing to do with it.
fn is_silence(error: &ChannelError) -> bool {
    error.raw_os_error() == Some(Errno::TIMEDOUT.raw_os_error())
}

/// Returns true if the error comes from a stream's connection to this peer.
pub(super) fn is_from_peer(error: &Error, peer: &str) -> bool {
    matches!(error, Error::Migration(error) if stream_peer(error) == Some(peer))
}

/// Returns true if the monitor could not be reached, rather than refused a command.
pub(super) fn is_monitor_unreachable(error: &Error) -> bool {
    matches!(error, Error::Qemu(qemu::Error::Qmp(error)) if !matches!(error, qmp::Error::Refusal { .. }))
}

fn stream_peer(error: &MigrationError) -> Option<&str> {
    match error {
        MigrationError::Channel(error) => peer(error),
        MigrationError::Protocol { peer, .. }
        | MigrationError::Ended { peer, .. }
        | MigrationError::NotAcknowledged { peer }
        | MigrationError::NoAnswer { peer, .. }
        | MigrationError::PeerStopped { peer, .. } => Some(peer),
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
