//! Flow control of virtio-vsock: bytes that either side may send before the other reports free buffer space.
//!
//! Counters are modulo 2^32 and compared only by their differences, which are at most a window. A value of
//! the guest is not believed beyond its possible range: it may be old (Linux sends packets of one connection
//! from several threads), but `fwd_cnt` cannot exceed the bytes that were sent to it.

use std::collections::VecDeque;

use crate::packet::SocketType;

/// Smallest window of a connection.
pub const WINDOW_MIN: u32 = 16 << 10;
/// Maximum initial window; it grows while the host keeps up. The same as Linux: a guest's message may be as
/// long, and a message longer than a window is copied where it could be sent without a copy.
pub const WINDOW_FIRST_MAX: u32 = 256 << 10;
/// Maximum window while the host side does not keep up.
pub const WINDOW_BEHIND_MAX: u32 = 256 << 10;
/// Absolute maximum of a window: differences of counters stay far below half of 2^32.
pub const WINDOW_MAX: u32 = 256 << 20;

/// Smallest value that the guest's own `buf_alloc` counts as. A smaller one would only cause more credit
/// updates.
const GUEST_BUF_ALLOC_MIN: u32 = 4096;

/// Part of its buffer that Linux charges for each packet that its program has not read, however short (7.1,
/// and since June 2026 its stable kernels, 6.12.92 for one: `virtio_transport_inc_rx_pkt`). A packet beyond
/// the buffer resets the connection, and credit does not express it. 576 bytes with cache lines of 64 bytes,
/// 768 with those of 256.
pub const PACKET_CHARGE: u32 = 768;
/// Maximum number of runs that the unread packets of a connection are divided into.
const RUNS_MAX: usize = 16;

/// Credit for data to the guest.
#[derive(Debug, Clone, Default)]
pub struct PeerCredit {
    tx_cnt: u32,
    fwd_cnt: u32,
    buf_alloc: u32,
    /// Packets that the guest has not read, according to its `fwd_cnt`.
    unread: VecDeque<Run>,
    unread_packets: u32,
    /// A credit request was made since the guest last read.
    is_requested: bool,
}

/// Successive packets, which count as read when all of them are.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// `tx_cnt` after the last one.
    end: u32,
    packets: u32,
}

/// Credit that the next packet, or message, needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CreditNeed {
    pub(crate) bytes: u32,
    pub(crate) packets: u32,
}

impl CreditNeed {
    /// Credit for the shortest packet of a stream.
    pub(crate) const ONE: Self = Self { bytes: 1, packets: 1 };

    /// Credit for a message of `len` bytes, in packets of `capacity`.
    pub(crate) fn of_message(len: usize, capacity: usize) -> Self {
        let bytes = u32::try_from(len).unwrap_or(u32::MAX);
        let packets = u32::try_from(len.div_ceil(capacity.max(1))).unwrap_or(u32::MAX);
        Self { bytes, packets }
    }
}

/// Buffer space for data from the guest, as advertised to it.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveWindow {
    rx_cnt: u32,
    fwd_cnt: u32,
    /// `fwd_cnt` of the last packet that was sent to the guest.
    last_fwd_cnt_sent: u32,
    buf_alloc: u32,
    /// The host's socket was full since credit was last advertised.
    congested: bool,
}

/// A violation of flow control by the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditViolation;

impl PeerCredit {
    /// Returns the number of bytes that may be sent now.
    pub fn available(&self) -> u32 {
        self.buf_alloc.saturating_sub(self.tx_cnt.wrapping_sub(self.fwd_cnt))
    }

    /// Returns the size of the guest's receive buffer for the connection.
    pub fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// Returns the number of packets that may be sent now to a guest that charges [`PACKET_CHARGE`].
    pub fn available_packets(&self) -> u32 {
        self.packets_max().saturating_sub(self.unread_packets)
    }

    /// One packet is always possible, as long as the guest has read all others.
    fn packets_max(&self) -> u32 {
        (self.buf_alloc / PACKET_CHARGE).max(1)
    }

    /// Returns true if `packets` packets may be sent now. More than fit into the buffer must wait until it is
    /// empty.
    pub(crate) fn admits_packets(&self, packets: u32) -> bool {
        packets.min(self.packets_max()) <= self.available_packets()
    }

    /// Returns true if credit should be requested now: once, when half of the packets that the guest can hold
    /// are unread. It sends updates by bytes only, and would send none while a few short packets take all of
    /// its buffer.
    pub(crate) fn needs_request(&mut self) -> bool {
        self.unread_packets > self.packets_max() / 2 && !std::mem::replace(&mut self.is_requested, true)
    }

    /// Accounts for a packet of `bytes` that is sent to the guest.
    pub fn consume(&mut self, bytes: u32) {
        self.tx_cnt = self.tx_cnt.wrapping_add(bytes);
        self.unread_packets += 1;
        let packets_max = self.packets_max().div_ceil(RUNS_MAX as u32);
        let is_full = self.unread.len() == RUNS_MAX;
        match self.unread.back_mut() {
            Some(run) if run.packets < packets_max || is_full => {
                *run = Run { end: self.tx_cnt, packets: run.packets + 1 };
            }
            _ => self.unread.push_back(Run { end: self.tx_cnt, packets: 1 }),
        }
    }

