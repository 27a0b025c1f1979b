//! Chains of a socket in zero-copy sends.

use std::collections::VecDeque;

use towline_vhost_user::ChainHead;

use super::batch_pool::{BatchPool, ChainRef, Pin};
use crate::connection::ConnectionId;
use crate::sockets::CloseMode;

/// Chains of one socket in zero-copy sends.
#[derive(Default)]
pub(super) struct ZeroCopyChains {
    /// Each with the last send that reads it, in ascending order. Only heads are kept, because a batch keeps guest memory
    /// mapped, and a peer that acknowledges nothing may delay completions for long.
    pub(super) chains: VecDeque<(u64, ChainHead)>,
    /// Last send; it may have sent a part of a chain whose rest is still queued.
    pub(super) issued: u64,
    /// All sends up to this one have completed.
    pub(super) completed: u64,
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
    pub(super) fn is_pending(&self) -> bool {
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
    pub(super) fn complete(&mut self, completed: u64, pool: &mut BatchPool) {
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
    pub(super) id: ConnectionId,
    pub(super) socket: S,
    pub(super) zero_copy: ZeroCopyChains,
    pub(super) mode: CloseMode,
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
