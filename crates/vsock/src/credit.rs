//! Credit: how much either side may send before the other says that it has room again.
//!
//! Counts are modulo 2^32 and never compared but by their differences, which are at most a window. What the guest says is
//! not believed beyond what it can be: it may be old (Linux sends headers of one connection from several threads), but it
//! cannot have taken more than it was sent.

/// The smallest window that a connection is given.
pub const WINDOW_MIN: u32 = 16 << 10;
/// The largest window that a connection begins with; it grows while its host side keeps up. As Linux has it: a guest's
/// message may be as long, and what is longer than a window is copied where it would be sent without a copy.
pub const WINDOW_FIRST_MAX: u32 = 256 << 10;
/// The largest window that one grows to whose host side does not keep up.
pub const WINDOW_BEHIND_MAX: u32 = 256 << 10;
/// The largest window at all: differences of counts stay far below half of 2^32.
pub const WINDOW_MAX: u32 = 256 << 20;

/// No guest's own window counts as smaller than this: it only makes credit be told more often.
const OWN_MIN: u32 = 4096;

/// What may go to the guest.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerCredit {
    sent: u32,
    taken: u32,
    alloc: u32,
}

/// What the guest may send.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveWindow {
    received: u32,
    forwarded: u32,
    /// Of `forwarded`, what the guest knows.
    told: u32,
    window: u32,
    /// Whether the host side was behind since the guest was last told.
    behind: bool,
}

/// The guest said what cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditViolation;

impl PeerCredit {
    /// How many bytes may be sent now.
    pub fn room(&self) -> u32 {
        self.alloc.saturating_sub(self.sent.wrapping_sub(self.taken))
    }

    /// All that the guest could hold, were it empty.
    pub fn alloc(&self) -> u32 {
        self.alloc
    }

    /// So many bytes go to the guest.
    pub fn send(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
    }

    /// What a header of the guest's says.
    ///
    /// # Errors
    /// [`CreditViolation`] if it has taken more than it was sent.
    pub fn hear(&mut self, alloc: u32, taken: u32) -> Result<(), CreditViolation> {
        let step = taken.wrapping_sub(self.taken);
        if step <= self.sent.wrapping_sub(self.taken) {
            (self.taken, self.alloc) = (taken, alloc);
            return Ok(());
        }
        // Behind what it said before: an old header, overtaken by another of its threads.
        if self.taken.wrapping_sub(taken) <= WINDOW_MAX { Ok(()) } else { Err(CreditViolation) }
    }
}

impl ReceiveWindow {
    /// A window of so many bytes.
    pub fn new(window: u32) -> Self {
        Self { received: 0, forwarded: 0, told: 0, window, behind: false }
    }

    /// What goes into a header: the window, and what was forwarded.
    pub fn say(&mut self) -> (u32, u32) {
        self.told = self.forwarded;
        self.behind = false;
        (self.window, self.forwarded)
    }