    /// Updates the credit from a packet header of the guest.
    ///
    /// # Errors
    /// [`CreditViolation`] if `fwd_cnt` exceeds the bytes that were sent.
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> Result<(), CreditViolation> {
        let step = fwd_cnt.wrapping_sub(self.fwd_cnt);
        if step <= self.tx_cnt.wrapping_sub(self.fwd_cnt) {
            self.fwd_cnt = fwd_cnt;
            self.buf_alloc = buf_alloc;
            self.is_requested &= step == 0;
            let unread_bytes = self.tx_cnt.wrapping_sub(fwd_cnt);
            while let Some(run) = self.unread.front().copied()
                && self.tx_cnt.wrapping_sub(run.end) >= unread_bytes
            {
                self.unread_packets -= run.packets;
                self.unread.pop_front();
            }
            return Ok(());
        }
        // Older than the last value: a header that was overtaken by one of another thread of the guest.
        if self.fwd_cnt.wrapping_sub(fwd_cnt) <= WINDOW_MAX { Ok(()) } else { Err(CreditViolation) }
    }
}

impl ReceiveWindow {
    /// Creates a window of `buf_alloc` bytes.
    pub fn new(buf_alloc: u32) -> Self {
        Self { rx_cnt: 0, fwd_cnt: 0, last_fwd_cnt_sent: 0, buf_alloc, congested: false }
    }

    /// Returns `buf_alloc` and `fwd_cnt` for a header that is about to be sent.
    pub fn advertise(&mut self) -> (u32, u32) {
        self.last_fwd_cnt_sent = self.fwd_cnt;
        self.congested = false;
        (self.buf_alloc, self.fwd_cnt)
    }

    /// Returns the size of the window in bytes.
    pub fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// Returns the number of bytes that were received and not forwarded yet.
    pub fn unforwarded(&self) -> u32 {
        self.rx_cnt.wrapping_sub(self.fwd_cnt)
    }

    /// Accounts for `bytes` from the guest.
    ///
    /// # Errors
    /// [`CreditViolation`] if they exceed the guest's credit.
    pub fn receive(&mut self, bytes: u32) -> Result<(), CreditViolation> {
        if bytes > self.buf_alloc - self.unforwarded() {
            return Err(CreditViolation);
        }
        self.rx_cnt = self.rx_cnt.wrapping_add(bytes);
        Ok(())
    }

    /// Accounts for `bytes` that reached the host's socket.
    pub fn forward(&mut self, bytes: u32) {
        debug_assert!(bytes <= self.unforwarded());
        self.fwd_cnt = self.fwd_cnt.wrapping_add(bytes);
    }

    /// Records that the host's socket was full.
    pub fn mark_congested(&mut self) {
        self.congested = true;
    }

    /// Returns true if a credit update should be sent now: half of the window that the guest knows of is used
    /// up, and a quarter is free again. A guest that waits for credit has used up all of it, so it is
    /// notified as soon as a quarter is free, and never more often.
    ///
    /// `peer_buf_alloc` is the guest's own buffer. Linux uses no more of our window than that (since 2026,
    /// and in its stable kernels), and would wait forever for the rest of a larger one.
    ///
    /// Messages leave only when they are complete, so for [`SocketType::Seqpacket`] the guest may need any
    /// small free space to end the message that it has begun.
    pub fn needs_update(&self, peer_buf_alloc: u32, kind: SocketType) -> bool {
        let window = self.buf_alloc.min(peer_buf_alloc.max(GUEST_BUF_ALLOC_MIN));
        // A guest may send more than was advertised, as long as there is space: no violation.
        let free_as_advertised = window.saturating_sub(self.rx_cnt.wrapping_sub(self.last_fwd_cnt_sent));
        let forwarded_since = self.fwd_cnt.wrapping_sub(self.last_fwd_cnt_sent);
        let threshold = match kind {
            SocketType::Stream => window / 4,
            SocketType::Seqpacket => 1,
        };
        free_as_advertised <= window / 2 && forwarded_since >= threshold
    }

    /// Returns the window to grow to: twice the present one if the host kept up, else a few packets, so one
    /// is in transit while another is forwarded.
    pub fn desired(&self) -> u32 {
        let twice = self.buf_alloc.saturating_mul(2).min(WINDOW_MAX);
        if self.congested { twice.min(WINDOW_BEHIND_MAX).max(self.buf_alloc) } else { twice }
    }

