//! Sockets of a model for hostile runs: pipes between two ends, each of which is a device or a program of the host.
#![allow(dead_code, unreachable_pub, reason = "the fuzz target uses it")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use towline_channel::{IOV_MAX, IoBuf, IoBufMut, scatter};
use towline_vsock::packet::{HOST_CID, Kind, SeqFlags, ShutdownFlags};
use towline_vsock::{ConnectOutcome, ConnectionId, ConnectionKey, Peeked, Readiness, Received, Sockets};

/// The contexts of the two guests.
pub(super) const CIDS: [u64; 2] = [7, 8];
/// Empty messages that are skipped at a time, as the host's sockets do.
const EMPTY_MAX: usize = 16;
/// Messages that wait in a pipe, and the room for bytes of a stream.
const MESSAGES_MAX: usize = 256;
const PIPES_MAX: usize = 256;

/// One way of a pipe.
#[derive(Debug, Default)]
struct Way {
    /// Lengths of messages; of a stream, of what was written at a time.
    waiting: VecDeque<u32>,
    bytes: u32,
    capacity: u32,
    ended: bool,
}

/// One end, as its reader and watcher sees it.
#[derive(Debug, Default)]
struct Watch {
    /// Whose: a guest's context and connection.
    owner: Option<(u64, ConnectionId)>,
    edge: bool,
    urgent: bool,
    /// Every call fails: the other end has reset it.
    failed: bool,
    wants_room: bool,
    room: bool,
    closed: bool,
    issued: u64,
    over: u64,
    freed: bool,
}

#[derive(Debug)]
struct Pipe {
    kind: Kind,
    ways: [Way; 2],
    ends: [Watch; 2],
    accepted: bool,
    lends: bool,
    /// Its second end is a program's of the host, not another guest's.
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
    /// Its owner is through with it.
    pub(super) fn close(&self) {
        let mut pipe = self.pipe.borrow_mut();
        let (side, other) = (self.side, 1 - self.side);
        pipe.ends[side].closed = true;
        pipe.ends[side].owner = None;
        pipe.ways[side].ended = true;
        pipe.ends[other].edge = true;
        pipe.ends[other].room = true;
    }
}

/// What a guest's connection wants of another one: port, kind, who, and its end.
type Letter = (u32, Kind, u64, End);
/// What is new at a socket: to read, room, freed loans.
type NewsOf = (ConnectionId, Option<Readiness>, bool, bool);

#[derive(Debug, Default)]
struct State {
    pipes: Vec<SharedPipe>,
    mail: [Vec<Letter>; 2],
    /// Connections that were asked for and come later, by guest.
    later: [Vec<(ConnectionId, End)>; 2],
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

    fn pipe(&self, kind: Kind, has_program: bool) -> SharedPipe {
        let mut state = self.0.borrow_mut();
        state.rng = state.rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let capacity = match kind {
            Kind::Stream => [700, 3000, 200_000, 1 << 20][(state.rng >> 60) as usize & 3],
            Kind::Seqpacket => [300_000, 1 << 20][(state.rng >> 60) as usize & 1],
        };
        let way = || Way { capacity, ..Way::default() };
        let pipe = Rc::new(RefCell::new(Pipe {
            kind,
            ways: [way(), way()],
            ends: Default::default(),
            accepted: false,
            lends: state.rng >> 59 & 1 == 0,
            has_program,
        }));
        if state.pipes.len() < PIPES_MAX {
            state.pipes.push(Rc::clone(&pipe));
        }
        pipe
    }

    /// The device's end of a client's connection.
    pub(super) fn client(&self, kind: Kind) -> End {
        End { pipe: self.pipe(kind, true), side: 0 }
    }

    fn chosen(&self, which: u8) -> Option<SharedPipe> {
        let state = self.0.borrow();
        let count = state.pipes.len();
        (count > 0).then(|| Rc::clone(&state.pipes[usize::from(which) % count]))
    }

    /// One whose second end is a program's. Another guest's end is its device's alone, also while it is on its way there.
    fn program(&self, which: u8) -> Option<SharedPipe> {
        self.chosen(which).filter(|pipe| pipe.borrow().has_program)
    }

    /// A program of the host writes: bytes, a message, or messages of nothing.
    pub(super) fn write(&self, which: u8, how: u8, amount: u32) {
        let Some(pipe) = self.program(which) else { return };
        let mut pipe = pipe.borrow_mut();
        if pipe.ways[1].ended || pipe.ways[1].waiting.len() >= MESSAGES_MAX {
            return;
        }
        let len = 1 + amount % 70_000;
        match (pipe.kind, how % 4) {
            (Kind::Seqpacket, 0) => pipe.ways[1].waiting.extend([0; 40]),
            (Kind::Seqpacket, 1) => (0..20).for_each(|_| pipe.ways[1].push(1)),
            _ => pipe.ways[1].push(len),
        }
        pipe.ends[0].edge = true;
    }