    /// The window in bytes.
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Bytes received and not forwarded yet.
    pub fn kept(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    /// So many bytes came.
    ///
    /// # Errors
    /// [`CreditViolation`] if there was no credit for them.
    pub fn receive(&mut self, bytes: u32) -> Result<(), CreditViolation> {
        if bytes > self.window - self.kept() {
            return Err(CreditViolation);
        }
        self.received = self.received.wrapping_add(bytes);
        Ok(())
    }

    /// So many of them have left.
    pub fn forward(&mut self, bytes: u32) {
        debug_assert!(bytes <= self.kept());
        self.forwarded = self.forwarded.wrapping_add(bytes);
    }

    /// The host side could not take all.
    pub fn fall_behind(&mut self) {
        self.behind = true;
    }

    /// Whether to tell the guest now: half of what it knows of the window is used up, and a quarter can be given back.
    /// Whoever waits for credit has used all of it, so it hears when a quarter is free again, and never more often.
    ///
    /// `own`: the window that the guest gives us. Linux uses no more of ours than that (since 2026, and in its stable
    /// kernels), and would wait for ever with the rest of a larger one.
    ///
    /// `whole`: messages leave only when they are complete, so the guest may need any little room to end the one that it
    /// has begun.
    pub fn is_due(&self, own: u32, whole: bool) -> bool {
        let window = self.window.min(own.max(OWN_MIN));
        // A guest that sends more than it was told of, and no more than is free, does no harm.
        let free_as_told = window.saturating_sub(self.received.wrapping_sub(self.told));
        let news = self.forwarded.wrapping_sub(self.told);
        free_as_told <= window / 2 && news >= if whole { 1 } else { window / 4 }
    }

    /// The window that would suit: twice as large, if the host side kept up; and a few packets anyway, so that one is on
    /// its way while another is taken.
    pub fn wanted(&self) -> u32 {
        let twice = self.window.saturating_mul(2).min(WINDOW_MAX);
        if self.behind { twice.min(WINDOW_BEHIND_MAX).max(self.window) } else { twice }
    }

    /// Makes the window larger.
    pub fn widen(&mut self, window: u32) {
        self.window = self.window.max(window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_took_more_than_it_was_sent_lies() {
        let mut credit = PeerCredit::default();
        credit.hear(1000, 0).unwrap();
        credit.send(600);
        assert_eq!(credit.room(), 400);
        assert_eq!(credit.hear(1000, 601), Err(CreditViolation));
        credit.hear(1000, 500).unwrap();
        assert_eq!(credit.room(), 900);
        // An old header changes nothing, not even the window.
        credit.hear(7, 400).unwrap();
        assert_eq!(credit.room(), 900);
        // It may shrink, below what is under way too.
        credit.hear(50, 500).unwrap();
        assert_eq!(credit.room(), 0);
        assert_eq!(credit.hear(1000, 500u32.wrapping_sub(WINDOW_MAX + 1)), Err(CreditViolation));
    }

    #[test]
    fn counts_go_round() {
        let mut credit = PeerCredit { sent: u32::MAX - 1, taken: u32::MAX - 1, alloc: 100 };
        credit.send(50);
        assert_eq!(credit.room(), 50);
        credit.hear(100, 20).unwrap();
        assert_eq!(credit.room(), 72);
        assert_eq!(credit.hear(100, 49), Err(CreditViolation));
    }

    #[test]
    fn credit_is_told_when_it_is_needed_and_not_more_often() {
        let mut credit = ReceiveWindow::new(1000);
        credit.receive(500).unwrap();
        assert!(!credit.is_due(u32::MAX, false));
        credit.forward(249);
        assert!(!credit.is_due(u32::MAX, false));
        credit.forward(1);
        assert!(credit.is_due(u32::MAX, false));
        assert_eq!(credit.say(), (1000, 250));
        assert!(!credit.is_due(u32::MAX, false));
        assert_eq!(credit.receive(751), Err(CreditViolation));
        credit.receive(750).unwrap();
        credit.forward(1000);
        assert!(credit.is_due(u32::MAX, false));
    }

    #[test]
    fn whoever_has_used_all_is_told_in_the_end() {
        for window in [1, 2, 3, 7, WINDOW_MIN] {
            let mut credit = ReceiveWindow::new(window);
            credit.receive(window).unwrap();
            credit.forward(window);
            assert!(credit.is_due(u32::MAX, false), "{window}");
        }
    }

    #[test]
    fn a_guest_that_uses_only_as_much_as_it_gives_is_told_in_time() {
        let mut credit = ReceiveWindow::new(1 << 20);
        credit.receive(256 << 10).unwrap();
        credit.forward(256 << 10);
        assert!(!credit.is_due(u32::MAX, false));
        assert!(credit.is_due(256 << 10, false));
        assert!(credit.is_due(0, false));
    }

    #[test]
    fn a_message_that_began_can_be_ended() {
        let mut credit = ReceiveWindow::new(1000);
        credit.receive(100).unwrap();
        credit.forward(100);
        credit.receive(900).unwrap();
        assert!(credit.is_due(u32::MAX, true));
        assert!(!credit.is_due(u32::MAX, false));
    }

    #[test]
    fn a_window_grows_while_the_host_keeps_up() {
        let mut credit = ReceiveWindow::new(200_000);
        assert_eq!(credit.wanted(), 400_000);
        credit.fall_behind();
        assert_eq!(credit.wanted(), WINDOW_BEHIND_MAX);
        credit.say();
        credit.widen(credit.wanted());
        credit.fall_behind();
        assert_eq!((credit.window(), credit.wanted()), (400_000, 400_000));
    }
}
