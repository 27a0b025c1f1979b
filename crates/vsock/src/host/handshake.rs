//! The list of clients that have connected and have not sent their line yet.

use super::socket::HostSocket;

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

    /// Starts a handshake and returns its slot. If there are too many, the oldest one ends, so silent clients
    /// do not shut out others.
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
    use crate::packet::SocketType;

    #[test]
    fn the_oldest_handshake_ends_when_there_are_too_many() {
        let mut handshakes = Handshakes::new(2);
        let mut start = |now_ms| {
            let (_client, socket) = HostSocket::pair(SocketType::Stream).unwrap();
            handshakes.start(socket, now_ms)
        };
        assert_eq!([start(0), start(10), start(20)], [0, 1, 0]);
        handshakes.expire(25, 10);
        assert!(handshakes.remove(1).is_none(), "its time is over");
        assert!(handshakes.remove(0).is_some() && handshakes.is_empty());
    }
}