    /// Grows the window to `buf_alloc` bytes, if that is more.
    pub fn grow(&mut self, buf_alloc: u32) {
        self.buf_alloc = self.buf_alloc.max(buf_alloc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: SocketType = SocketType::Stream;

    #[test]
    fn forwarding_more_than_was_sent_is_a_violation() {
        let mut credit = PeerCredit::default();
        credit.update(1000, 0).unwrap();
        credit.consume(600);
        assert_eq!(credit.available(), 400);
        assert_eq!(credit.update(1000, 601), Err(CreditViolation));
        credit.update(1000, 500).unwrap();
        assert_eq!(credit.available(), 900);
        // An old header changes nothing, not even the window.
        credit.update(7, 400).unwrap();
        assert_eq!(credit.available(), 900);
        // It may shrink, even below the bytes in transit.
        credit.update(50, 500).unwrap();
        assert_eq!(credit.available(), 0);
        assert_eq!(credit.update(1000, 500u32.wrapping_sub(WINDOW_MAX + 1)), Err(CreditViolation));
    }

    #[test]
    fn counters_wrap() {
        let (tx_cnt, fwd_cnt) = (u32::MAX - 1, u32::MAX - 1);
        let mut credit = PeerCredit { tx_cnt, fwd_cnt, buf_alloc: 100, ..PeerCredit::default() };
        credit.consume(50);
        assert_eq!(credit.available(), 50);
        credit.update(100, 20).unwrap();
        assert_eq!(credit.available(), 72);
        assert_eq!(credit.update(100, 49), Err(CreditViolation));
    }

    #[test]
    fn packets_count_as_unread_until_the_guest_has_read_all_of_their_run() {
        let (tx_cnt, fwd_cnt) = (u32::MAX - 999, u32::MAX - 999);
        let mut credit =
            PeerCredit { tx_cnt, fwd_cnt, buf_alloc: 32 * PACKET_CHARGE, ..PeerCredit::default() };
        let mut requests = 0;
        for left in (0..32).rev() {
            credit.consume(100);
            assert_eq!(credit.available_packets(), left);
            requests += usize::from(credit.needs_request());
        }
        assert_eq!(requests, 1);
        for (read, available) in [(100, 0), (199, 0), (200, 2), (3199, 30), (3200, 32)] {
            credit.update(32 * PACKET_CHARGE, fwd_cnt.wrapping_add(read)).unwrap();
            assert_eq!(credit.available_packets(), available, "{read} bytes were read");
        }
        assert!(credit.unread.is_empty() && credit.unread_packets == 0);
    }

    #[test]
    fn a_packet_of_any_size_can_be_sent_once_all_others_are_read() {
        let mut credit = PeerCredit::default();
        credit.update(100, 0).unwrap();
        assert!(credit.admits_packets(7));
        credit.consume(100);
        assert_eq!(credit.available_packets(), 0);
        // The guest's buffer shrinks and grows while packets are unread.
        for buf_alloc in [0, 1 << 20, 10 * PACKET_CHARGE] {
            credit.update(buf_alloc, 0).unwrap();
            for _ in 0..100 {
                credit.consume(1);
            }
            assert!(credit.unread.len() <= RUNS_MAX);
        }
        assert!(!credit.admits_packets(1));
        credit.update(100, 400).unwrap();
        assert!(credit.admits_packets(u32::MAX));
    }

    #[test]
    fn an_update_is_due_when_half_is_used_and_a_quarter_is_free_again() {
        let mut window = ReceiveWindow::new(1000);
        window.receive(500).unwrap();
        assert!(!window.needs_update(u32::MAX, STREAM));
        window.forward(249);
        assert!(!window.needs_update(u32::MAX, STREAM));
        window.forward(1);
        assert!(window.needs_update(u32::MAX, STREAM));
        assert_eq!(window.advertise(), (1000, 250));
        assert!(!window.needs_update(u32::MAX, STREAM));
        assert_eq!(window.receive(751), Err(CreditViolation));
        window.receive(750).unwrap();
        window.forward(1000);
        assert!(window.needs_update(u32::MAX, STREAM));
    }

    #[test]
    fn a_guest_without_credit_gets_an_update_whatever_the_window() {
        for bytes in [1, 2, 3, 7, WINDOW_MIN] {
            let mut window = ReceiveWindow::new(bytes);
            window.receive(bytes).unwrap();
            window.forward(bytes);
            assert!(window.needs_update(u32::MAX, STREAM), "{bytes}");
        }
    }

    #[test]
    fn updates_follow_the_guests_own_buffer_if_it_is_smaller() {
        let mut window = ReceiveWindow::new(1 << 20);
        window.receive(256 << 10).unwrap();
        window.forward(256 << 10);
        assert!(!window.needs_update(u32::MAX, STREAM));
        assert!(window.needs_update(256 << 10, STREAM));
        assert!(window.needs_update(0, STREAM));
    }

    #[test]
    fn any_free_space_is_advertised_for_messages() {
        let mut window = ReceiveWindow::new(1000);
        window.receive(100).unwrap();
        window.forward(100);
        window.receive(900).unwrap();
        assert!(window.needs_update(u32::MAX, SocketType::Seqpacket));
        assert!(!window.needs_update(u32::MAX, STREAM));
    }

    #[test]
    fn a_window_grows_while_the_host_keeps_up() {
        let mut window = ReceiveWindow::new(200_000);
        assert_eq!(window.desired(), 400_000);
        window.mark_congested();
        assert_eq!(window.desired(), WINDOW_BEHIND_MAX);
        window.advertise();
        window.grow(window.desired());
        window.mark_congested();
        assert_eq!((window.buf_alloc(), window.desired()), (400_000, 400_000));
    }
}
