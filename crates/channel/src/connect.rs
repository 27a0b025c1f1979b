//! Reaching the other end.

use crate::exec::ExecChannel;
use crate::file::FileChannel;
use crate::layers;
use crate::tls::TlsClient;
use crate::wait::Deadline;
use crate::{Address, Cancel, Channel, Error, Result, fd, tcp, unix};
use std::time::{Duration, Instant};

/// Interval between attempts to connect to a peer that does not listen yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Options of a connection.
#[derive(Debug, Clone, Default)]
pub struct ConnectOptions {
    /// True if a peer that does not listen yet (connection refused, no such socket) is tried again until the
    /// deadline.
    pub retry: bool,
    /// True if zero-copy sends are wanted. Where they are unavailable (another kind, an old kernel), the
    /// channel opens without [`Capabilities::ZERO_COPY`](crate::Capabilities::ZERO_COPY).
    pub zero_copy: bool,
    /// Silence of a `tcp:` peer after which the connection ends; `None`:
    /// [`PEER_TIMEOUT`](crate::PEER_TIMEOUT).
    pub peer_timeout: Option<Duration>,
    /// TLS credentials; the server must present a certificate. Always `None` without the feature `tls`.
    pub tls: Option<TlsClient>,
}

/// Opens a channel to an address with the default [`ConnectOptions`].
///
/// # Errors
/// As [`connect_with`].
pub fn connect(address: &Address, deadline: Instant, cancel: &Cancel) -> Result<Box<dyn Channel>> {
    connect_with(address, deadline, cancel, &ConnectOptions::default())
}

/// Opens a channel to an address. `tcp:` tries all addresses of the host; `fd:N` takes the descriptor over;
/// `exec:` starts the command; `file:` creates the file or truncates it at the offset, and is write-only (to
/// read one, see [`Listener`](crate::Listener)).
///
/// # Errors
/// [`Error::Cancelled`] as soon as the token is cancelled, [`Error::Timeout`] at the deadline,
/// [`Error::Resolve`], [`Error::BadAddress`], [`Error::Tls`], [`Error::WebSocket`], and [`Error::Io`]: with
/// `ConnectOptions::retry`, that of the last attempt.
pub fn connect_with(
    address: &Address,
    deadline: Instant,
    cancel: &Cancel,
    options: &ConnectOptions,
) -> Result<Box<dyn Channel>> {
    address.check_tls(options.tls.is_some())?;
    let until = Deadline::new("connect", address.to_string(), deadline, cancel);
    let channel = loop {
        cancel.check()?;
        match once(address, &until, options) {
            Ok(channel) => break channel,
            Err(error)
                if options.retry && is_not_listening_yet(address, &error) && !until.remaining().is_zero() =>
            {
                until.pause(RETRY_INTERVAL)?;
            }
            Err(error) => return Err(error),
        }
    };
    let channel = match &options.tls {
        Some(tls) => layers::tls_client(channel, tls, server_name(tls, address)?, deadline, cancel)?,
        None => channel,
    };
    match (address, address.authority()) {
        (Address::WebSocket { path, .. }, Some(host)) => {
            layers::websocket_client(channel, &host, path, deadline, cancel)
        }
        _ => Ok(channel),
    }
}

/// The name that the server's certificate must be for.
fn server_name<'a>(tls: &'a TlsClient, address: &'a Address) -> Result<&'a str> {
    match (tls.hostname(), address) {
        (Some(name), _) => Ok(name),
        (None, Address::Tcp { host, .. }) if host.is_empty() => Ok("localhost"),
        (None, Address::Tcp { host, .. } | Address::WebSocket { host, .. }) => Ok(host),
        (None, _) => Err(address.bad("it names no host; give the name in its certificate")),
    }
}

fn once(address: &Address, until: &Deadline<'_>, options: &ConnectOptions) -> Result<Box<dyn Channel>> {
    Ok(match address {
        Address::Tcp { host, port } => {
            let channel = tcp::connect(host, *port, until)?.with_peer_timeout(options.peer_timeout)?;
            Box::new(channel.with_zero_copy(options.zero_copy)?)
        }
        Address::WebSocket { host, port, .. } => {
            Box::new(tcp::connect(host, *port, until)?.with_peer_timeout(options.peer_timeout)?)
        }
        Address::Unix(path) => Box::new(unix::connect(path, until)?),
        Address::Fd(number) => fd::open(*number)?,
        Address::Exec(command) => Box::new(ExecChannel::spawn(command)?),
        Address::File { path, offset } => Box::new(FileChannel::create(path, *offset)?),
    })
}

/// Returns true for the error of an address that no process listens on yet.
fn is_not_listening_yet(address: &Address, error: &Error) -> bool {
    match address {
        Address::Tcp { .. } | Address::WebSocket { .. } => error.raw_os_error() == Some(libc::ECONNREFUSED),
        Address::Unix(_) => matches!(error.raw_os_error(), Some(libc::ECONNREFUSED | libc::ENOENT)),
        _ => false,
    }
}
