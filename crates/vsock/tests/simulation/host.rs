//! The host's programs and the kernel between them and the device: sockets that take and give what they like, when they
//! like.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::rc::Rc;

use towline_channel::{IoBuf, IoBufMut, gather, scatter};
use towline_vsock::packet::{Kind, SeqFlags, ShutdownFlags};
use towline_vsock::{ConnectOutcome, ConnectionId, ConnectionKey, Peeked, Readiness, Received, Sockets};

use crate::plan::{Plan, byte};

/// One socket: the device's end, the kernel's buffers, and the program behind them.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) plan: Plan,
    pub(crate) id: Option<ConnectionId>,
    /// To the guest: what the program has written, and what the device has taken.
    written: u32,
    taken: u32,
    /// From the guest: what the device has given, and what the program has read.
    pub(crate) given: u32,
    read: u32,
    capacity: u32,
    /// Lengths of messages that were given.
    pub(crate) messages: Vec<u32>,
    /// The program shut down its sending.
    pub(crate) ended: bool,
    /// The program has closed, or died.
    pub(crate) closed: bool,
    pub(crate) died: bool,
    /// The device has shut down its sending, or closed.
    pub(crate) end_seen: bool,
    pub(crate) device_closed: bool,
    pub(crate) accepted: bool,
    edge: bool,
    watched: bool,
    room_edge: bool,
    /// Whether the kernel reads large packets in the guest's memory, the sends of which it does so, as where they begin and
    /// end, how many are over, and whether that is new.
    lends: bool,
    loans: VecDeque<(u64, Range<u32>)>,
    issued: u64,
    over: u64,
    loan_edge: bool,
    /// The device has dropped what was not delivered.
    dropped: bool,
}

pub(crate) type Shared = Rc<RefCell<Socket>>;

/// All sockets, by the port that the guest asks for.
pub(crate) struct World {
    pub(crate) rng: fastrand::Rng,
    /// What the guest's connections will find.
    pub(crate) listeners: BTreeMap<u32, Shared>,
    /// Those that come later.
    pub(crate) later: Vec<(ConnectionId, Shared)>,
}

pub(crate) fn socket(plan: &Plan, rng: &mut fastrand::Rng) -> Shared {
    // A long stream through the smallest of buffers would only take long.
    let capacity = [1, 100, 3000, 100_000][rng.usize(..4)].max(plan.guest_bytes() / 300);
    let longest = plan.guest.iter().copied().max().unwrap_or(1);
    Rc::new(RefCell::new(Socket {
        capacity: if plan.kind == Kind::Seqpacket { capacity.max(longest) } else { capacity },
        plan: plan.clone(),
        id: None,
        written: 0,
        taken: 0,
        given: 0,
        read: 0,
        messages: Vec::new(),
        ended: false,
        closed: false,
        died: false,
        end_seen: false,
        device_closed: false,
        accepted: false,
        edge: false,
        watched: false,
        room_edge: false,
        lends: rng.bool() && plan.kind == Kind::Stream,
        loans: VecDeque::new(),
        issued: 0,
        over: 0,
        loan_edge: false,
        dropped: false,
    }))
}

impl Socket {
    /// The program writes; at its end it shuts down.
    pub(crate) fn write(&mut self, most: u32) {
        if self.closed || self.ended {
            return;
        }
        let total = self.plan.to_guest();
        if self.written == total {
            self.ended = true;
        } else if self.plan.kind == Kind::Seqpacket {
            self.written += self.message_at(self.written);
        } else {
            self.written += most.min(total - self.written);
        }
        self.edge = true;
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

    /// The program reads, and closes when all is over.
    pub(crate) fn read(&mut self, most: u32) {
        if self.closed {
            return;
        }
        self.read += most.min(self.given - self.read);
        self.room_edge |= self.watched;
        if self.read == self.given && self.end_seen && self.ended {
            self.closed = true;
            self.edge = true;
        }
    }

    /// The program dies.
    pub(crate) fn die(&mut self) {
        (self.closed, self.died, self.edge, self.room_edge) = (true, true, true, true);
    }

    /// What epoll would tell.
    pub(crate) fn news(&mut self) -> (Option<Readiness>, bool) {
        let news = if self.closed {
            Readiness::Closed
        } else if self.ended {
            Readiness::ReadClosed
        } else {
            Readiness::Readable
        };
        let room = self.watched && std::mem::take(&mut self.room_edge);
        (std::mem::take(&mut self.edge).then_some(news), room)
    }

    /// The kernel is through with some of what it was lent: at most with what the program has read, or all if nobody will.
    pub(crate) fn free_some(&mut self, rng: &mut fastrand::Rng) -> bool {
        let gone = self.closed || self.dropped;
        while let Some((number, bytes)) = self.loans.front()
            && (gone || bytes.end <= self.read)
            && rng.u32(..3) > 0
        {
            (self.over, self.loan_edge) = (*number, true);
            self.loans.pop_front();
        }
        std::mem::take(&mut self.loan_edge)
    }

    /// Whether the kernel reads some of these bytes of the stream yet.
    pub(crate) fn reads(&self, bytes: &Range<u32>) -> bool {
        !bytes.is_empty()
            && self.loans.iter().any(|(_, lent)| lent.start < bytes.end && bytes.start < lent.end)
    }

    /// Whether the program has all that the guest sent, and knows that it is all.
    pub(crate) fn is_complete(&self) -> bool {
        self.read == self.plan.guest_bytes() && self.end_seen
    }
}

impl Sockets for World {
    type Socket = Shared;