    pub(super) fn read(&self, which: u8, amount: u32) {
        let Some(pipe) = self.program(which) else { return };
        let mut pipe = pipe.borrow_mut();
        let kind = pipe.kind;
        pipe.ways[0].take(kind, 1 + amount);
        pipe.ends[0].room = true;
    }

    /// A program ends its side, in one of several ways.
    pub(super) fn end(&self, which: u8, how: u8) {
        let Some(pipe) = self.program(which) else { return };
        if how & 1 == 0 {
            let mut pipe = pipe.borrow_mut();
            pipe.ways[1].ended = true;
            pipe.ends[0].edge = true;
        } else {
            End { pipe, side: 1 }.close();
        }
    }

    /// A program resets its connection: what its end has is lost, and the device's calls fail.
    pub(super) fn fail(&self, which: u8) {
        if let Some(pipe) = self.program(which) {
            let end = &mut pipe.borrow_mut().ends[0];
            (end.failed, end.edge, end.room) = (true, true, true);
        }
    }

    pub(super) fn urgent(&self, which: u8) {
        if let Some(pipe) = self.program(which) {
            pipe.borrow_mut().ends[0].urgent = true;
        }
    }

    /// The kernel is through with everything that it reads.
    pub(super) fn free_loans(&self) {
        for pipe in &self.0.borrow().pipes {
            for end in &mut pipe.borrow_mut().ends {
                end.freed |= end.over < end.issued;
                end.over = end.issued;
            }
        }
    }

    /// Connections of this guest's that came about, or did not.
    pub(super) fn connected(&self, cid: u64) -> Vec<(ConnectionId, Option<End>)> {
        let Some(guest) = guest(cid) else { return Vec::new() };
        let later = std::mem::take(&mut self.0.borrow_mut().later[guest]);
        let (mut done, mut wait) = (Vec::new(), Vec::new());
        for (id, end) in later {
            let (accepted, gone) = {
                let pipe = end.pipe.borrow();
                (pipe.accepted, pipe.ends[1 - end.side].closed)
            };
            match (accepted, gone) {
                (true, _) => {
                    end.watch(cid, id);
                    done.push((id, Some(end)));
                }
                (false, true) => done.push((id, None)),
                (false, false) => wait.push((id, end)),
            }
        }
        self.0.borrow_mut().later[guest].extend(wait);
        done
    }

    pub(super) fn mail(&self, cid: u64) -> Vec<Letter> {
        let Some(guest) = guest(cid) else { return Vec::new() };
        std::mem::take(&mut self.0.borrow_mut().mail[guest])
    }

    /// What is new at this guest's sockets.
    pub(super) fn news(&self, cid: u64) -> Vec<NewsOf> {
        let pipes = self.0.borrow().pipes.clone();
        let mut all = Vec::new();
        for pipe in pipes {
            let mut pipe = pipe.borrow_mut();
            for side in 0..2 {
                let (gone, ended) = (pipe.ends[1 - side].closed, pipe.ways[1 - side].ended);
                let end = &mut pipe.ends[side];
                let Some((_, id)) = end.owner.filter(|(owner, _)| *owner == cid) else { continue };
                let news = match (std::mem::take(&mut end.edge), std::mem::take(&mut end.urgent)) {
                    (_, true) => Some(Readiness::Urgent),
                    (true, _) if gone => Some(Readiness::Closed),
                    (true, _) if ended => Some(Readiness::ReadClosed),
                    (true, _) => Some(Readiness::Readable),
                    _ => None,
                };
                let room = end.wants_room && std::mem::take(&mut end.room);
                let freed = std::mem::take(&mut end.freed);
                if news.is_some() || room || freed {
                    all.push((id, news, room, freed));
                }
            }
        }
        all
    }
}

impl Way {
    fn push(&mut self, len: u32) {
        self.waiting.push_back(len);
        self.bytes += len;
    }

