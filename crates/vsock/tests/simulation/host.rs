//! The host's programs and the kernel between them and the device: sockets that take and give what they like, when they
//! like.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use towline_channel::{IoBuf, IoBufMut, gather, scatter};
use towline_vsock::packet::{Ends, Kind, Shut};
use towline_vsock::{Connect, Id, Key, News, Received, Sockets};

use crate::plan::{Plan, byte};

/// One socket: the device's end, the kernel's buffers, and the program behind them.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) plan: Plan,
    pub(crate) id: Option<Id>,
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
}

pub(crate) type Shared = Rc<RefCell<Socket>>;

/// All sockets, by the port that the guest asks for.
pub(crate) struct World {
    pub(crate) rng: fastrand::Rng,
    /// What the guest's connections will find.
    pub(crate) listeners: BTreeMap<u32, Shared>,
    /// Those that come later.
    pub(crate) later: Vec<(Id, Shared)>,
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
    pub(crate) fn news(&mut self) -> (Option<News>, bool) {
        let news = if self.closed {
            News::HungUp
        } else if self.ended {
            News::Ending
        } else {
            News::Data
        };
        let room = self.watched && std::mem::take(&mut self.room_edge);
        (std::mem::take(&mut self.edge).then_some(news), room)
    }

    /// Whether the program has all that the guest sent, and knows that it is all.
    pub(crate) fn is_complete(&self) -> bool {
        self.read == self.plan.guest_bytes() && self.end_seen
    }
}

impl Sockets for World {
    type Socket = Shared;

    fn connect(&mut self, id: Id, key: Key, _: Kind) -> Connect<Shared> {
        let Some(socket) = self.listeners.remove(&key.peer_port) else { return Connect::Refused };
        {
            let mut socket = socket.borrow_mut();
            (socket.id, socket.accepted, socket.edge) = (Some(id), true, true);
        }
        if self.rng.bool() {
            return Connect::Now(socket);
        }
        self.later.push((id, socket));
        Connect::Later
    }

    fn opened(&mut self, id: Id, socket: &Shared) {
        let mut socket = socket.borrow_mut();
        (socket.id, socket.edge) = (Some(id), true);
    }

    fn accepted(&mut self, _: Id, socket: &Shared, _: u32) -> io::Result<()> {
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

    fn next_message(&mut self, socket: &Shared) -> io::Result<usize> {
        let socket = socket.borrow();
        if socket.taken < socket.written {
            return Ok(socket.message_at(socket.taken) as usize);
        }
        if socket.ended || socket.closed { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn send(&mut self, socket: &Shared, bufs: &[IoBuf<'_>], _: Ends) -> io::Result<usize> {
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

    fn shutdown(&mut self, socket: &Shared, what: Shut) {
        socket.borrow_mut().end_seen |= what.contains(Shut::SEND);
    }

    fn watch_writable(&mut self, _: Id, socket: &Shared, wanted: bool) {
        let mut socket = socket.borrow_mut();
        socket.watched = wanted;
        socket.room_edge = wanted;
    }

    fn close(&mut self, socket: Shared, _: bool) {
        let mut socket = socket.borrow_mut();
        (socket.device_closed, socket.end_seen) = (true, true);
    }

    fn forget(&mut self, id: Id) {
        self.later.retain(|(other, _)| *other != id);
    }
}