    fn connect(&mut self, id: ConnectionId, key: ConnectionKey, _: Kind) -> ConnectOutcome<Shared> {
        let Some(socket) = self.listeners.remove(&key.peer_port) else { return ConnectOutcome::Refused };
        {
            let mut socket = socket.borrow_mut();
            (socket.id, socket.accepted, socket.edge) = (Some(id), true, true);
        }
        if self.rng.bool() {
            return ConnectOutcome::Connected(socket);
        }
        self.later.push((id, socket));
        ConnectOutcome::InProgress
    }

    fn opened(&mut self, id: ConnectionId, socket: &Shared) {
        let mut socket = socket.borrow_mut();
        (socket.id, socket.edge) = (Some(id), true);
    }

    fn accepted(&mut self, _: ConnectionId, socket: &Shared, _: u32) -> io::Result<()> {
        let mut socket = socket.borrow_mut();
        socket.accepted = true;
        if socket.closed { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn receive(&mut self, socket: &Shared, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
        let mut socket = socket.borrow_mut();
        assert!(!socket.device_closed);
        let waiting = socket.written - socket.taken;
        if waiting == 0 {
            if socket.died && self.rng.bool() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            return if socket.ended || socket.closed {
                Ok(Received { bytes: 0, more: false, record: false })
            } else {
                Err(io::ErrorKind::WouldBlock.into())
            };
        }
        let room: u32 = bufs.iter().map(|buf| buf.len() as u32).sum();
        assert!(room > 0, "a call without room");
        let messages = socket.plan.kind == Kind::Seqpacket;
        let all = if messages { socket.message_at(socket.taken) } else { waiting };
        assert!(!messages || room >= all, "a message is cut");
        // A call may give less than there is.
        let most = if messages || self.rng.bool() { all } else { self.rng.u32(1..=all) };
        let here = most.min(room);
        let seed = !socket.plan.seed;
        let bytes: Vec<u8> = (0..here).map(|at| byte(seed, socket.taken + at)).collect();
        assert_eq!(scatter(&bytes, bufs), bytes.len());
        socket.taken += here;
        Ok(Received { bytes: here as usize, more: socket.taken < socket.written, record: false })
    }

    fn front(&mut self, socket: &Shared) -> io::Result<Peeked> {
        let socket = socket.borrow();
        if socket.taken < socket.written {
            return Ok(Peeked::Bytes(socket.message_at(socket.taken) as usize));
        }
        if socket.ended || socket.closed { Ok(Peeked::Eof) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn send(&mut self, socket: &Shared, bufs: &[IoBuf<'_>], _: SeqFlags) -> io::Result<usize> {
        let mut socket = socket.borrow_mut();
        assert!(!socket.device_closed && !socket.end_seen, "bytes behind the end");
        if socket.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let len: usize = bufs.iter().map(IoBuf::len).sum();
        assert!(len > 0);
        let room = socket.capacity - (socket.given - socket.read).min(socket.capacity);
        let messages = socket.plan.kind == Kind::Seqpacket;
        if room == 0 || (messages && len as u32 > room) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let here = if messages { len as u32 } else { (len as u32).min(self.rng.u32(1..=room)) };
        let mut bytes = vec![0; len];
        gather(bufs, &mut bytes);
        for (at, found) in (socket.given..).zip(&bytes[..here as usize]) {
            assert_eq!(*found, byte(socket.plan.seed, at), "byte {at} from the guest");
        }
        socket.given += here;
        if messages {
            socket.messages.push(here);
        }
        Ok(here as usize)
    }

    fn lends(&mut self, socket: &Shared) -> bool {
        // It may be worth while now and then.
        socket.borrow().lends && self.rng.u32(..4) > 0
    }

    fn lend(&mut self, socket: &Shared, bufs: &[IoBuf<'_>]) -> io::Result<(usize, Option<u64>)> {
        let start = socket.borrow().given;
        let sent = self.send(socket, bufs, SeqFlags::empty())?;
        if self.rng.u32(..8) == 0 {
            return Ok((sent, None));
        }
        let mut socket = socket.borrow_mut();
        assert!(socket.lends);
        socket.issued += 1;
        let (number, bytes) = (socket.issued, start..socket.given);
        socket.loans.push_back((number, bytes));
        Ok((sent, Some(number)))
    }

    fn freed(&mut self, socket: &Shared) -> u64 {
        socket.borrow().over
    }

    fn part(&mut self, socket: &Shared, reset: bool) {
        let mut socket = socket.borrow_mut();
        assert!(!socket.loans.is_empty() || socket.loan_edge || socket.over > 0);
        socket.end_seen = true;
        socket.dropped |= reset;
    }

    fn shutdown(&mut self, socket: &Shared, what: ShutdownFlags) {
        socket.borrow_mut().end_seen |= what.contains(ShutdownFlags::SEND);
    }

    fn watch_writable(&mut self, _: ConnectionId, socket: &Shared, wanted: bool) {
        let mut socket = socket.borrow_mut();
        socket.watched = wanted;
        socket.room_edge = wanted;
    }

    fn close(&mut self, socket: Shared, _: bool) {
        let mut socket = socket.borrow_mut();
        (socket.device_closed, socket.end_seen) = (true, true);
    }

    fn forget(&mut self, id: ConnectionId) {
        self.later.retain(|(other, _)| *other != id);
    }
}
