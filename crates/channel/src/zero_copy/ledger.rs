//! Tracks which zero-copy sends have finished.
//!
//! The kernel numbers a socket's successful zero-copy calls 0, 1, 2, … modulo 2^32 and reports ranges of
//! numbers, both ends included, several calls in one report and not always in order. Here numbers have 64
//! bits:
//!
//! ```text
//!   0 ───────────── finished ─────────────────────── issued ── (one call under way)
//!    all are finished │   [ahead)    [ahead)            │ not made yet
//! ```
//!
//! Reports of numbers outside `finished..issued` are counted and otherwise ignored.

use crate::Flushed;
use crate::sys::error_queue::{CODE_COPIED, ORIGIN_ZERO_COPY};
use libc::sock_extended_err;
use std::collections::BTreeMap;

/// Zero-copy sends of one socket: issued, finished, in flight.
#[derive(Debug, Default)]
pub(super) struct SendLedger {
    /// Calls that were taken.
    issued: u64,
    /// True if a call is under way: its completion may be read before it returns.
    calling: bool,
    /// All below are finished.
    finished: u64,
    /// Completions received out of order, as half-open ranges. Each is inside `finished..issued`, so their
    /// number is limited by the kernel's memory for sends.
    ahead: BTreeMap<u64, u64>,
    /// Since the last verdict: true if one was copied; true if one was not.
    copied: bool,
    spared: bool,
    /// The first error that a completion reported.
    failure: Option<i32>,
    pub(super) statistics: ZeroCopyStatistics,
}

impl SendLedger {
    pub(super) fn issued(&self) -> u64 {
        self.issued
    }

    /// End of the numbers that a completion may have.
    pub(super) fn open_end(&self) -> u64 {
        self.issued + u64::from(self.calling)
    }

    pub(super) fn finished(&self) -> u64 {
        self.finished
    }

    pub(super) fn failure(&self) -> Option<i32> {
        self.failure
    }

    /// A call begins.
    pub(super) fn begin(&mut self) {
        self.calling = true;
    }

    /// Records the result of the call: bytes sent, or a failure.
    pub(super) fn end(&mut self, sent: Option<usize>) {
        self.calling = false;
        if let Some(bytes) = sent {
            self.issued += 1;
            self.statistics.sends += 1;
            self.statistics.bytes += bytes as u64;
        }
    }

    /// Books an entry of the error queue.
    pub(super) fn book(&mut self, report: Option<sock_extended_err>) {
        match report {
            Some(report) if report.ee_origin == ORIGIN_ZERO_COPY => self.complete(&report),
            _ => self.statistics.foreign += 1,
        }
    }

    /// Result of the sends since the last verdict. One per `flush`.
    pub(super) fn verdict(&mut self) -> Flushed {
        let all_copied = self.copied && !self.spared;
        (self.copied, self.spared) = (false, false);
        if all_copied { Flushed::AllCopied } else { Flushed::Done }
    }

    fn complete(&mut self, report: &sock_extended_err) {
        let start = self.finished + u64::from(report.ee_info.wrapping_sub(self.finished as u32));
        let end = start + u64::from(report.ee_data.wrapping_sub(report.ee_info)) + 1;
        if end > self.open_end() || self.overlaps(start, end) {
            self.statistics.foreign += 1;
            return;
        }
        if report.ee_errno != 0 {
            self.failure.get_or_insert(report.ee_errno as i32);
        } else if report.ee_code & CODE_COPIED != 0 {
            self.copied = true;
            self.statistics.copied += end - start;
        } else {
            self.spared = true;
            self.statistics.zero_copied += end - start;
        }
        self.ahead.insert(start, end);
        while let Some(first) = self.ahead.first_entry()
            && *first.key() == self.finished
        {
            self.finished = first.remove();
        }
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.ahead.range(..end).next_back().is_some_and(|(_, other_end)| *other_end > start)
    }
}

