//! Chains that have left without a copy: the kernel reads them in the guest's memory until the other end has the bytes,
//! and only then do they go back to the guest.
//!
//! ```text
//!   Out::Chain ── lend ──► Line::loans ── freed ──► the ring          the connection ends meanwhile:
//!                              │                                      its socket waits in `parting` with its loans,
//!                              └── let_go: everybody waits for them,  shut (all is still delivered) or reset
//!                                  then takes them back by a reset
//! ```
//! Chains come back in the order of the stream. How many can be lent is bounded with those that are held, for each line and
//! for the ring, so that a peer that acknowledges nothing takes nobody else's descriptors.

use std::collections::VecDeque;

use super::Engine;
use super::line::{Line, Shelf};
use crate::connection::ConnectionId;
use crate::sockets::Sockets;
use towline_vhost_user::Head;

/// The chains of one socket that are lent.
#[derive(Default)]
pub(super) struct Loans {
    /// Each with the loan that is its last, rising. Heads alone: a batch keeps the guest's memory mapped, and a peer that
    /// acknowledges nothing may keep its loans for long.
    chains: VecDeque<(u64, Head)>,
    /// The last loan that was made: also of part of a chain, the rest of which has not left.
    last: u64,
    /// All loans up to this one are over.
    over: u64,
}

impl Loans {
    pub(super) fn len(&self) -> usize {
        self.chains.len()
    }

    /// Bytes of memory beside its own.
    pub(super) fn footprint(&self) -> usize {
        self.chains.capacity() * size_of::<(u64, Head)>()
    }

    /// A loan was made.
    pub(super) fn begin(&mut self, number: u64) {
        self.last = number;
    }

    /// A chain that has left goes back when this loan is over. `held`: it counts among those that are held already.
    pub(super) fn enter(&mut self, until: u64, place: (usize, usize), held: bool, shelf: &mut Shelf) {
        if until <= self.over {
            shelf.finish(place.0, place.1, held);
            return;
        }
        debug_assert!(self.chains.back().is_none_or(|(last, _)| *last <= until));
        let head = shelf.lend(place.0, place.1, held);
        self.chains.push_back((until, head));
    }

    /// All loans up to this one are over. Says nothing of loans that were not made yet.
    fn free(&mut self, over: u64, shelf: &mut Shelf) {
        self.over = self.over.max(over.min(self.last));
        while let Some((until, head)) = self.chains.front().copied()
            && until <= self.over
        {
            self.chains.pop_front();
            shelf.take_back(head);
        }
    }
}

/// A socket whose connection has ended, with what it has lent.
pub(super) struct Parting<S> {
    id: ConnectionId,
    socket: S,
    loans: Loans,
    reset: bool,
}

impl<S: Sockets> Engine<S> {
    /// Something of what a socket has lent may be free. False if it never lent anything.
    pub fn freed(&mut self, id: ConnectionId) -> bool {
        if let Some(line) = Self::line_of(&mut self.lines, id) {
            if let (true, Some(socket)) = (line.loans.over < line.loans.last, &line.socket) {
                line.loans.free(self.sockets.freed(socket), &mut self.shelf);
            }
            return line.loans.last > 0;
        }
        let Some(index) = self.parting.iter().position(|parting| parting.id == id) else { return false };
        let parting = &mut self.parting[index];
        parting.loans.free(self.sockets.freed(&parting.socket), &mut self.shelf);
        if parting.loans.len() == 0 {
            let Parting { socket, reset, .. } = self.parting.swap_remove(index);
            self.sockets.close(socket, reset);
        }
        true
    }

    /// Chains that are lent.
    pub fn lent(&self) -> usize {
        let lines = self.lines.iter().flatten().map(|line| line.loans.len());
        lines.chain(self.parting.iter().map(|parting| parting.loans.len())).sum()
    }

    /// Whose sockets have lent something.
    pub fn lenders(&self) -> impl Iterator<Item = (ConnectionId, &S::Socket)> {
        let lines = self.lines.iter().flatten().filter(|line| line.loans.len() > 0);
        let lines = lines.filter_map(|line| Some((line.id, line.socket.as_ref()?)));
        lines.chain(self.parting.iter().map(|parting| (parting.id, &parting.socket)))
    }

    /// Resets every connection that has lent something, so that nothing is read any more once it is told as free. Returns
    /// how many there were.
    pub fn take_back(&mut self) -> usize {
        let lenders: Vec<ConnectionId> = self.lenders().map(|(id, _)| id).collect();
        for id in &lenders {
            if self.line(*id).is_some() {
                self.end(*id, true);
            } else if let Some(parting) = self.parting.iter_mut().find(|parting| parting.id == *id) {
                parting.reset = true;
                self.sockets.part(&parting.socket, true);
            }
            self.freed(*id);
        }
        self.statistics.zero_copy_resets += lenders.len() as u64;
        lenders.len()
    }

    pub(super) fn drop_line(&mut self, mut line: Line<S::Socket>, reset: bool) {
        line.discard(&mut self.shelf);
        if let Some((message, ..)) = line.message.take() {
            self.free_message(&message);
        }
        let Some(socket) = line.socket else {
            self.sockets.forget(line.id);
            return;
        };
        if line.loans.len() == 0 {
            self.sockets.close(socket, reset);
            return;
        }
        self.sockets.part(&socket, reset);
        self.parting.push(Parting { id: line.id, socket, loans: line.loans, reset });
        self.freed(line.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As when the kernel's error queue cannot be read.
    #[test]
    fn loans_that_are_made_later_are_not_over() {
        let (mut loans, mut shelf) = (Loans::default(), Shelf::default());
        loans.begin(1);
        loans.free(u64::MAX, &mut shelf);
        loans.begin(2);
        assert!(loans.over < 2, "the kernel reads it yet");
    }
}
