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

use super::Engine;
use super::zero_copy_chains::{LingeringSocket, ZeroCopyChains};
use crate::connection::ConnectionId;
use crate::sockets::{CloseMode, Sockets};

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
