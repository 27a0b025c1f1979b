//! Interface of the engine to the sockets of the host, all of which are non-blocking.

use std::io;

use towline_channel::{IoBuf, IoBufMut};

use crate::connection::{ConnectionId, ConnectionKey};
use crate::packet::{SeqFlags, ShutdownFlags, SocketType};

/// The host's side of connections. An implementation reports events to the engine:
/// [`Engine::readable`](crate::Engine::readable) once per edge, [`Engine::writable`](crate::Engine::writable)
/// while its [`Interest`] includes it.
pub trait Sockets {
    /// A connected socket.
    type Socket;

    /// Connects to the destination of a key, as the guest has requested.
    fn connect(
        &mut self,
        id: ConnectionId,
        key: ConnectionKey,
        kind: SocketType,
    ) -> ConnectOutcome<Self::Socket>;

    /// Associates a socket of the host that requested a port of the guest with its connection. From now on
    /// its events are reported, including data that it has already.
    fn opened(&mut self, id: ConnectionId, socket: &Self::Socket);

    /// Notifies the client of this socket that the guest has accepted its connection; `port` is the host's
    /// port.
    ///
    /// # Errors
    /// The client has closed the socket.
    fn accepted(&mut self, id: ConnectionId, socket: &Self::Socket, port: u32) -> io::Result<()>;

    /// Receives into these buffers, at most [`IOV_MAX`](towline_channel::IOV_MAX) - 1 of them. From a socket
    /// with message boundaries it receives one message.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is nothing. All others are permanent; one of them is a message
    /// that is longer than the buffers.
    fn receive(&mut self, socket: &Self::Socket, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome>;

    /// Peeks at the next message, or the next bytes. Empty messages are dropped: vsock does not transport
    /// them.
    ///
    /// # Errors
    /// As [`Sockets::receive`].
    fn peek(&mut self, socket: &Self::Socket) -> io::Result<Peeked>;

    /// Sends these bytes or a part of them. On a socket with message boundaries they are one message, which
    /// is sent as a whole, and `flags` are those of its end.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the socket's buffer is full. All others are permanent.
    fn send(&mut self, socket: &Self::Socket, bufs: &[IoBuf<'_>], flags: SeqFlags) -> io::Result<usize>;

    /// Enlarges the send buffer of a stream, once. Its peer has read after the buffer was full.
    fn enlarge_send_buffer(&mut self, socket: &Self::Socket) {
        let _ = socket;
    }

    /// Shuts down one or both directions.
    fn shutdown(&mut self, socket: &Self::Socket, directions: ShutdownFlags);

    /// Sets the events to report for a socket.
    fn set_interest(&mut self, id: ConnectionId, socket: &Self::Socket, interest: Interest);

    /// Closes a socket.
    fn close(&mut self, socket: Self::Socket, mode: CloseMode);

    /// Cancels a connect that is [in progress](ConnectOutcome::InProgress).
    fn cancel_connect(&mut self, id: ConnectionId);
}

/// Outcome of [`Sockets::connect`].
#[derive(Debug)]
pub enum ConnectOutcome<S> {
    /// The socket is connected.
    Connected(S),
    /// The result will be reported to [`Engine::connected`](crate::Engine::connected).
    InProgress,
    /// The destination does not exist, or the guest may not connect to it.
    Refused,
}

/// Events of a socket that are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Data to receive, and the end of the connection.
    Read,
    /// Also space in the send buffer.
    ReadWrite,
}

/// Graceful close or reset of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseMode {
    /// The peer receives the end of the stream.
    Graceful,
    /// The peer gets an error, if the socket's family can report one.
    Reset,
}

/// Readiness of a socket to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Readiness {
    /// Data is available.
    Readable,
    /// Urgent data is available (`MSG_OOB`), at whose mark a read stops.
    Urgent,
    /// The peer sends no more.
    ReadClosed,
    /// The peer has stopped sending and receiving.
    Closed,
}

/// Outcome of [`Sockets::peek`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peeked {
    /// A message of this length in bytes; of a stream, the minimum number of bytes.
    Bytes(usize),
    /// The end of the stream.
    Eof,
    /// Only empty messages were found so far. The caller peeks again after other connections have had their
    /// turn.
    Skipped,
}

/// Outcome of [`Sockets::receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveOutcome {
    /// Number of bytes; 0 is the end of the stream.
    pub bytes: usize,
    /// True if the socket may have more, although the buffers were not full.
    pub more: bool,
    /// True if the message ends a record (`MSG_EOR`).
    pub eor: bool,
}

impl ReceiveOutcome {
    /// Returns the flags of the end of a message.
    pub fn flags(&self) -> SeqFlags {
        if self.eor { SeqFlags::all() } else { SeqFlags::EOM }
    }
}
