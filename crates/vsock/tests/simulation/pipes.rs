//! Model sockets for hostile runs: pipes between two ends, each of which is a device or a program of the
//! host.
#![allow(dead_code, unreachable_pub, reason = "the fuzz target uses it")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use towline_channel::{IOV_MAX, IoBuf, IoBufMut, scatter};
use towline_vsock::packet::{HOST_CID, SeqFlags, ShutdownFlags, SocketType};
use towline_vsock::{
    CloseMode, ConnectOutcome, ConnectionId, ConnectionKey, Interest, Peeked, Readiness, ReceiveOutcome,
    Sockets,
};

/// CIDs of the two guests.
pub(super) const CIDS: [u64; 2] = [7, 8];
/// Maximum number of empty messages that are dropped at a time, as by the host's sockets.
const EMPTY_MAX: usize = 16;
/// Maximum number of messages in a pipe.
const MESSAGES_MAX: usize = 256;
const PIPES_MAX: usize = 256;

/// One direction of a pipe.
#[derive(Debug, Default)]
struct Direction {
    /// Lengths of messages; of a stream, lengths of writes.
    waiting: VecDeque<u32>,
    bytes: u32,
    capacity: u32,
    ended: bool,
}

/// Events of one end.
#[derive(Debug, Default)]
struct EndState {
    /// CID and connection of the guest that owns it.
    owner: Option<(u64, ConnectionId)>,
    read_edge: bool,
    urgent: bool,
    /// The other end has reset the connection: every call fails.
    failed: bool,
    watches_space: bool,
    space_edge: bool,
    closed: bool,
}

#[derive(Debug)]
struct Pipe {
    kind: SocketType,
    directions: [Direction; 2],
    ends: [EndState; 2],
    accepted: bool,
    /// The second end belongs to a program of the host, not to another guest.
    has_program: bool,
}

type SharedPipe = Rc<RefCell<Pipe>>;

/// An end of a pipe.
#[derive(Debug, Clone)]
pub(super) struct End {
    pipe: SharedPipe,
    side: usize,
}

impl End {
    /// Closes the end.
    pub(super) fn close(&self) {
        let mut pipe = self.pipe.borrow_mut();
        let (side, other) = (self.side, 1 - self.side);
        pipe.ends[side].closed = true;
        pipe.ends[side].owner = None;
        pipe.directions[side].ended = true;
        pipe.ends[other].read_edge = true;
        pipe.ends[other].space_edge = true;
    }
}

/// A connection of another guest: port, kind, CID of the other guest, and its end.
type Incoming = (u32, SocketType, u64, End);
/// Events of a socket: readiness, and space in the send buffer.
type SocketEvents = (ConnectionId, Option<Readiness>, bool);

#[derive(Debug, Default)]
struct State {
    pipes: Vec<SharedPipe>,
    incoming: [Vec<Incoming>; 2],
    /// Connects in progress, by guest.
    connecting: [Vec<(ConnectionId, End)>; 2],
    calls: u64,
    rng: u64,
}

/// All pipes.
#[derive(Debug, Clone, Default)]
pub(super) struct Net(Rc<RefCell<State>>);

fn guest(cid: u64) -> Option<usize> {
    CIDS.iter().position(|known| *known == cid)
}

impl Net {
    pub(super) fn new(seed: u64) -> Self {
        let net = Self::default();
        net.0.borrow_mut().rng = seed | 1;
        net
    }

    pub(super) fn calls(&self) -> u64 {
        self.0.borrow().calls
    }

    fn pipe(&self, kind: SocketType, has_program: bool) -> SharedPipe {
        let mut state = self.0.borrow_mut();
        state.rng = state.rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let capacity = match kind {
            SocketType::Stream => [700, 3000, 200_000, 1 << 20][(state.rng >> 60) as usize & 3],
            SocketType::Seqpacket => [300_000, 1 << 20][(state.rng >> 60) as usize & 1],
        };
        let direction = || Direction { capacity, ..Direction::default() };
        let pipe = Rc::new(RefCell::new(Pipe {
            kind,
            directions: [direction(), direction()],
            ends: Default::default(),
            accepted: false,
            has_program,
        }));
        if state.pipes.len() < PIPES_MAX {
            state.pipes.push(Rc::clone(&pipe));
        }
        pipe
    }