/// Totals of a channel's zero-copy sends since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ZeroCopyStatistics {
    /// Calls that the kernel accepted.
    pub sends: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Finished calls whose bytes the kernel copied after all.
    pub copied: u64,
    /// Finished calls without a copy.
    pub zero_copied: u64,
    /// Number of times that the kernel had no memory for a call (`ENOBUFS`) and we waited or sent less.
    pub no_memory: u64,
    /// Entries of the error queue of another kind, which were ignored.
    pub foreign: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn issue(ledger: &mut SendLedger, calls: u64) {
        for _ in 0..calls {
            ledger.begin();
            ledger.end(Some(10));
        }
    }

    fn report(first: u64, last: u64) -> sock_extended_err {
        sock_extended_err {
            ee_errno: 0,
            ee_origin: ORIGIN_ZERO_COPY,
            ee_type: 0,
            ee_code: 0,
            ee_pad: 0,
            ee_info: first as u32,
            ee_data: last as u32,
        }
    }

    fn copied(first: u64, last: u64) -> sock_extended_err {
        sock_extended_err { ee_code: CODE_COPIED, ..report(first, last) }
    }

    /// A ledger after `number` finished calls.
    fn at(number: u64) -> SendLedger {
        SendLedger { issued: number, finished: number, ..SendLedger::default() }
    }

    #[test]
    fn ranges_out_of_order_and_over_the_wrap() {
        let base = (1 << 32) - 3;
        let mut ledger = at(base);
        issue(&mut ledger, 10);
        ledger.book(Some(report(base + 8, base + 9)));
        ledger.book(Some(report(base + 2, base + 4)));
        assert_eq!(ledger.finished(), base);
        ledger.book(Some(report(base, base + 1)));
        assert_eq!(ledger.finished(), base + 5);
        ledger.book(Some(report(base + 5, base + 7)));
        assert_eq!((ledger.finished(), ledger.ahead.len()), (base + 10, 0));
        assert_eq!(ledger.statistics.zero_copied, 10);
    }

    #[test]
    fn a_completion_may_be_read_before_its_call_returns() {
        let mut ledger = SendLedger::default();
        ledger.begin();
        ledger.book(Some(report(0, 0)));
        assert_eq!((ledger.finished(), ledger.issued()), (1, 0));
        ledger.end(Some(1));
        assert_eq!((ledger.finished(), ledger.issued()), (1, 1));
    }

    #[test]
    fn unknown_numbers_are_counted_and_change_nothing() {
        let mut ledger = at(7);
        issue(&mut ledger, 4);
        ledger.book(None);
        ledger.book(Some(sock_extended_err {
            ee_origin: libc::SO_EE_ORIGIN_ICMP,
            ee_errno: 113,
            ..report(7, 10)
        }));
        for (first, last) in [(11, 11), (10, 11), (6, 6), (6, 7), (9, 8), (0, u64::from(u32::MAX))] {
            ledger.book(Some(report(first, last)));
        }
        ledger.book(Some(report(9, 10)));
        ledger.book(Some(report(10, 10)));
        ledger.book(Some(report(8, 9)));
        assert_eq!((ledger.finished(), ledger.failure(), ledger.statistics.foreign), (7, None, 10));
        ledger.book(Some(report(7, 8)));
        assert_eq!(ledger.finished(), 11);
    }

    #[test]
    fn verdicts_count_from_one_to_the_next() {
        let mut ledger = SendLedger::default();
        assert_eq!(ledger.verdict(), Flushed::Done);
        issue(&mut ledger, 4);
        ledger.book(Some(copied(0, 1)));
        assert_eq!(ledger.verdict(), Flushed::AllCopied);
        ledger.book(Some(copied(2, 2)));
        ledger.book(Some(report(3, 3)));
        assert_eq!(ledger.verdict(), Flushed::Done);
        assert_eq!((ledger.statistics.copied, ledger.statistics.zero_copied), (3, 1));
    }

    #[test]
    fn a_send_that_failed_later_is_finished_and_remembered() {
        let mut ledger = SendLedger::default();
        issue(&mut ledger, 2);
        ledger.book(Some(sock_extended_err { ee_errno: 5, ..report(0, 0) }));
        ledger.book(Some(sock_extended_err { ee_errno: 6, ..report(1, 1) }));
        assert_eq!((ledger.finished(), ledger.failure()), (2, Some(5)));
    }

    proptest! {
        /// Completions in any order, coalesced anyhow, among noise, beginning anywhere: in the end all are
        /// finished.
        #[test]
        fn every_send_finishes_once(
            base in prop_oneof![Just(0), any::<u32>().prop_map(u64::from), Just((1 << 32) - 20)],
            cuts in prop::collection::vec(1..6u64, 1..40),
            noise in prop::collection::vec(any::<(u32, u32, u8, u8)>(), 0..20),
            seed: u64,
        ) {
            let mut ledger = at(base);
            issue(&mut ledger, cuts.iter().sum());
            let mut start = base;
            let mut reports: Vec<_> = cuts.iter().map(|n| { start += n; report(start - n, start - 1) }).collect();
            fastrand::Rng::with_seed(seed).shuffle(&mut reports);
            for (info, data, origin, code) in noise {
                let origin = if origin == ORIGIN_ZERO_COPY { 0 } else { origin };
                ledger.book(Some(sock_extended_err { ee_errno: 1, ee_origin: origin, ee_code: code, ee_info: info, ee_data: data, ..report(0, 0) }));
            }
            for report in reports {
                ledger.book(Some(report));
            }
            prop_assert_eq!(ledger.finished(), ledger.issued());
            prop_assert_eq!(ledger.failure(), None);
        }
    }
}
