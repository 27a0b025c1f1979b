//! The list of clients that have connected and have not sent their line yet.

use std::collections::BTreeMap;

use super::socket::HostSocket;

/// A client that has connected and has not sent its line yet.
pub(super) struct Handshake {
    pub(super) socket: HostSocket,
    since_ms: u64,
}

/// Handshakes in progress, by their numbers in the order of connecting.
pub(super) struct Handshakes {
    present: BTreeMap<u64, Handshake>,
    max: usize,
    started: u64,
}

impl Handshakes {
    /// Creates a list for at most `max` handshakes.
    pub(super) fn new(max: usize) -> Self {
        Self { present: BTreeMap::new(), max, started: 0 }
    }

    /// Returns true if there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.present.is_empty()
    }

    /// Starts a handshake and returns its number. If there are too many, the oldest one ends, so silent
    /// clients do not shut out others.
    pub(super) fn start(&mut self, socket: HostSocket, now_ms: u64) -> u64 {
        if self.present.len() >= self.max {
            self.present.pop_first();
        }
        self.started += 1;
        self.put_back(self.started, Handshake { socket, since_ms: now_ms });
        self.started
    }

    /// Removes a handshake.
    pub(super) fn remove(&mut self, number: u64) -> Option<Handshake> {
        self.present.remove(&number)
    }

    /// Puts back a handshake that was removed.
    pub(super) fn put_back(&mut self, number: u64, handshake: Handshake) {
        self.present.insert(number, handshake);
    }

    /// Ends the handshakes that began more than `timeout_ms` ago.
    pub(super) fn expire(&mut self, now_ms: u64, timeout_ms: u64) {
        self.present.retain(|_, handshake| now_ms.saturating_sub(handshake.since_ms) <= timeout_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::SocketType;

    #[test]
    fn the_oldest_handshake_ends_when_there_are_too_many() {
        let mut handshakes = Handshakes::new(2);
        let mut start = |now_ms| {
            let (_client, socket) = HostSocket::pair(SocketType::Stream).unwrap();
            handshakes.start(socket, now_ms)
        };
        assert_eq!([start(0), start(10), start(20)], [1, 2, 3]);
        assert!(handshakes.remove(1).is_none(), "the oldest one");
        handshakes.expire(25, 10);
        assert!(handshakes.remove(2).is_none(), "its time is over");
        assert!(handshakes.remove(3).is_some() && handshakes.is_empty());
    }
}