    /// Returns the device's end of a client's connection.
    pub(super) fn client(&self, kind: SocketType) -> End {
        End { pipe: self.pipe(kind, true), side: 0 }
    }

    fn chosen(&self, which: u8) -> Option<SharedPipe> {
        let state = self.0.borrow();
        let count = state.pipes.len();
        (count > 0).then(|| Rc::clone(&state.pipes[usize::from(which) % count]))
    }

    /// Returns a pipe to a program. The end of another guest belongs to its device, even before the device
    /// has it.
    fn program(&self, which: u8) -> Option<SharedPipe> {
        self.chosen(which).filter(|pipe| pipe.borrow().has_program)
    }

    /// A program of the host writes: bytes, a message, or empty messages.
    pub(super) fn write(&self, which: u8, how: u8, amount: u32) {
        let Some(pipe) = self.program(which) else { return };
        let mut pipe = pipe.borrow_mut();
        if pipe.directions[1].ended || pipe.directions[1].waiting.len() >= MESSAGES_MAX {
            return;
        }
        let len = 1 + amount % 70_000;
        match (pipe.kind, how % 4) {
            (SocketType::Seqpacket, 0) => pipe.directions[1].waiting.extend([0; 40]),
            (SocketType::Seqpacket, 1) => (0..20).for_each(|_| pipe.directions[1].push(1)),
            _ => pipe.directions[1].push(len),
        }
        pipe.ends[0].read_edge = true;
    }

    pub(super) fn read(&self, which: u8, amount: u32) {
        let Some(pipe) = self.program(which) else { return };
        let mut pipe = pipe.borrow_mut();
        let kind = pipe.kind;
        pipe.directions[0].remove(kind, 1 + amount);
        pipe.ends[0].space_edge = true;
    }

    /// A program shuts down its sending side, or closes its socket.
    pub(super) fn end(&self, which: u8, how: u8) {
        let Some(pipe) = self.program(which) else { return };
        if how & 1 == 0 {
            let mut pipe = pipe.borrow_mut();
            pipe.directions[1].ended = true;
            pipe.ends[0].read_edge = true;
        } else {
            End { pipe, side: 1 }.close();
        }
    }

    /// A program resets its connection: data in the pipe is lost, and the device's calls fail.
    pub(super) fn fail(&self, which: u8) {
        if let Some(pipe) = self.program(which) {
            let end = &mut pipe.borrow_mut().ends[0];
            (end.failed, end.read_edge, end.space_edge) = (true, true, true);
        }
    }

    pub(super) fn urgent(&self, which: u8) {
        if let Some(pipe) = self.program(which) {
            pipe.borrow_mut().ends[0].urgent = true;
        }
    }

    /// Returns the connects of this guest that have succeeded or failed.
    pub(super) fn connected(&self, cid: u64) -> Vec<(ConnectionId, Option<End>)> {
        let Some(guest) = guest(cid) else { return Vec::new() };
        let connecting = std::mem::take(&mut self.0.borrow_mut().connecting[guest]);
        let (mut done, mut wait) = (Vec::new(), Vec::new());
        for (id, end) in connecting {
            let (accepted, closed) = {
                let pipe = end.pipe.borrow();
                (pipe.accepted, pipe.ends[1 - end.side].closed)
            };
            match (accepted, closed) {
                (true, _) => {
                    end.watch(cid, id);
                    done.push((id, Some(end)));
                }
                (false, true) => done.push((id, None)),
                (false, false) => wait.push((id, end)),
            }
        }
        self.0.borrow_mut().connecting[guest].extend(wait);
        done
    }

    /// Returns the connections of other guests to this one.
    pub(super) fn incoming(&self, cid: u64) -> Vec<Incoming> {
        let Some(guest) = guest(cid) else { return Vec::new() };
        std::mem::take(&mut self.0.borrow_mut().incoming[guest])
    }