    /// Takes bytes, or a message of at most as many.
    fn take(&mut self, kind: Kind, most: u32) -> u32 {
        let mut taken = 0;
        while let Some(front) = self.waiting.front_mut() {
            let here = (*front).min(most - taken);
            (*front, taken) = (*front - here, taken + here);
            if *front > 0 && kind == Kind::Stream {
                break;
            }
            self.waiting.pop_front();
            if kind == Kind::Seqpacket || taken == most {
                break;
            }
        }
        self.bytes = self.waiting.iter().sum();
        taken
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
        (end.owner, end.edge) = (Some((cid, id)), true);
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

    fn connect(&mut self, id: ConnectionId, key: ConnectionKey, kind: Kind) -> ConnectOutcome<End> {
        self.call();
        let own = guest(self.cid).expect("one of the two");
        if key.peer_cid == HOST_CID {
            let end = self.net.client(kind);
            end.pipe.borrow_mut().accepted = true;
            return match key.peer_port & 3 {
                0 => ConnectOutcome::Refused,
                1 => {
                    self.net.0.borrow_mut().later[own].push((id, end));
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
        state.mail[other].push((key.peer_port, kind, self.cid, theirs));
        state.later[own].push((id, End { pipe, side: 0 }));
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

    fn receive(&mut self, socket: &End, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
        self.call();
        assert!(bufs.len() < IOV_MAX, "{} buffers, and one for the mark", bufs.len());
        socket.check()?;
        let mut pipe = socket.pipe.borrow_mut();
        let (kind, other) = (pipe.kind, 1 - socket.side);
        assert!(!pipe.ends[socket.side].closed);
        let room: u32 = bufs.iter().map(|buf| buf.len() as u32).sum();
        assert!(room > 0, "a call without room");
        let way = &mut pipe.ways[other];
        match way.waiting.front() {
            None if way.ended => return Ok(Received { bytes: 0, more: false, record: false }),
            None => return Err(io::ErrorKind::WouldBlock.into()),
            Some(len) => assert!(kind == Kind::Stream || *len <= room, "a message is cut"),
        }
        let bytes = way.take(kind, room);
        let more = bytes == room;
        scatter(&vec![0x5a; bytes as usize], bufs);
        pipe.ends[other].room = true;
        Ok(Received { bytes: bytes as usize, more, record: false })
    }

    fn front(&mut self, socket: &End) -> io::Result<Peeked> {
        self.call();
        socket.check()?;
        let mut pipe = socket.pipe.borrow_mut();
        let (kind, way) = (pipe.kind, &mut pipe.ways[1 - socket.side]);
        for _ in 0..EMPTY_MAX {
            match way.waiting.front() {
                Some(0) if kind == Kind::Seqpacket => way.waiting.pop_front(),
                Some(len) => return Ok(Peeked::Bytes(*len as usize)),
                None if way.ended => return Ok(Peeked::Eof),
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
        assert!(!pipe.ends[socket.side].closed && !pipe.ways[socket.side].ended, "bytes behind the end");
        if pipe.ends[other].closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len: u32 = bufs.iter().map(|buf| buf.len() as u32).sum();
        assert!(len > 0, "nothing is sent");
        let way = &mut pipe.ways[socket.side];
        let room = way.capacity.saturating_sub(way.bytes);
        let full = way.waiting.len() >= MESSAGES_MAX;
        if room == 0 || full || (kind == Kind::Seqpacket && len > room) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let here = len.min(room);
        way.push(here);
        pipe.ends[other].edge = true;
        Ok(here as usize)
    }

    fn lends(&mut self, socket: &End) -> bool {
        let pipe = socket.pipe.borrow();
        pipe.lends && pipe.kind == Kind::Stream
    }

    fn lend(&mut self, socket: &End, bufs: &[IoBuf<'_>]) -> io::Result<(usize, Option<u64>)> {
        let sent = self.send(socket, bufs, SeqFlags::empty())?;
        let end = &mut socket.pipe.borrow_mut().ends[socket.side];
        end.issued += 1;
        Ok((sent, Some(end.issued)))
    }

    fn freed(&mut self, socket: &End) -> u64 {
        socket.pipe.borrow().ends[socket.side].over
    }

    fn part(&mut self, socket: &End, reset: bool) {
        let mut pipe = socket.pipe.borrow_mut();
        pipe.ways[socket.side].ended = true;
        pipe.ends[1 - socket.side].edge = true;
        let end = &mut pipe.ends[socket.side];
        if reset {
            end.freed |= end.over < end.issued;
            end.over = end.issued;
        }
    }

    fn shutdown(&mut self, socket: &End, what: ShutdownFlags) {
        let mut pipe = socket.pipe.borrow_mut();
        if what.contains(ShutdownFlags::SEND) {
            pipe.ways[socket.side].ended = true;
            pipe.ends[1 - socket.side].edge = true;
        }
    }

    fn watch_writable(&mut self, _: ConnectionId, socket: &End, wanted: bool) {
        let mut pipe = socket.pipe.borrow_mut();
        let way = &pipe.ways[socket.side];
        let room = way.bytes < way.capacity && way.waiting.len() < MESSAGES_MAX;
        let end = &mut pipe.ends[socket.side];
        (end.wants_room, end.room) = (wanted, wanted && room);
    }

    fn close(&mut self, socket: End, _: bool) {
        socket.close();
    }

    fn forget(&mut self, id: ConnectionId) {
        let Some(guest) = guest(self.cid) else { return };
        self.net.0.borrow_mut().later[guest].retain(|(other, end)| {
            if *other == id {
                end.close();
            }
            *other != id
        });
    }
}
