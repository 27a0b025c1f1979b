//! Migration statistics, with QEMU's names.
//!
//! The object belongs to one migration; its counters are written by every lane and read at any time.

mod lanes;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use towline_channel::{CallCount, CallCounters, Channel};

use crate::lock::lock;

pub use lanes::{LaneSends, SendMethod, SendReason, SendTotals};

macro_rules! statistics {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one migration.
        #[derive(Debug, Default)]
        pub struct Statistics {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            /// Each lane that sends has one.
            lanes: Mutex<Vec<Arc<Mutex<LaneSends>>>>,
            calls: Mutex<Vec<ChannelCalls>>,
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Snapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// System calls of the migration's channels that sent several buffers at once; at a destination,
            /// received.
            pub vectored_calls: u64,
            /// System calls of the migration's channels that sent one buffer; at a destination, received.
            pub plain_calls: u64,
        }

        impl Statistics {
            /// Reads all counters; each is exact, but they may be from slightly different moments.
            pub fn snapshot(&self) -> Snapshot {
                let CallCount { vectored: vectored_calls, plain: plain_calls } = self.calls();
                Snapshot { $($name: self.$name.load(Ordering::Relaxed),)* vectored_calls, plain_calls }
            }
        }

        impl Snapshot {
            /// Each counter with its name, in QEMU's spelling (`dirty-sync-count`).
            pub fn entries(&self) -> Vec<(String, u64)> {
                vec![
                    $((stringify!($name).replace('_', "-"), self.$name),)*
                    ("vectored-calls".to_owned(), self.vectored_calls),
                    ("plain-calls".to_owned(), self.plain_calls),
                ]
            }
        }
    };
}

statistics! {
    /// Bytes of the guest's RAM.
    total,
    /// Bytes on all channels.
    transferred,
    /// Bytes on lanes.
    multifd_bytes,
    /// Pages that went with content.
    normal,
    /// Pages that went as zero.
    duplicate,
    /// Bytes of pages sent with content.
    normal_bytes,
    /// Passes over the memory; at a destination, as many as the stream shows (FLUSH records after the first).
    dirty_sync_count,
    /// Number of times, for each lane in each pass with zero-copy required (`on`), that the kernel copied
    /// everything: as in QEMU, between 0 and `dirty_sync_count` times the lanes.
    dirty_sync_missed_zero_copy,
    /// System calls that moved pages from socket to socket within the kernel.
    spliced_calls,
}

/// Counters of a channel that carries a migration.
#[derive(Debug)]
struct ChannelCalls {
    counters: Arc<CallCounters>,
    counted: fn(&CallCounters) -> CallCount,
}

impl Statistics {
    /// Send method and totals of each lane, in order. Empty for an incoming migration.
    pub fn lane_sends(&self) -> Vec<LaneSends> {
        let lanes = lock(&self.lanes);
        lanes.iter().map(|lane| *lock(lane)).collect()
    }

    /// Includes the calls that send on `channel`.
    pub(crate) fn count_sends_of(&self, channel: &dyn Channel) {
        self.count_calls(channel, CallCounters::sent);
    }

    /// Includes the calls that receive on `channel`.
    pub(crate) fn count_receives_of(&self, channel: &dyn Channel) {
        self.count_calls(channel, CallCounters::received);
    }

    fn count_calls(&self, channel: &dyn Channel, counted: fn(&CallCounters) -> CallCount) {
        if let Some(counters) = channel.calls() {
            lock(&self.calls).push(ChannelCalls { counters, counted });
        }
    }

    fn calls(&self) -> CallCount {
        lock(&self.calls).iter().fold(CallCount::default(), |sum, channel| {
            let CallCount { vectored, plain } = (channel.counted)(&channel.counters);
            CallCount { vectored: sum.vectored + vectored, plain: sum.plain + plain }
        })
    }

    /// The next lane.
    pub(crate) fn add_lane(&self, lane: LaneSends) -> Arc<Mutex<LaneSends>> {
        let lane = Arc::new(Mutex::new(lane));
        lock(&self.lanes).push(Arc::clone(&lane));
        lane
    }

    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    /// Counts pages sent with content, and their bytes on the channel.
    pub(crate) fn count_content_pages(&self, pages: u64, bytes: u64) {
        Self::add(&self.normal, pages);
        Self::add(&self.normal_bytes, pages * towline_protocol::ram::PAGE_SIZE);
        Self::add(&self.transferred, bytes);
    }

    /// Counts pages with content that were spliced in `calls` calls.
    pub(crate) fn count_spliced(&self, pages: u64, bytes: u64, calls: u64) {
        self.count_content_pages(pages, bytes);
        Self::add(&self.spliced_calls, calls);
    }

    /// Counts a lane's bytes other than pages.
    pub(crate) fn count_lane(&self, bytes: usize) {
        Self::add(&self.multifd_bytes, bytes as u64);
        Self::add(&self.transferred, bytes as u64);
    }

    /// Notes the guest's size.
    pub(crate) fn set_total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }
}
