//! Counters of the calls that a channel makes.

use std::sync::Mutex;

use crate::lock::lock;

/// System calls with which a channel has sent and received, failed ones too. Not those that wait, read the
/// error queue or splice ([`Splice::move_exact`](crate::Splice::move_exact)). A pair in memory, which makes
/// none, counts each send and receive.
#[derive(Debug, Default)]
pub struct CallCounters {
    sent: Mutex<CallCount>,
    received: Mutex<CallCount>,
}

/// Calls in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCount {
    /// Calls with several buffers.
    pub vectored: u64,
    /// Calls with one buffer.
    pub plain: u64,
}

impl CallCounters {
    /// Calls that sent.
    pub fn sent(&self) -> CallCount {
        *lock(&self.sent)
    }

    /// Calls that received data or peeked at it.
    pub fn received(&self) -> CallCount {
        *lock(&self.received)
    }

    /// Counts a call that sends `buffers` buffers.
    pub(crate) fn count_send(&self, buffers: usize) {
        lock(&self.sent).add(buffers);
    }

    /// Counts a call that receives into `buffers` buffers.
    pub(crate) fn count_receive(&self, buffers: usize) {
        lock(&self.received).add(buffers);
    }
}

impl CallCount {
    fn add(&mut self, buffers: usize) {
        let count = if buffers > 1 { &mut self.vectored } else { &mut self.plain };
        *count += 1;
    }
}
