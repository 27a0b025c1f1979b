//! Migration statistics, with QEMU's names.
//!
//! The object belongs to one migration; its counters are written by every lane and read at any time.

mod lanes;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub use lanes::{LaneSends, SendMethod, SendReason, SendTotals};

macro_rules! statistics {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one migration.
        #[derive(Debug, Default)]
        pub struct Statistics {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            /// Each lane that sends has one.
            lanes: Mutex<Vec<Arc<Mutex<LaneSends>>>>,
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Snapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Statistics {
            /// Reads all counters; each is exact, together they may be of slightly different moments.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl Snapshot {
            /// Each counter with its name, in QEMU's spelling (`dirty-sync-count`).
            pub fn entries(&self) -> Vec<(String, u64)> {
                vec![$((stringify!($name).replace('_', "-"), self.$name),)*]
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
    /// Bytes of pages that went with content.
    normal_bytes,
    /// Passes over the memory; at a destination, as many as the stream shows (FLUSH records behind the first).
    dirty_sync_count,
    /// Number of times, for each lane in each pass with zero-copy required (`on`), that the kernel copied everything:
    /// as in QEMU, between 0 and `dirty_sync_count` times the lanes.
    dirty_sync_missed_zero_copy,
    /// System calls that moved pages out of or into several buffers at once.
    vectored_calls,
    /// System calls that moved pages through one buffer.
    plain_calls,
    /// System calls that moved pages from socket to socket within the kernel.
    spliced_calls,
    /// Packets that went with a checksum, for a towline to compare.
    checksums_written,
    /// Packets whose header and pages were compared with their checksum.
    checksums_verified,
}

impl Statistics {
    /// Send method and totals of each lane, in order. Empty for an incoming migration.
    pub fn lane_sends(&self) -> Vec<LaneSends> {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.iter().map(|lane| *lane.lock().unwrap_or_else(PoisonError::into_inner)).collect()
    }

    /// The next lane.
    pub(crate) fn add_lane(&self, lane: LaneSends) -> Arc<Mutex<LaneSends>> {
        let lane = Arc::new(Mutex::new(lane));
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&lane));
        lane
    }

    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    /// Counts pages that went with content in one call of `buffers` buffers.
    pub(crate) fn count_pages(&self, pages: u64, bytes: u64, buffers: usize) {
        Self::add(&self.normal, pages);
        Self::add(&self.normal_bytes, pages * towline_protocol::ram::PAGE_SIZE);
        Self::add(&self.transferred, bytes);
        Self::add(if buffers > 1 { &self.vectored_calls } else { &self.plain_calls }, 1);
    }

    /// Counts pages with content that were spliced in `calls` calls.
    pub(crate) fn count_spliced(&self, pages: u64, bytes: u64, calls: u64) {
        Self::add(&self.normal, pages);
        Self::add(&self.normal_bytes, pages * towline_protocol::ram::PAGE_SIZE);
        Self::add(&self.transferred, bytes);
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
