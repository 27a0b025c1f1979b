//! Connections in virtual time: rate, delay, jitter, bounded buffers, short reads and writes, stalls, and
//! cuts at a byte.

use std::collections::VecDeque;
use std::ops::Range;

use fastrand::Rng;

/// Nanoseconds since the run began.
pub(crate) type Time = u64;

/// Properties of a connection, in each direction.
#[derive(Debug, Clone)]
pub(crate) struct Knobs {
    /// Nanoseconds that a KiB takes.
    pub(crate) kib_ns: u64,
    pub(crate) delay_ns: u64,
    pub(crate) jitter_ns: u64,
    /// Bytes on the way and not read, at most.
    pub(crate) capacity: usize,
    /// Breaks after this number of bytes.
    pub(crate) cut_at: Option<u64>,
    /// Nothing arrives until then.
    pub(crate) stall: Range<Time>,
}

/// The two ends of a connection; the stream flows from near to far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Near,
    Far,
}

/// One end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) connection: usize,
    pub(crate) side: Side,
}

/// Reason why a connection is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The other end has closed it.
    Ended,
    /// The connection broke.
    Broken,
}

#[derive(Debug)]
struct Pipe {
    knobs: Knobs,
    segments: VecDeque<(Time, Vec<u8>)>,
    /// Bytes of the first segment that were read.
    read: usize,
    held: usize,
    written: u64,
    free_at: Time,
    arrives: Time,
}

#[derive(Debug)]
struct Connection {
    /// Towards far, towards near.
    pipes: [Pipe; 2],
    /// The end that closed it, or `None` if it broke.
    over: Option<Option<Side>>,
    /// Data on the way is lost when the connection ends.
    is_lossy: bool,
}

/// All connections, and the clock.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    connections: Vec<Connection>,
}

impl Net {
    pub(crate) fn new(rng: Rng) -> Self {
        Self { now: 0, rng, connections: Vec::new() }
    }

    /// Adds a connection; returns its ends.
    pub(crate) fn connect(&mut self, forward: Knobs, backward: Knobs, is_lossy: bool) -> (Port, Port) {
        let connection = self.connections.len();
        let pipe = |knobs| Pipe {
            knobs,
            segments: VecDeque::new(),
            read: 0,
            held: 0,
            written: 0,
            free_at: 0,
            arrives: 0,
        };
        self.connections.push(Connection { pipes: [pipe(forward), pipe(backward)], over: None, is_lossy });
        (Port { connection, side: Side::Near }, Port { connection, side: Side::Far })
    }

    /// Sends as many of `bytes` as fit, at most; 0: none now.
    pub(crate) fn send(&mut self, port: Port, bytes: &[u8]) -> Result<usize, Gone> {
        let connection = &mut self.connections[port.connection];
        if let Some(by) = connection.over {
            return Err(if by.is_some() { Gone::Ended } else { Gone::Broken });
        }
        let pipe = &mut connection.pipes[usize::from(port.side == Side::Far)];
        let room = pipe.knobs.capacity - pipe.held;
        // As sockets do it: a sender is not woken for every byte that is free.
        if room < bytes.len().min(pipe.knobs.capacity / 4) {
            return Ok(0);
        }
        let mut length = bytes.len().min(room);
        if length > 1 && self.rng.u8(0..4) == 0 {
            length = self.rng.usize(1..=length);
        }
        if let Some(cut_at) = pipe.knobs.cut_at
            && pipe.written + length as u64 >= cut_at
        {
            length = (cut_at - pipe.written) as usize;
            connection.over = Some(None);
            if length == 0 {
                return Err(Gone::Broken);
            }
        }
        if length > 0 {
            pipe.push(self.now, &bytes[..length], &mut self.rng);
        }
        Ok(length)
    }

    /// Receives up to `most` bytes that have arrived; `None`: there are none.
    pub(crate) fn recv(&mut self, port: Port, most: usize) -> Result<Option<Vec<u8>>, Gone> {
        let connection = &mut self.connections[port.connection];
        let pipe = &mut connection.pipes[usize::from(port.side == Side::Near)];
        let lost = connection.is_lossy && connection.over == Some(None);
        match pipe.segments.front() {
            Some((at, _)) if *at <= self.now && !lost => {}
            Some(_) if !lost => return Ok(None),
            _ => {
                return match connection.over {
                    None => Ok(None),
                    Some(None) => Err(Gone::Broken),
                    Some(Some(_)) => Err(Gone::Ended),
                };
            }
        }
        let most = if self.rng.u8(0..3) == 0 { self.rng.usize(1..=most) } else { most };
        Ok(Some(pipe.take(self.now, most)))
    }

    /// Closes a connection from one end: its sent data arrives, its unread data is lost.
    pub(crate) fn shut(&mut self, port: Port) {
        let connection = &mut self.connections[port.connection];
        if connection.over.is_none() {
            connection.over = Some(Some(port.side));
        }
    }

    /// As if the process had been killed: what it had sent may be lost, too.
    pub(crate) fn kill(&mut self, port: Port) {
        let connection = &mut self.connections[port.connection];
        if connection.over.is_none() {
            connection.over = Some(None);
        }
    }

    /// Number of bytes that went over a connection.
    pub(crate) fn written(&self, connection: usize, forward: bool) -> u64 {
        self.connections[connection].pipes[usize::from(!forward)].written
    }

    /// When the next bytes arrive.
    pub(crate) fn next_arrival(&self) -> Option<Time> {
        let pipes = self.connections.iter().flat_map(|connection| &connection.pipes);
        pipes.filter_map(|pipe| pipe.segments.front()).map(|(at, _)| *at).filter(|&at| at > self.now).min()
    }
}

impl Pipe {
    fn push(&mut self, now: Time, bytes: &[u8], rng: &mut Rng) {
        let took = bytes.len() as u64 * self.knobs.kib_ns / 1024;
        self.free_at = self.free_at.max(now) + took;
        let jitter = if self.knobs.jitter_ns > 0 { rng.u64(0..self.knobs.jitter_ns) } else { 0 };
        let mut at = self.free_at + self.knobs.delay_ns + jitter;
        if self.knobs.stall.contains(&at) {
            at = self.knobs.stall.end;
        }
        self.arrives = self.arrives.max(at);
        self.segments.push_back((self.arrives, bytes.to_vec()));
        self.held += bytes.len();
        self.written += bytes.len() as u64;
    }

    fn take(&mut self, now: Time, most: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(most.min(self.held));
        while let Some((at, segment)) = self.segments.front()
            && *at <= now
            && bytes.len() < most
        {
            let end = segment.len().min(self.read + most - bytes.len());
            bytes.extend_from_slice(&segment[self.read..end]);
            self.read = end;
            if end == segment.len() {
                self.segments.pop_front();
                self.read = 0;
            }
        }
        self.held -= bytes.len();
        bytes
    }
}
