//! Counters of each queue, written by its thread and read by any other.

use std::sync::Mutex;

use towline_vhost_user::{Ring, RingStatistics};

use crate::lock::lock;

/// An enumeration of reasons, with their names in statistics.
macro_rules! reasons {
    (
        $(#[$about:meta])*
        pub enum $name:ident in $counters:literal {
            $($(#[$about_reason:meta])* $reason:ident = $text:literal,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$about_reason])* $reason,)*
        }

        impl $name {
            #[doc = concat!("All reasons, in the order of [`QueueStatistics::", $counters, "`].")]
            pub const ALL: [Self; [$($text),*].len()] = [$(Self::$reason),*];

            /// Name in statistics.
            pub fn name(self) -> &'static str {
                [$($text),*][self as usize]
            }
        }
    };
}

reasons! {
    /// Reason for discarding a frame.
    pub enum DropReason in "drops" {
        /// The host's interface is down.
        InterfaceDown = "interface-down",
        /// The kernel does not accept the frame or its virtio header.
        Malformed = "malformed",
        /// Longer than the guest's buffers, or than any frame.
        TooLong = "too-long",
        /// The kernel had no memory for it, or the interface no room.
        NoRoom = "no-room",
        /// The tap is gone, or returns another error.
        Refused = "refused",
        /// The card's link is down ([`Net::set_link`](crate::Net::set_link)).
        LinkDown = "link-down",
    }
}

/// Current way of transmission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransmitMode {
    /// By the tap.
    #[default]
    Tap,
    /// By AF_XDP with a copy in the kernel, as the driver has no zero-copy.
    Copy,
    /// By AF_XDP; the network card reads guest memory.
    ZeroCopy,
}

impl TransmitMode {
    /// Name in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Copy => "af-xdp-copy",
            Self::ZeroCopy => "af-xdp-zero-copy",
        }
    }
}

reasons! {
    /// Reason for copying a frame of a card that sends by AF_XDP, instead of referring to guest memory.
    pub enum CopyReason in "copies" {
        /// So short that a copy is cheaper.
        Short = "short",
        /// More descriptors needed than the driver accepts: the packet is in several buffers, or its headers must
        /// be changed.
        Buffers = "buffers",
        /// As `Buffers`: a buffer crosses a boundary of pages, which need not be contiguous.
        Pages = "pages",
        /// A buffer is outside of the memory that could be registered.
        Unregistered = "unregistered",
        /// Many frames are in flight.
        InFlight = "in-flight",
        /// The driver refused many frames.
        Errors = "errors",
        /// Too many segments, or no room for their headers.
        NoRoom = "no-room",
        /// The driver has no zero-copy.
        CopyMode = "copy-mode",
        /// Sent by the tap.
        Tap = "tap",
        /// References are disabled.
        Setting = "setting",
    }
}

/// Counters of a queue since the process started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStatistics {
    /// Frames and super-frames.
    pub packets: u64,
    /// Bytes of these packets, without virtio headers.
    pub bytes: u64,
    /// Updates of the used index.
    pub batches: u64,
    /// Notifications sent to the driver.
    pub notifications: u64,
    /// Notifications that the driver had suppressed.
    pub notifications_suppressed: u64,
    /// Notifications by the driver (kicks); with KVM, each is an exit of the guest.
    pub kicks: u64,
    /// Receiving: frames that were copied in this process, as they did not fit into the buffers gathered for
    /// them. Transmitting by AF_XDP: frames that the kernel or this process copied.
    pub copied: u64,
    /// Transmitting by AF_XDP: the same frames, in the order of [`CopyReason::ALL`].
    pub copies: [u64; CopyReason::ALL.len()],
    /// Transmitting by AF_XDP: frames that the network card read from guest memory.
    pub zero_copy: u64,
    /// Transmitting by AF_XDP: frames whose descriptors pointed into guest memory, whether the kernel copied
    /// them or not.
    pub referenced: u64,
    /// Referenced frames that are in flight now.
    pub pending: u64,
    /// Discarded frames, in the order of [`DropReason::ALL`].
    pub drops: [u64; DropReason::ALL.len()],
}

impl QueueStatistics {
    /// Frames that were discarded for this reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    /// Frames that were copied for this reason.
    pub fn copied_because(&self, reason: CopyReason) -> u64 {
        self.copies[reason as usize]
    }

    /// Adds those of a batch, or of the same queue on a migration's source, which may be any numbers;
    /// [`QueueStatistics::pending`] is not a sum.
    pub(crate) fn add(&mut self, more: &Self) {
        let add = |sum: &mut u64, more: u64| *sum = sum.wrapping_add(more);
        add(&mut self.packets, more.packets);
        add(&mut self.bytes, more.bytes);
        add(&mut self.batches, more.batches);
        add(&mut self.notifications, more.notifications);
        add(&mut self.notifications_suppressed, more.notifications_suppressed);
        add(&mut self.kicks, more.kicks);
        add(&mut self.copied, more.copied);
        self.copies.iter_mut().zip(more.copies).for_each(|(sum, more)| add(sum, more));
        add(&mut self.zero_copy, more.zero_copy);
        add(&mut self.referenced, more.referenced);
        self.drops.iter_mut().zip(more.drops).for_each(|(sum, more)| add(sum, more));
    }
}

/// Frames that one run of a worker moved in one direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Volume {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
}

/// Counters of a thread that are not yet in the shared ones of the queue.
#[derive(Debug, Default)]
pub(crate) struct BatchCounters {
    /// Those since the last flush, and the current level of [`QueueStatistics::pending`].
    pub(crate) since: QueueStatistics,
    /// Statistics of the ring at the last flush.
    ring: RingStatistics,
}

impl BatchCounters {
    /// Counts a frame of this length, its virtio header not included.
    pub(crate) fn add_frame(&mut self, bytes: usize) {
        self.since.packets += 1;
        self.since.bytes += bytes as u64;
    }

    /// Counts a discarded frame.
    pub(crate) fn add_drop(&mut self, reason: DropReason) {
        self.since.drops[reason as usize] += 1;
    }

    /// Counts frames of AF_XDP that were copied.
    #[cfg(feature = "af-xdp")]
    pub(crate) fn add_copies(&mut self, reason: CopyReason, frames: u64) {
        self.since.copied += frames;
        self.since.copies[reason as usize] += frames;
    }

    /// Adds everything since the last flush to the shared counters, with the statistics of the ring.
    pub(crate) fn flush(&mut self, ring: &Ring, shared: &Mutex<QueueStatistics>) -> Volume {
        let now = ring.statistics();
        let before = std::mem::replace(&mut self.ring, now);
        // A ring that was started again counts from 0.
        let before = if now.batches < before.batches { RingStatistics::default() } else { before };
        let since = &mut self.since;
        since.batches = now.batches - before.batches;
        since.notifications = now.notifications.saturating_sub(before.notifications);
        since.notifications_suppressed =
            now.notifications_suppressed.saturating_sub(before.notifications_suppressed);
        since.kicks = now.kicks.saturating_sub(before.kicks);
        let mut shared = lock(shared);
        shared.add(since);
        shared.pending = since.pending;
        let volume = Volume { packets: since.packets, bytes: since.bytes };
        *since = QueueStatistics { pending: since.pending, ..QueueStatistics::default() };
        volume
    }
}
