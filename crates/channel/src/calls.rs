//! Counters of the calls that a channel makes.

use std::sync::atomic::{AtomicU64, Ordering};

/// System calls with which a channel has sent and received, failed ones too. Not those that wait, read the
/// error queue or splice ([`Splice::move_exact`](crate::Splice::move_exact)). A pair in memory, which makes
/// none, counts each send and receive.
#[derive(Debug, Default)]
pub struct CallCounters {
    sent: DirectionCounters,
    received: DirectionCounters,
}

/// Calls in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCount {
    /// Calls with several buffers.
    pub vectored: u64,
    /// Calls with one buffer.
    pub plain: u64,
}

#[derive(Debug, Default)]
struct DirectionCounters {
    vectored: AtomicU64,
    plain: AtomicU64,
}

impl CallCounters {
    /// Calls that sent.
    pub fn sent(&self) -> CallCount {
        self.sent.read()
    }

    /// Calls that received data or peeked at it.
    pub fn received(&self) -> CallCount {
        self.received.read()
    }

    /// Counts a call that sends `buffers` buffers.
    pub(crate) fn count_send(&self, buffers: usize) {
        self.sent.count(buffers);
    }

    /// Counts a call that receives into `buffers` buffers.
    pub(crate) fn count_receive(&self, buffers: usize) {
        self.received.count(buffers);
    }
}

impl DirectionCounters {
    fn count(&self, buffers: usize) {
        let counter = if buffers > 1 { &self.vectored } else { &self.plain };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) -> CallCount {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CallCount { vectored: read(&self.vectored), plain: read(&self.plain) }
    }
}
