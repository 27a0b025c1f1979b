//! Model of the host: programs, and the kernel between them and the device. Sockets transfer any part of the
//! data at any time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use towline_channel::{IoBuf, IoBufMut, gather, scatter};
use towline_vsock::packet::{SeqFlags, ShutdownFlags, SocketType};
use towline_vsock::{
    CloseMode, ConnectOutcome, ConnectionId, ConnectionKey, Interest, Peeked, Readiness, ReceiveOutcome,
    Sockets,
};

use crate::plan::{Plan, byte};

/// A socket: the device's end, the kernel's buffers, and the program at the other end.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) plan: Plan,
    pub(crate) id: Option<ConnectionId>,
    /// To the guest: bytes that the program has written, and that the device has received.
    written: u32,
    received: u32,
    /// From the guest: bytes that the device has sent, and that the program has read.
    pub(crate) sent: u32,
    read: u32,
    capacity: u32,
    /// Lengths of messages that were sent.
    pub(crate) messages: Vec<u32>,
    /// The program has shut down its sending side.
    pub(crate) ended: bool,
    /// The program has closed its socket, or aborted.
    pub(crate) closed: bool,
    pub(crate) aborted: bool,
    /// The device has shut down its sending side, or closed its socket.
    pub(crate) eof_sent: bool,
    pub(crate) device_closed: bool,
    pub(crate) accepted: bool,
    read_edge: bool,
    watches_space: bool,
    space_edge: bool,
}

pub(crate) type Shared = Rc<RefCell<Socket>>;

/// All sockets, by the port that the guest connects to.
pub(crate) struct World {
    pub(crate) rng: fastrand::Rng,
    /// Destinations of the guest's connections.
    pub(crate) listeners: BTreeMap<u32, Shared>,
    /// Connects in progress.
    pub(crate) connecting: Vec<(ConnectionId, Shared)>,
}

pub(crate) fn socket(plan: &Plan, rng: &mut fastrand::Rng) -> Shared {
    // A long stream through the smallest buffer would only be slow.
    let capacity = [1, 100, 3000, 100_000][rng.usize(..4)].max(plan.guest_bytes() / 300);
    let longest = plan.guest.iter().copied().max().unwrap_or(1);
    Rc::new(RefCell::new(Socket {
        capacity: if plan.kind == SocketType::Seqpacket { capacity.max(longest) } else { capacity },
        plan: plan.clone(),
        id: None,
        written: 0,
        received: 0,
        sent: 0,
        read: 0,
        messages: Vec::new(),
        ended: false,
        closed: false,
        aborted: false,
        eof_sent: false,
        device_closed: false,
        accepted: false,
        read_edge: false,
        watches_space: false,
        space_edge: false,
    }))
}

impl Socket {
    /// The program writes, and shuts down its sending side at the end.
    pub(crate) fn write(&mut self, most: u32) {
        if self.closed || self.ended {
            return;
        }
        let total = self.plan.to_guest();
        if self.written == total {
            self.ended = true;
        } else if self.plan.kind == SocketType::Seqpacket {
            self.written += self.message_at(self.written);
        } else {
            self.written += most.min(total - self.written);
        }
        self.read_edge = true;
    }

    fn message_at(&self, at: u32) -> u32 {
        let mut end = 0;
        for len in &self.plan.host {
            end += len;
            if at < end {
                return end - at;
            }
        }
        0
    }

    /// The program reads, and closes when both directions have ended.
    pub(crate) fn read(&mut self, most: u32) {
        if self.closed {
            return;
        }
        self.read += most.min(self.sent - self.read);
        self.space_edge |= self.watches_space;
        if self.read == self.sent && self.eof_sent && self.ended {
            self.closed = true;
            self.read_edge = true;
        }
    }

    /// The program aborts.
    pub(crate) fn abort(&mut self) {
        (self.closed, self.aborted, self.read_edge, self.space_edge) = (true, true, true, true);
    }

    /// Returns the events that epoll would report: readiness, and space in the send buffer.
    pub(crate) fn events(&mut self) -> (Option<Readiness>, bool) {
        let readiness = if self.closed {
            Readiness::Closed
        } else if self.ended {
            Readiness::ReadClosed
        } else {
            Readiness::Readable
        };
        let space = self.watches_space && std::mem::take(&mut self.space_edge);
        (std::mem::take(&mut self.read_edge).then_some(readiness), space)
    }

    /// Returns true if the program has read all data of the guest, and the end of the stream.
    pub(crate) fn is_complete(&self) -> bool {
        self.read == self.plan.guest_bytes() && self.eof_sent
    }
}

