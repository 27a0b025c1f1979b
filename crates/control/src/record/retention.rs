//! Instants that stay, and those that may be removed.
//!
//! ```text
//!   --keep 1h,1d,30d     ◄─ 30 days ──────────── 1 day ────────────── 1 hour ──────── newest
//!                          the newest of each day │ the newest of each hour │ all
//! ```
//! Ages are relative to the newest instant, so nothing is removed while nothing is recorded. An image on which one that stays is based
//! stays too, until that one is stored on an image outside of the record, or as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use super::instants::RecordedInstant;

/// Rule for the instants that stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keep(Vec<Duration>);

/// An image of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) instant: RecordedInstant,
    /// Number of the instant on which it is based; `None`: a whole image, or one outside of the record.
    pub(super) base: Option<u64>,
    /// Disks that stay as they were at the instant.
    pub(super) disks: Vec<PathBuf>,
}

/// The images of a record, by their numbers. An image is based on an earlier one.
pub(super) type Entries = BTreeMap<u64, Entry>;

impl Keep {
    /// Keeps all instants of the last `windows[0]`, and of each further window the newest of each period that is as long as the window
    /// before. `None` unless there is one and they increase.
    pub fn new(windows: Vec<Duration>) -> Option<Self> {
        let is_ascending =
            windows.first().is_some_and(|first| !first.is_zero()) && windows.is_sorted_by(|a, b| a < b);
        is_ascending.then_some(Self(windows))
    }

    /// The time in which all instants stay.
    pub(super) fn all_within(&self) -> Duration {
        self.0[0]
    }

    /// The time after which nothing stays but the newest.
    pub(super) fn longest(&self) -> Duration {
        self.0[self.0.len() - 1]
    }

    /// Numbers of the instants that stay, the newest always.
    pub(super) fn kept(&self, entries: &Entries) -> BTreeSet<u64> {
        let Some((_, newest)) = entries.last_key_value() else { return BTreeSet::new() };
        let mut seen = BTreeSet::new();
        let mut is_kept = |instant: &RecordedInstant| {
            let age = newest.instant.elapsed.saturating_sub(instant.elapsed);
            // Each period has its newest, whatever window that is in.
            let mut is_newest = vec![true];
            for period in &self.0[..self.0.len() - 1] {
                is_newest
                    .push(seen.insert((*period, instant.elapsed.as_millis() / period.as_millis().max(1))));
            }
            let window = self.0.iter().position(|window| age <= *window);
            window.is_some_and(|window| is_newest[window])
        };
        let newest_first = entries.iter().rev();
        newest_first.filter(|(_, entry)| is_kept(&entry.instant)).map(|(sequence, _)| *sequence).collect()
    }
}

/// Numbers of the images that none of `needed` is based on, each after those that are based on it.
pub(super) fn removable(entries: &Entries, mut needed: BTreeSet<u64>) -> Vec<u64> {
    let mut removable = Vec::new();
    for (sequence, entry) in entries.iter().rev() {
        if needed.contains(sequence) {
            needed.extend(entry.base);
        } else {
            removable.push(*sequence);
        }
    }
    removable
}

/// An instant that stays for longer than all do, and is the only reason for which others stay: it is to be stored so that it needs none
/// of the record.
pub(super) fn mergeable(entries: &Entries, kept: &BTreeSet<u64>, keep: &Keep) -> Option<u64> {
    let (_, newest) = entries.last_key_value()?;
    let bases: BTreeSet<u64> = entries.values().filter_map(|entry| entry.base).collect();
    let is_mergeable = |entry: &&Entry| {
        let age = newest.instant.elapsed.saturating_sub(entry.instant.elapsed);
        let mut chain = std::iter::successors(entry.base, |base| entries.get(base)?.base);
        let sequence = entry.instant.sequence;
        // Nothing is based on it, or that would lose its base.
        age > keep.all_within()
            && !bases.contains(&sequence)
            && kept.contains(&sequence)
            && chain.any(|base| !kept.contains(&base))
    };
    entries.values().rev().find(is_mergeable).map(|entry| entry.instant.sequence)
}