    /// Returns the events of this guest's sockets.
    pub(super) fn events(&self, cid: u64) -> Vec<SocketEvents> {
        let pipes = self.0.borrow().pipes.clone();
        let mut all = Vec::new();
        for pipe in pipes {
            let mut pipe = pipe.borrow_mut();
            for side in 0..2 {
                let (closed, ended) = (pipe.ends[1 - side].closed, pipe.directions[1 - side].ended);
                let end = &mut pipe.ends[side];
                let Some((_, id)) = end.owner.filter(|(owner, _)| *owner == cid) else { continue };
                let readiness = match (std::mem::take(&mut end.read_edge), std::mem::take(&mut end.urgent)) {
                    (_, true) => Some(Readiness::Urgent),
                    (true, _) if closed => Some(Readiness::Closed),
                    (true, _) if ended => Some(Readiness::ReadClosed),
                    (true, _) => Some(Readiness::Readable),
                    _ => None,
                };
                let has_space = end.watches_space && std::mem::take(&mut end.space_edge);
                if readiness.is_some() || has_space {
                    all.push((id, readiness, has_space));
                }
            }
        }
        all
    }
}

impl Direction {
    fn push(&mut self, len: u32) {
        self.waiting.push_back(len);
        self.bytes += len;
    }

    /// Removes up to `most` bytes, or a message of at most that length.
    fn remove(&mut self, kind: SocketType, most: u32) -> u32 {
        let mut removed = 0;
        while let Some(front) = self.waiting.front_mut() {
            let here = (*front).min(most - removed);
            (*front, removed) = (*front - here, removed + here);
            if *front > 0 && kind == SocketType::Stream {
                break;
            }
            self.waiting.pop_front();
            if kind == SocketType::Seqpacket || removed == most {
                break;
            }
        }
        self.bytes = self.waiting.iter().sum();
        removed
    }
}

impl End {
    fn check(&self) -> io::Result<()> {
        let failed = self.pipe.borrow().ends[self.side].failed;
        if failed { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(()) }
    }

    fn watch(&self, cid: u64, id: ConnectionId) {
        let mut pipe = self.pipe.borrow_mut();
        let end = &mut pipe.ends[self.side];
        (end.owner, end.read_edge) = (Some((cid, id)), true);
    }
}

/// The host's side of one guest.
pub(super) struct World {
    cid: u64,
    net: Net,
}

impl World {
    pub(super) fn new(cid: u64, net: &Net) -> Self {
        Self { cid, net: net.clone() }
    }

    fn call(&self) {
        self.net.0.borrow_mut().calls += 1;
    }
}

impl Sockets for World {
    type Socket = End;

    fn connect(&mut self, id: ConnectionId, key: ConnectionKey, kind: SocketType) -> ConnectOutcome<End> {
        self.call();
        let own = guest(self.cid).expect("one of the two");
        if key.peer_cid == HOST_CID {
            let end = self.net.client(kind);
            end.pipe.borrow_mut().accepted = true;
            return match key.peer_port & 3 {
                0 => ConnectOutcome::Refused,
                1 => {
                    self.net.0.borrow_mut().connecting[own].push((id, end));
                    ConnectOutcome::InProgress
                }
                _ => {
                    end.watch(self.cid, id);
                    ConnectOutcome::Connected(end)
                }
            };
        }
        let Some(other) = guest(key.peer_cid) else { return ConnectOutcome::Refused };
        let pipe = self.net.pipe(kind, false);
        let theirs = End { pipe: Rc::clone(&pipe), side: 1 };
        let mut state = self.net.0.borrow_mut();
        state.incoming[other].push((key.peer_port, kind, self.cid, theirs));
        state.connecting[own].push((id, End { pipe, side: 0 }));
        ConnectOutcome::InProgress
    }

    fn opened(&mut self, id: ConnectionId, socket: &End) {
        socket.watch(self.cid, id);
    }