impl Sockets for World {
    type Socket = Shared;

    fn connect(&mut self, id: ConnectionId, key: ConnectionKey, _: SocketType) -> ConnectOutcome<Shared> {
        let Some(socket) = self.listeners.remove(&key.peer_port) else { return ConnectOutcome::Refused };
        {
            let mut socket = socket.borrow_mut();
            (socket.id, socket.accepted, socket.read_edge) = (Some(id), true, true);
        }
        if self.rng.bool() {
            return ConnectOutcome::Connected(socket);
        }
        self.connecting.push((id, socket));
        ConnectOutcome::InProgress
    }

    fn opened(&mut self, id: ConnectionId, socket: &Shared) {
        let mut socket = socket.borrow_mut();
        (socket.id, socket.read_edge) = (Some(id), true);
    }

    fn accepted(&mut self, _: ConnectionId, socket: &Shared, _: u32) -> io::Result<()> {
        let mut socket = socket.borrow_mut();
        socket.accepted = true;
        if socket.closed { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn receive(&mut self, socket: &Shared, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome> {
        let mut socket = socket.borrow_mut();
        assert!(!socket.device_closed);
        let waiting = socket.written - socket.received;
        if waiting == 0 {
            if socket.aborted && self.rng.bool() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            return if socket.ended || socket.closed {
                Ok(ReceiveOutcome { bytes: 0, more: false, eor: false })
            } else {
                Err(io::ErrorKind::WouldBlock.into())
            };
        }
        let room: u32 = bufs.iter().map(|buf| buf.len() as u32).sum();
        assert!(room > 0, "a receive without space");
        let messages = socket.plan.kind == SocketType::Seqpacket;
        let all = if messages { socket.message_at(socket.received) } else { waiting };
        assert!(!messages || room >= all, "a message is truncated");
        // A call may return less than there is.
        let most = if messages || self.rng.bool() { all } else { self.rng.u32(1..=all) };
        let here = most.min(room);
        let seed = !socket.plan.seed;
        let bytes: Vec<u8> = (0..here).map(|at| byte(seed, socket.received + at)).collect();
        assert_eq!(scatter(&bytes, bufs), bytes.len());
        socket.received += here;
        Ok(ReceiveOutcome { bytes: here as usize, more: socket.received < socket.written, eor: false })
    }

    fn peek(&mut self, socket: &Shared) -> io::Result<Peeked> {
        let socket = socket.borrow();
        if socket.received < socket.written {
            return Ok(Peeked::Bytes(socket.message_at(socket.received) as usize));
        }
        if socket.ended || socket.closed { Ok(Peeked::Eof) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn send(&mut self, socket: &Shared, bufs: &[IoBuf<'_>], _: SeqFlags) -> io::Result<usize> {
        let mut socket = socket.borrow_mut();
        assert!(!socket.device_closed && !socket.eof_sent, "data after the end of the stream");
        if socket.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len: usize = bufs.iter().map(IoBuf::len).sum();
        assert!(len > 0);
        let room = socket.capacity - (socket.sent - socket.read).min(socket.capacity);
        let messages = socket.plan.kind == SocketType::Seqpacket;
        if room == 0 || (messages && len as u32 > room) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let here = if messages { len as u32 } else { (len as u32).min(self.rng.u32(1..=room)) };
        let mut bytes = vec![0; len];
        gather(bufs, &mut bytes);
        for (at, found) in (socket.sent..).zip(&bytes[..here as usize]) {
            assert_eq!(*found, byte(socket.plan.seed, at), "byte {at} from the guest");
        }
        socket.sent += here;
        if messages {
            socket.messages.push(here);
        }
        Ok(here as usize)
    }

    fn shutdown(&mut self, socket: &Shared, directions: ShutdownFlags) {
        socket.borrow_mut().eof_sent |= directions.contains(ShutdownFlags::SEND);
    }

    fn set_interest(&mut self, _: ConnectionId, socket: &Shared, interest: Interest) {
        let mut socket = socket.borrow_mut();
        socket.watches_space = interest == Interest::ReadWrite;
        socket.space_edge = socket.watches_space;
    }

    fn close(&mut self, socket: Shared, _: CloseMode) {
        let mut socket = socket.borrow_mut();
        (socket.device_closed, socket.eof_sent) = (true, true);
    }

    fn cancel_connect(&mut self, id: ConnectionId) {
        self.connecting.retain(|(other, _)| *other != id);
    }
}
