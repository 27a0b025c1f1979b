//! Errors of channels, by the party at fault.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// The result of every call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a call on a channel.
///
/// The variants separate an invalid request of the caller (`Unsupported`, `BadAddress`, `TooManyFds`,
/// `TlsCredentials`, `TlsOneTime`), a failure of this machine (`Io`, `TlsFile`, `Resolve`, `InUse`, `ZeroCopyMemory`), a peer that
/// went away or is slow (`Closed`, `Cut`, `Timeout`, `FdsTruncated`, `Command`), a peer that is not the
/// expected one (`Tls`, `WebSocket`), cancellation (`Cancelled`) and an injected fault (`Fault`).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller requested an operation that this kind of channel lacks.
    #[error("{peer} does not support {what}")]
    Unsupported {
        /// The other end.
        peer: String,
        /// The operation, and an alternative where there is one.
        what: &'static str,
    },
    /// The operating system refused a call.
    #[error("{op} on {peer}: {source}")]
    Io {
        /// The operation.
        op: &'static str,
        /// The other end.
        peer: String,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The directory of a new socket does not exist.
    #[error("unix:{}: {} is not a directory; create it, or correct the path", path.display(), path.parent().unwrap_or(path).display())]
    NoDirectory {
        /// Path of the socket.
        path: std::path::PathBuf,
    },
    /// The peer neither accepted nor sent a byte in time.
    #[error(
        "{op} on {peer}: nothing happened within {:.1} s; is the other end alive, or is the timeout too short?",
        after.as_secs_f64()
    )]
    Timeout {
        /// The operation.
        op: &'static str,
        /// The other end.
        peer: String,
        /// The time that we waited.
        after: Duration,
    },
    /// The stream ended inside something.
    #[error("{peer} ended the stream after {got} of {wanted} bytes; its own log may say why")]
    Closed {
        /// The other end.
        peer: String,
        /// Number of bytes requested.
        wanted: usize,
        /// Number of bytes that came before the end.
        got: usize,
    },
    /// The stream ended without the end-of-stream message that TLS and WebSocket require.
    #[error(
        "{peer} ended the stream without saying so (TLS close_notify, WebSocket Close): the connection was cut on its way, or the peer died; its own log may say why"
    )]
    Cut {
        /// The other end.
        peer: String,
    },
    /// The peers do not trust each other, or data was corrupted on the way.
    #[error("TLS with {peer}: {why}")]
    Tls {
        /// The other end.
        peer: String,
        /// The reason, and a remedy where there is one.
        why: String,
    },
    /// The peer does not speak WebSocket, or violates RFC 6455.
    #[error("WebSocket with {peer}: {why}")]
    WebSocket {
        /// The other end.
        peer: String,
        /// The reason, and a remedy where there is one.
        why: String,
    },
    /// A one-time certificate that cannot be made or used.
    #[error("one-time TLS certificate: {why}")]
    TlsOneTime {
        /// The reason.
        why: String,
    },
    /// A file with a certificate or a key that cannot be used.
    #[error("TLS credentials, {}: {why}", path.display())]
    TlsCredentials {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A file with a certificate or a key that cannot be read.
    #[error("TLS credentials, {}: {source}", path.display())]
    TlsFile {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The system has no room for another thread.
    #[error(
        "no thread can be started: {0}; raise the limit of processes (`ulimit -u`, `TasksMax=` of the unit, `pids.max` of the control group)"
    )]
    NoThread(std::io::Error),
    /// [`Cancel::cancel`](crate::Cancel::cancel) was called.
    #[error("cancelled")]
    Cancelled,
    /// An address that cannot be parsed or used.
    #[error("address \"{address}\": {why}")]
    BadAddress {
        /// The given address.
        address: String,
        /// The reason, and a valid form.
        why: String,
    },
    /// A host name without an address.
    #[error("cannot resolve host \"{host}\": {source}; give a numeric address or correct the name")]
    Resolve {
        /// The name.
        host: String,
        /// The resolver's answer.
        source: std::io::Error,
    },
    /// The path to listen on is in use.
    #[error("{} is in use by {by}; choose another path, or end what uses it", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
        /// The user of the path.
        by: &'static str,
    },
    /// The command of an `exec:` channel failed.
    #[error("command \"{command}\" failed: {status}; its messages are on standard error")]
    Command {
        /// The command as given to the shell.
        command: String,
        /// Exit status of the command.
        status: ExitStatus,
    },
    /// More descriptors in one message than [`FDS_MAX`](crate::FDS_MAX).
    #[error("{count} file descriptors for {peer} in one message, at most {limit} fit; send several messages")]
    TooManyFds {
        /// The other end.
        peer: String,
        /// Number of descriptors in the message.
        count: usize,
        /// The most that one message may have.
        limit: usize,
    },
    /// The kernel dropped descriptors of a message that was received (`MSG_CTRUNC`); the others were closed.
    #[error(
        "descriptors from {peer} were lost: it sent more than {limit} in one message, \
         or this process has reached its limit of open files (ulimit -n)"
    )]
    FdsTruncated {
        /// The other end.
        peer: String,
        /// The most that one message may have.
        limit: usize,
    },
    /// The kernel had no memory to send without copying (`ENOBUFS`), though we waited for earlier sends and
    /// sent less.
    #[error(
        "zero-copy send to {peer}: {source}, after {:.1} s of waiting; net.core.optmem_max is {optmem_max} and \
         RLIMIT_MEMLOCK (ulimit -l) {memlock}: raise the first to 1 MiB or more and the second to the guest's size, \
         or send without zero-copy",
        after.as_secs_f64()
    )]
    ZeroCopyMemory {
        /// The other end.
        peer: String,
        /// The time that it lasted.
        after: Duration,
        /// The sysctl's value, which bounds the completions that wait, per socket.
        optmem_max: String,
        /// The limit's value, which bounds the pages under way, per user; it does not bind `CAP_IPC_LOCK`.
        memlock: String,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// An injected fault of a fault layer.
    #[error("injected fault on {peer}: {what}")]
    Fault {
        /// The other end.
        peer: String,
        /// The fault.
        what: String,
    },
}

impl Error {
    /// The operating system's error number, where there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } | Self::Resolve { source, .. } | Self::ZeroCopyMemory { source, .. } => {
                source.raw_os_error()
            }
            _ => None,
        }
    }

    pub(crate) fn io(op: &'static str, peer: &str, source: impl Into<std::io::Error>) -> Self {
        Self::Io { op, peer: peer.to_owned(), source: source.into() }
    }

    pub(crate) fn unsupported(peer: &str, what: &'static str) -> Self {
        Self::Unsupported { peer: peer.to_owned(), what }
    }

    pub(crate) fn tls(peer: &str, why: impl Into<String>) -> Self {
        Self::Tls { peer: peer.to_owned(), why: why.into() }
    }

    #[cfg(feature = "websocket")]
    pub(crate) fn websocket(peer: &str, why: impl Into<String>) -> Self {
        Self::WebSocket { peer: peer.to_owned(), why: why.into() }
    }

    pub(crate) fn timeout(op: &'static str, peer: &str, after: Duration) -> Self {
        Self::Timeout { op, peer: peer.to_owned(), after }
    }
}
