//! What the engine needs of the host's side: sockets that never wait.

use std::io;

use towline_channel::{IoBuf, IoBufMut};

use crate::connection::{ConnectionId, ConnectionKey};
use crate::packet::{Kind, SeqFlags, ShutdownFlags};

/// The host's side of connections. Who implements it tells the engine what became ready: with
/// [`Engine::readable`](crate::Engine::readable) once each time that there is something new, with
/// [`Engine::writable`](crate::Engine::writable) when that was asked for.
pub trait Sockets {
    /// One connected socket.
    type Socket;

    /// The guest wants to be connected with what this key names.
    fn connect(&mut self, id: ConnectionId, key: ConnectionKey, kind: Kind) -> ConnectOutcome<Self::Socket>;

    /// A socket of the host's own that asked for a port is this connection now; news of it are told from now on, and what
    /// it has already.
    fn opened(&mut self, id: ConnectionId, socket: &Self::Socket);

    /// The guest has accepted what this socket asked for; `port` is the host side's.
    ///
    /// # Errors
    /// That the socket is gone.
    fn accepted(&mut self, id: ConnectionId, socket: &Self::Socket, port: u32) -> io::Result<()>;

    /// Receives into these buffers, a message at most where messages are kept; at most
    /// [`IOV_MAX`](towline_channel::IOV_MAX) - 1 buffers.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is nothing, all others for good: also a message that is longer than the
    /// buffers.
    fn receive(&mut self, socket: &Self::Socket, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received>;

    /// What comes next, without taking it. Empty messages are left out: vsock does not carry them.
    ///
    /// # Errors
    /// As [`Sockets::receive`].
    fn front(&mut self, socket: &Self::Socket) -> io::Result<Peeked>;

    /// Sends these bytes, or some of them; all of them as one message where messages are kept, and then `ends` is what ends
    /// with it.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is no room, all others for good.
    fn send(&mut self, socket: &Self::Socket, bufs: &[IoBuf<'_>], ends: SeqFlags) -> io::Result<usize>;

    /// Whether a stream's large packets are better sent by [`Sockets::lend`] now.
    fn lends(&mut self, socket: &Self::Socket) -> bool {
        let _ = socket;
        false
    }

    /// Sends these bytes of a stream, or some of them, which are read also after the call: until [`Sockets::freed`] tells
    /// at least the number that is returned with how many they are. No number: they were copied after all. Numbers rise,
    /// from 1.
    ///
    /// # Errors
    /// As [`Sockets::send`].
    fn lend(&mut self, socket: &Self::Socket, bufs: &[IoBuf<'_>]) -> io::Result<(usize, Option<u64>)> {
        Ok((self.send(socket, bufs, SeqFlags::empty())?, None))
    }

    /// Up to which number loans are over. Who implements it calls [`Engine::freed`](crate::Engine::freed) when that has
    /// changed.
    fn freed(&mut self, socket: &Self::Socket) -> u64 {
        let _ = socket;
        u64::MAX
    }

    /// Its connection has ended while something is lent: nothing more is sent or received, but what was sent is delivered,
    /// or, `reset`, dropped. It is closed when all is free.
    fn part(&mut self, socket: &Self::Socket, reset: bool) {
        let _ = reset;
        self.shutdown(socket, ShutdownFlags::all());
    }

    /// SeqFlags one way or both.
    fn shutdown(&mut self, socket: &Self::Socket, what: ShutdownFlags);

    /// Whether to tell when there is room.
    fn watch_writable(&mut self, id: ConnectionId, socket: &Self::Socket, wanted: bool);

    /// It is not needed any more; `reset`: and its end is not an orderly one.
    fn close(&mut self, socket: Self::Socket, reset: bool);

    /// A connection that was to come [`ConnectOutcome::InProgress`] is not wanted any more.
    fn forget(&mut self, id: ConnectionId);
}

/// What became of a wish to connect.
#[derive(Debug)]
pub enum ConnectOutcome<S> {
    /// Connected.
    Connected(S),
    /// [`Engine::connected`](crate::Engine::connected) will be told.
    InProgress,
    /// There is nobody, or nobody whom the guest may have.
    Refused,
}

/// What comes next out of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peeked {
    /// A message of this length in bytes; of a stream, at least so many bytes.
    Bytes(usize),
    /// The end.
    Eof,
    /// As many empty messages as are skipped at a time; there may be more. Ask again when others have had a turn.
    Skipped,
}

/// What was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// How many bytes; 0 is the end.
    pub bytes: usize,
    /// Whether the socket may have more, though there was room in the buffers.
    pub more: bool,
    /// Of a message: whether a record ends with it.
    pub record: bool,
}

impl Received {
    /// What ends with it, if it is a message.
    pub fn ends(&self) -> SeqFlags {
        if self.record { SeqFlags::all() } else { SeqFlags::EOM }
    }
}
