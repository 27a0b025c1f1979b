//! What each queue did, counted by its thread and read by whoever asks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use towline_vhost_user::{Ring, RingStatistics};

/// Why a frame went nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropReason {
    /// The host's interface is down.
    Down,
    /// The kernel does not take such a frame, or such a virtio header.
    Malformed,
    /// It does not fit: into the guest's buffers, or into any frame.
    TooLong,
    /// The kernel had no memory or no room for it.
    NoRoom,
    /// The tap is gone, or refuses for another reason.
    Refused,
    /// The card's link is down ([`Net::set_link`](crate::Net::set_link)).
    Unlinked,
}

impl DropReason {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Down, Self::Malformed, Self::TooLong, Self::NoRoom, Self::Refused, Self::Unlinked];

    /// As statistics call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Malformed => "malformed",
            Self::TooLong => "too-long",
            Self::NoRoom => "no-room",
            Self::Refused => "refused",
            Self::Unlinked => "unlinked",
        }
    }
}

/// What a queue did since the process began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStatistics {
    /// Frames and super-frames.
    pub packets: u64,
    /// Their bytes, without virtio headers.
    pub bytes: u64,
    /// Times that the used index was moved.
    pub batches: u64,
    /// Times that the guest was woken.
    pub notifications: u64,
    /// Times that it did not want to be.
    pub notifications_suppressed: u64,
    /// Receiving: frames that were copied here, because the guest's buffers were too few when they came. Transmitting by
    /// AF_XDP: those that somebody copied, the kernel or this process.
    pub copied: u64,
    /// Transmitting by AF_XDP: frames that the device read from the guest's memory.
    pub zero_copy: u64,
    /// Transmitting by AF_XDP: frames that the kernel was shown in the guest's memory, whatever it did then.
    pub referenced: u64,
    /// Of these, how many it has now.
    pub pending: u64,
    /// Frames that went nowhere, by [`DropReason::ALL`].
    pub drops: [u64; DropReason::ALL.len()],
}

impl QueueStatistics {
    /// Frames that went nowhere for this reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }
}

/// What is counted. Written by one thread, a batch at a time.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    packets: AtomicU64,
    bytes: AtomicU64,
    batches: AtomicU64,
    notifications: AtomicU64,
    notifications_suppressed: AtomicU64,
    copied: AtomicU64,
    zero_copy: AtomicU64,
    referenced: AtomicU64,
    pending: AtomicU64,
    drops: [AtomicU64; DropReason::ALL.len()],
}

impl Counters {
    /// Frames that went nowhere without a [`Tally`].
    pub(crate) fn drop(&self, reason: DropReason, frames: usize) {
        add(&self.drops[reason as usize], frames as u64);
    }

    /// What the same queue did in another process.
    pub(crate) fn go_on(&self, before: &QueueStatistics) {
        add(&self.packets, before.packets);
        add(&self.bytes, before.bytes);
        self.drops.iter().zip(before.drops).for_each(|(drops, before)| add(drops, before));
    }

    pub(crate) fn snapshot(&self) -> QueueStatistics {
        QueueStatistics {
            packets: self.packets.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            batches: self.batches.load(Relaxed),
            notifications: self.notifications.load(Relaxed),
            notifications_suppressed: self.notifications_suppressed.load(Relaxed),
            copied: self.copied.load(Relaxed),
            zero_copy: self.zero_copy.load(Relaxed),
            referenced: self.referenced.load(Relaxed),
            pending: self.pending.load(Relaxed),
            drops: std::array::from_fn(|reason| self.drops[reason].load(Relaxed)),
        }
    }
}

/// What went one way since it was last asked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moved {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
}

/// A queue's own side of its [`Counters`].
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) copied: u64,
    pub(crate) zero_copy: u64,
    pub(crate) referenced: u64,
    /// Not a sum: what it is now.
    pub(crate) pending: u64,
    drops: [u64; DropReason::ALL.len()],
    /// What the ring had counted when it was last looked at.
    ring: RingStatistics,
}

impl Tally {
    pub(crate) fn drop(&mut self, reason: DropReason) {
        self.drops[reason as usize] += 1;
    }

    /// Adds what was gathered since the last time, the ring's share too.
    pub(crate) fn settle(&mut self, ring: &Ring, counters: &Counters) -> Moved {
        let now = ring.statistics();
        let before = std::mem::replace(&mut self.ring, now);
        // A ring that was started anew counts from 0 again.
        let before = if now.batches < before.batches { RingStatistics::default() } else { before };
        add(&counters.batches, now.batches - before.batches);
        add(&counters.notifications, now.notifications.saturating_sub(before.notifications));
        add(
            &counters.notifications_suppressed,
            now.notifications_suppressed.saturating_sub(before.notifications_suppressed),
        );
        let moved =
            Moved { packets: std::mem::take(&mut self.packets), bytes: std::mem::take(&mut self.bytes) };
        add(&counters.packets, moved.packets);
        add(&counters.bytes, moved.bytes);
        add(&counters.copied, std::mem::take(&mut self.copied));
        add(&counters.zero_copy, std::mem::take(&mut self.zero_copy));
        add(&counters.referenced, std::mem::take(&mut self.referenced));
        counters.pending.store(self.pending, Relaxed);
        for (counter, drops) in counters.drops.iter().zip(&mut self.drops) {
            add(counter, std::mem::take(drops));
        }
        moved
    }
}

fn add(counter: &AtomicU64, more: u64) {
    if more > 0 {
        counter.fetch_add(more, Relaxed);
    }
}
