//! Firecracker's handshake over Unix sockets: clients send `CONNECT port\n` and receive `OK port\n`, as its `docs/vsock.md`
//! describes. Also the list of clients that have not sent their line yet.

use super::socket::HostSocket;
use crate::packet::Kind;

/// Maximum length of a line.
pub(super) const LINE_BYTES_MAX: usize = 32;

/// Result of parsing the bytes that were received so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandshakeLine {
    /// The line is incomplete.
    Incomplete,
    /// The line is complete.
    Complete {
        /// The port.
        port: u32,
        /// Length of the line in bytes.
        length: usize,
    },
    /// It is not a valid line.
    Invalid,
}

/// Parses a client's `CONNECT port`. With [`Kind::Seqpacket`] the end of the message ends the line too.
pub(super) fn parse_connect(bytes: &[u8], kind: Kind) -> HandshakeLine {
    parse(bytes, kind, "connect", |port| port != u32::MAX)
}

/// Parses the `OK port` of another process.
pub(super) fn parse_ok(bytes: &[u8], kind: Kind) -> HandshakeLine {
    parse(bytes, kind, "ok", |_| true)
}

fn parse(bytes: &[u8], kind: Kind, word: &str, is_valid: impl Fn(u32) -> bool) -> HandshakeLine {
    let end = bytes.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n');
    let (text, length) = match end {
        Some(end) => (&bytes[..end], end + 1),
        None if kind == Kind::Seqpacket && bytes.len() <= LINE_BYTES_MAX => (bytes, bytes.len()),
        None if bytes.len() >= LINE_BYTES_MAX => return HandshakeLine::Invalid,
        None => return HandshakeLine::Incomplete,
    };
    let Ok(text) = std::str::from_utf8(text) else { return HandshakeLine::Invalid };
    let mut words = text.split_whitespace();
    if !words.next().is_some_and(|first| first.eq_ignore_ascii_case(word)) {
        return HandshakeLine::Invalid;
    }
    match words.next().and_then(|port| port.parse().ok()).filter(|port| is_valid(*port)) {
        Some(port) => HandshakeLine::Complete { port, length },
        None => HandshakeLine::Invalid,
    }
}

/// A client that has connected and has not sent its line yet.
pub(super) struct Handshake {
    pub(super) socket: HostSocket,
    since_ms: u64,
    /// Number of the handshake, in the order of connecting.
    serial: u64,
}

/// Handshakes in progress, in numbered slots.
pub(super) struct Handshakes {
    slots: Vec<Option<Handshake>>,
    count: usize,
    max: usize,
    started: u64,
}

impl Handshakes {
    /// Creates a list for at most `max` handshakes.
    pub(super) fn new(max: usize) -> Self {
        Self { slots: Vec::new(), count: 0, max, started: 0 }
    }

    /// Returns true if there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Starts a handshake and returns its slot. If there are too many, the oldest one ends, so that silent clients do not
    /// shut out others.
    pub(super) fn start(&mut self, socket: HostSocket, now_ms: u64) -> usize {
        if self.count >= self.max {
            let present = self.slots.iter_mut().filter(|slot| slot.is_some());
            if let Some(oldest) = present.min_by_key(|slot| slot.as_ref().map(|handshake| handshake.serial)) {
                *oldest = None;
                self.count -= 1;
            }
        }
        let slot = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.started += 1;
        self.put_back(slot, Handshake { socket, since_ms: now_ms, serial: self.started });
        slot
    }

    /// Removes a handshake.
    pub(super) fn remove(&mut self, slot: usize) -> Option<Handshake> {
        let handshake = self.slots.get_mut(slot)?.take()?;
        self.count -= 1;
        Some(handshake)
    }

    /// Puts a handshake back into the slot that it was removed from.
    pub(super) fn put_back(&mut self, slot: usize, handshake: Handshake) {
        self.slots[slot] = Some(handshake);
        self.count += 1;
    }

    /// Ends the handshakes that began more than `timeout_ms` ago.
    pub(super) fn expire(&mut self, now_ms: u64, timeout_ms: u64) {
        for slot in &mut self.slots {
            let expired = slot.take_if(|handshake| now_ms.saturating_sub(handshake.since_ms) > timeout_ms);
            self.count -= usize::from(expired.is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(port: u32, length: usize) -> HandshakeLine {
        HandshakeLine::Complete { port, length }
    }

    #[test]
    fn lines_are_parsed_as_firecracker_parses_them() {
        let connect = |bytes: &[u8]| parse_connect(bytes, Kind::Stream);
        assert_eq!(connect(b"CONNECT 52\n"), complete(52, 11));
        assert_eq!(connect(b"connect 52\nand data"), complete(52, 11));
        assert_eq!(connect(b"CONNECT  52 \r\n"), complete(52, 14));
        assert_eq!(connect(b"CONN"), HandshakeLine::Incomplete);
        assert_eq!(connect(b""), HandshakeLine::Incomplete);
        assert_eq!(connect(b"CONNECT 52"), HandshakeLine::Incomplete);
        assert_eq!(parse_connect(b"CONNECT 52", Kind::Seqpacket), complete(52, 10));
        for invalid in
            [&b"HELLO 1\n"[..], b"CONNECT\n", b"CONNECT x\n", b"CONNECT 4294967296\n", b"\n", b"\xff\n"]
        {
            assert_eq!(connect(invalid), HandshakeLine::Invalid, "{invalid:?}");
        }
        assert_eq!(connect(&[b'C'; LINE_BYTES_MAX]), HandshakeLine::Invalid);
        assert_eq!(parse_ok(b"OK 1073741824\n", Kind::Stream), complete(1_073_741_824, 14));
    }

    #[test]
    fn the_oldest_handshake_ends_when_there_are_too_many() {
        let mut handshakes = Handshakes::new(2);
        let mut start = |now_ms| {
            let (_client, socket) = HostSocket::pair(Kind::Stream).unwrap();
            handshakes.start(socket, now_ms)
        };
        assert_eq!([start(0), start(10), start(20)], [0, 1, 0]);
        handshakes.expire(25, 10);
        assert!(handshakes.remove(1).is_none(), "its time is over");
        assert!(handshakes.remove(0).is_some() && handshakes.is_empty());
    }
}