    fn accepted(&mut self, _: ConnectionId, socket: &End, _: u32) -> io::Result<()> {
        let mut pipe = socket.pipe.borrow_mut();
        pipe.accepted = true;
        if pipe.ends[1 - socket.side].closed { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn receive(&mut self, socket: &End, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome> {
        self.call();
        assert!(bufs.len() < IOV_MAX, "{} buffers, and one for the flags", bufs.len());
        socket.check()?;
        let mut pipe = socket.pipe.borrow_mut();
        let (kind, other) = (pipe.kind, 1 - socket.side);
        assert!(!pipe.ends[socket.side].closed);
        let room: u32 = bufs.iter().map(|buf| buf.len() as u32).sum();
        assert!(room > 0, "a receive without space");
        let direction = &mut pipe.directions[other];
        match direction.waiting.front() {
            None if direction.ended => return Ok(ReceiveOutcome { bytes: 0, more: false, eor: false }),
            None => return Err(io::ErrorKind::WouldBlock.into()),
            Some(len) => assert!(kind == SocketType::Stream || *len <= room, "a message is truncated"),
        }
        let bytes = direction.remove(kind, room);
        let more = bytes == room;
        scatter(&vec![0x5a; bytes as usize], bufs);
        pipe.ends[other].space_edge = true;
        Ok(ReceiveOutcome { bytes: bytes as usize, more, eor: false })
    }

    fn peek(&mut self, socket: &End) -> io::Result<Peeked> {
        self.call();
        socket.check()?;
        let mut pipe = socket.pipe.borrow_mut();
        let (kind, direction) = (pipe.kind, &mut pipe.directions[1 - socket.side]);
        for _ in 0..EMPTY_MAX {
            match direction.waiting.front() {
                Some(0) if kind == SocketType::Seqpacket => direction.waiting.pop_front(),
                Some(len) => return Ok(Peeked::Bytes(*len as usize)),
                None if direction.ended => return Ok(Peeked::Eof),
                None => return Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        Ok(Peeked::Skipped)
    }

    fn send(&mut self, socket: &End, bufs: &[IoBuf<'_>], _: SeqFlags) -> io::Result<usize> {
        self.call();
        assert!(bufs.len() <= IOV_MAX, "{} buffers", bufs.len());
        socket.check()?;
        let mut pipe = socket.pipe.borrow_mut();
        let (kind, other) = (pipe.kind, 1 - socket.side);
        assert!(
            !pipe.ends[socket.side].closed && !pipe.directions[socket.side].ended,
            "data after the end of the stream"
        );
        if pipe.ends[other].closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len: u32 = bufs.iter().map(|buf| buf.len() as u32).sum();
        assert!(len > 0, "an empty send");
        let direction = &mut pipe.directions[socket.side];
        let room = direction.capacity.saturating_sub(direction.bytes);
        let full = direction.waiting.len() >= MESSAGES_MAX;
        if room == 0 || full || (kind == SocketType::Seqpacket && len > room) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let here = len.min(room);
        direction.push(here);
        pipe.ends[other].read_edge = true;
        Ok(here as usize)
    }

    fn shutdown(&mut self, socket: &End, directions: ShutdownFlags) {
        let mut pipe = socket.pipe.borrow_mut();
        if directions.contains(ShutdownFlags::SEND) {
            pipe.directions[socket.side].ended = true;
            pipe.ends[1 - socket.side].read_edge = true;
        }
    }

    fn set_interest(&mut self, _: ConnectionId, socket: &End, interest: Interest) {
        let mut pipe = socket.pipe.borrow_mut();
        let direction = &pipe.directions[socket.side];
        let room = direction.bytes < direction.capacity && direction.waiting.len() < MESSAGES_MAX;
        let end = &mut pipe.ends[socket.side];
        end.watches_space = interest == Interest::ReadWrite;
        end.space_edge = end.watches_space && room;
    }

    fn close(&mut self, socket: End, _: CloseMode) {
        socket.close();
    }

    fn cancel_connect(&mut self, id: ConnectionId) {
        let Some(guest) = guest(self.cid) else { return };
        self.net.0.borrow_mut().connecting[guest].retain(|(other, end)| {
            if *other == id {
                end.close();
            }
            *other != id
        });
    }
}
