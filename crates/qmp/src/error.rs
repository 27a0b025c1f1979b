//! Errors between a client and a monitor, by the party at fault.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::codec::CodecError;

/// Error of a QMP call. Every text names the socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket's file does not exist.
    #[error(
        "no QMP socket at {socket}: check the path, or start QEMU with -qmp unix:{socket},server=on,wait=off"
    )]
    Missing {
        /// The path that was tried.
        socket: String,
    },
    /// No process listens on the socket.
    #[error("no process listens on QMP socket {socket}: the QEMU that made it has ended")]
    Refused {
        /// The path that was tried.
        socket: String,
    },
    /// Any other failure of `connect`, for example missing permission or a path that is too long.
    #[error("cannot connect to QMP socket {socket}: {source}")]
    Connect {
        /// The path that was tried.
        socket: String,
        /// The system's error.
        source: io::Error,
    },
    /// The monitor's backlog is full.
    #[error(
        "could not connect to QMP socket {socket} within {:.1} s: another client holds this monitor and more wait \
         for it (QEMU serves one at a time); close them, or give QEMU a second -qmp",
        waited.as_secs_f64()
    )]
    Busy {
        /// The path that was tried.
        socket: String,
        /// The time waited.
        waited: Duration,
    },
    /// Connected, but no greeting arrived.
    #[error(
        "no QMP greeting on {socket} within {:.1} s: another client holds this monitor (QEMU serves one at a \
         time; close it, or give QEMU a second -qmp), or {socket} is not a QMP socket, or QEMU hangs",
        waited.as_secs_f64()
    )]
    NoGreeting {
        /// The socket.
        socket: String,
        /// The time waited.
        waited: Duration,
    },
    /// Connected, but the peer does not speak QMP.
    #[error("{socket} is not a QMP socket: expected QEMU's greeting, found \"{found}\"; {hint}")]
    NotQmp {
        /// The socket.
        socket: String,
        /// The reply.
        found: String,
        /// The remedy.
        hint: &'static str,
    },
    /// No reply in time. The connection remains usable; a late reply is discarded.
    #[error("no answer to {command} on {socket} within {:.1} s: QEMU hangs or is busy", waited.as_secs_f64())]
    Timeout {
        /// The command's name.
        command: String,
        /// The socket.
        socket: String,
        /// The time waited.
        waited: Duration,
    },
    /// QEMU refused.
    #[error("QEMU on {socket} refuses {command}: {desc}")]
    Refusal {
        /// The command's name.
        command: String,
        /// The socket.
        socket: String,
        /// QEMU's error class: mostly `GenericError`, or `CommandNotFound`.
        class: String,
        /// QEMU's words.
        desc: String,
    },
    /// The reply is not of the command's documented type.
    #[error("QEMU on {socket} answered {command} in a shape that we do not know ({reason}): \"{excerpt}\"")]
    Shape {
        /// The command's name.
        command: String,
        /// The socket.
        socket: String,
        /// The mismatch.
        reason: String,
        /// The beginning of the answer.
        excerpt: String,
    },
    /// The arguments cannot be serialized as JSON. The caller's fault.
    #[error("arguments of {command} cannot be written as JSON: {reason}")]
    Arguments {
        /// The command's name.
        command: String,
        /// The reason.
        reason: String,
    },
    /// The awaited event did not arrive.
    #[error("the awaited event did not come on {socket} within {:.1} s", waited.as_secs_f64())]
    NoEvent {
        /// The socket.
        socket: String,
        /// The time waited.
        waited: Duration,
    },
    /// The caller ended the wait ([`Options::interrupt`](crate::Options::interrupt)).
    #[error("waiting for QEMU on {socket} was cancelled")]
    Cancelled {
        /// The socket.
        socket: String,
    },
    /// The connection is lost.
    #[error("the connection to QEMU on {socket} was lost during {during}: {by}")]
    Disconnected {
        /// The socket.
        socket: String,
        /// The operation.
        during: String,
        /// The cause.
        by: DisconnectReason,
    },
}

impl Error {
    /// Returns true if QEMU does not know the command.
    pub fn is_command_not_found(&self) -> bool {
        matches!(self, Self::Refusal { class, .. } if class == "CommandNotFound")
    }

    /// Returns true if the connection is lost.
    pub fn is_disconnected(&self) -> bool {
        matches!(self, Self::Disconnected { .. })
    }
}

/// Cause of a disconnect.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectReason {
    /// The peer closed it: QEMU ended, crashed, or removed the monitor.
    PeerClosed,
    /// The peer sent something other than QMP, so the client closed it.
    InvalidData(CodecError),
    /// A command could be sent only in part before its deadline, so no further one can be sent.
    PartialSend,
    /// A system call failed.
    System(String),
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerClosed => f.write_str("QEMU closed it (ended, crashed, or the monitor was taken away)"),
            Self::InvalidData(error) => write!(f, "closed by us, {error}"),
            Self::PartialSend => f.write_str("closed by us, QEMU stopped reading in the middle of a command"),
            Self::System(text) => write!(f, "{text}"),
        }
    }
}
