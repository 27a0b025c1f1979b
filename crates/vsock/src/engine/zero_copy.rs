//! Chains in zero-copy sends: the kernel reads them in guest memory until the peer has acknowledged the bytes. Only then are
//! they completed.
//!
//! ```text
//!   send queue ── sent ──► HostEnd::zero_copy ── completed ──► the ring        the connection ends meanwhile:
//!                              │                                               its socket lingers with its chains,
//!                              └── the ring stops: wait for completions,       shut down (all is delivered) or reset
//!                                  then reset the connections that are left
//! ```
//! Chains complete in the order of the stream. Their number is limited together with that of retained chains, per connection
//! and per ring, so a peer that acknowledges nothing does not use up descriptors of other connections.

use std::collections::VecDeque;

use towline_vhost_user::ChainHead;

use super::Engine;
use super::batch_pool::{BatchPool, ChainRef, Pin};
use crate::connection::ConnectionId;
use crate::sockets::{CloseMode, Sockets};

/// Chains of one socket in zero-copy sends.
#[derive(Default)]
pub(super) struct ZeroCopyChains {
    /// Each with the last send that reads it, in ascending order. Only heads are kept, because a batch keeps guest memory
    /// mapped, and a peer that acknowledges nothing may delay completions for long.
    chains: VecDeque<(u64, ChainHead)>,
    /// Last send; it may have sent a part of a chain whose rest is still queued.
    issued: u64,
    /// All sends up to this one have completed.
    completed: u64,
}

impl ZeroCopyChains {
    /// Returns the number of chains.
    pub(super) fn len(&self) -> usize {
        self.chains.len()
    }

    /// Returns the memory of the list in bytes.
    pub(super) fn footprint(&self) -> usize {
        self.chains.capacity() * size_of::<(u64, ChainHead)>()
    }

    /// Records a send.
    pub(super) fn issue(&mut self, send: u64) {
        self.issued = send;
    }

    /// Returns true if a send has not completed.
    fn is_pending(&self) -> bool {
        self.completed < self.issued
    }

    /// Adds a chain that was sent. It completes with the send `last`.
    pub(super) fn push(&mut self, last: u64, chain: ChainRef, pin: Pin, pool: &mut BatchPool) {
        if last <= self.completed {
            pool.complete(chain, pin);
            return;
        }
        debug_assert!(self.chains.back().is_none_or(|(before, _)| *before <= last));
        self.chains.push_back((last, pool.keep_head(chain, pin)));
    }

    /// Completes the chains of all sends up to `completed`. Later sends are not affected, whatever its value.
    fn complete(&mut self, completed: u64, pool: &mut BatchPool) {
        self.completed = self.completed.max(completed.min(self.issued));
        while let Some((last, head)) = self.chains.front().copied()
            && last <= self.completed
        {
            self.chains.pop_front();
            pool.complete_head(head);
        }
    }
}

/// A socket whose connection has ended before its zero-copy sends had completed.
pub(super) struct LingeringSocket<S> {
    id: ConnectionId,
    socket: S,
    zero_copy: ZeroCopyChains,
    mode: CloseMode,
}

impl<S: Sockets> Engine<S> {
    /// Reads the completions of a socket. Returns false if it has made no zero-copy send.
    pub fn reap_zero_copy_completions(&mut self, id: ConnectionId) -> bool {
        if let Some(end) = self.host_ends.get_mut(id) {
            if let Some(socket) = end.socket.as_ref().filter(|_| end.zero_copy.is_pending()) {
                end.zero_copy.complete(self.sockets.completed(socket), &mut self.pool);
            }
            return end.zero_copy.issued > 0;
        }
        let Some(index) = self.lingering.iter().position(|socket| socket.id == id) else { return false };
        let lingering = &mut self.lingering[index];
        lingering.zero_copy.complete(self.sockets.completed(&lingering.socket), &mut self.pool);
        if lingering.zero_copy.len() == 0 {
            let LingeringSocket { socket, mode, .. } = self.lingering.swap_remove(index);
            self.sockets.close(socket, mode);
        }
        true
    }

    /// Returns the number of chains in zero-copy sends.
    pub fn zero_copy_in_flight(&self) -> usize {
        let ends = self.host_ends.iter().map(|end| end.zero_copy.len());
        ends.chain(self.lingering.iter().map(|socket| socket.zero_copy.len())).sum()
    }

    /// Returns the sockets with chains in zero-copy sends.
    pub fn zero_copy_sockets(&self) -> impl Iterator<Item = (ConnectionId, &S::Socket)> {
        let ends = self.host_ends.iter().filter(|end| end.zero_copy.len() > 0);
        let ends = ends.filter_map(|end| Some((end.id, end.socket.as_ref()?)));
        ends.chain(self.lingering.iter().map(|lingering| (lingering.id, &lingering.socket)))
    }

    /// Resets every connection with chains in zero-copy sends, so that the kernel discards their data. Returns the number
    /// of those connections.
    pub fn abort_zero_copy(&mut self) -> usize {
        let ids: Vec<ConnectionId> = self.zero_copy_sockets().map(|(id, _)| id).collect();
        for id in &ids {
            if self.host_ends.get_mut(*id).is_some() {
                self.reset(*id, CloseMode::Reset);
            } else if let Some(lingering) = self.lingering.iter_mut().find(|socket| socket.id == *id) {
                lingering.mode = CloseMode::Reset;
                self.sockets.linger(&lingering.socket, CloseMode::Reset);
            }
            self.reap_zero_copy_completions(*id);
        }
        self.statistics.zero_copy_resets += ids.len() as u64;
        ids.len()
    }

    /// Takes the sockets of ended connections that have chains in zero-copy sends.
    pub fn take_lingering(&mut self) -> impl Iterator<Item = S::Socket> + use<S> {
        std::mem::take(&mut self.lingering).into_iter().map(|lingering| lingering.socket)
    }

    /// Keeps the socket of a connection that has ended, until its zero-copy sends have completed.
    pub(super) fn linger(
        &mut self,
        id: ConnectionId,
        socket: S::Socket,
        zero_copy: ZeroCopyChains,
        mode: CloseMode,
    ) {
        self.sockets.linger(&socket, mode);
        self.lingering.push(LingeringSocket { id, socket, zero_copy, mode });
        self.reap_zero_copy_completions(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As when the kernel's error queue cannot be read.
    #[test]
    fn later_sends_are_not_completed_by_an_unlimited_report() {
        let (mut chains, mut pool) = (ZeroCopyChains::default(), BatchPool::default());
        chains.issue(1);
        chains.complete(u64::MAX, &mut pool);
        chains.issue(2);
        assert!(chains.is_pending(), "the kernel still reads it");
    }
}
