//! Policy for frames that could be sent by reference: decisions only, no clock and no system calls.
//!
//! ```text
//!   Comparing ── TURNS turns of TURN_FRAMES frames: copied, referenced, referenced, copied ──► Chosen(method)
//!       ▲                                                                                       │
//!       └──────── after INTERVAL_MIN frames, doubled as long as the decision remains ───────────┘
//! ```
//! Cost is the CPU time in which a frame is built and committed; its completion costs the same for both methods. A frame whose
//! reference is attempted, and which is then copied, counts for references. Frames of up to [`SHORT_BYTES`] are referenced only
//! if neither the guest kicks nor the card notifies it more often than with copies: chains that return later may stop the
//! guest's queue, which costs the guest more than the copy.

use std::time::Duration;

use towline_channel::ZeroCopySend;

/// Maximum length of a frame of [`Class::Short`].
pub(super) const SHORT_BYTES: usize = 2048;
/// Turns of a comparison, of the methods in [`TURNS`].
const TURN_FRAMES: u32 = 1024;
/// Frames at the begin of a turn that are not evaluated: chains of the former turn are in flight.
const SETTLING_FRAMES: u32 = 256;
const TURNS: [SendMethod; 4] =
    [SendMethod::Copy, SendMethod::Reference, SendMethod::Reference, SendMethod::Copy];
/// One evaluated frame in this number is measured.
const MEASURE: u32 = 16;
/// Frames until a decision is reconsidered.
const INTERVAL_MIN: u32 = 1 << 16;
const INTERVAL_MAX: u32 = 1 << 20;
/// Minimum gain of the method that is not preferred.
const GAIN_PERCENT_MIN: u64 = 5;

/// Method of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendMethod {
    /// It is copied to the arena, and its chain completed at once.
    Copy,
    /// Descriptors refer to guest memory where possible.
    Reference,
}

/// Notifications between the guest and the card since the ring was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Notifications {
    /// Of the card, by the guest.
    pub(super) kicks: u64,
    /// Of the guest, by the card.
    pub(super) calls: u64,
}

/// Lengths of frames with a decision of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Copies are preferred.
    Short,
    /// References are preferred: copies of super-frames also evict the cache, which is not measured.
    Long,
}

/// State of the policy for one queue.
#[derive(Debug)]
pub(super) struct SendPolicy {
    setting: Setting,
    notified: Notifications,
}

#[derive(Debug)]
enum Setting {
    Fixed(SendMethod),
    Auto(Box<Deciders>),
}

/// State of each class.
#[derive(Debug)]
struct Deciders {
    short: Decider,
    long: Decider,
}

/// State of one class.
#[derive(Debug)]
struct Decider {
    class: Class,
    phase: Phase,
    /// Frames since the phase, or the turn, began.
    frames: u32,
    /// Frames after which the next decision is reconsidered, if it is this one again.
    interval: u32,
    decision: Option<SendMethod>,
}

#[derive(Debug)]
enum Phase {
    Comparing(Comparison),
    Chosen(SendMethod),
}

/// Turns so far.
#[derive(Debug, Default)]
struct Comparison {
    turn: usize,
    /// Notifications at the begin of the evaluated part of the turn.
    begun: Notifications,
    copies: Measured,
    references: Measured,
}

/// Measurements of a method.
#[derive(Debug, Default)]
struct Measured {
    /// Nanoseconds per MiB.
    costs: Vec<u64>,
    notified: Notifications,
}

impl SendPolicy {
    /// The policy of a queue in zero-copy mode.
    pub(super) fn new(setting: ZeroCopySend) -> Self {
        Self::with(match setting {
            ZeroCopySend::On => Setting::Fixed(SendMethod::Reference),
            ZeroCopySend::Off => Setting::Fixed(SendMethod::Copy),
            ZeroCopySend::Auto => {
                let deciders =
                    Deciders { short: Decider::new(Class::Short), long: Decider::new(Class::Long) };
                Setting::Auto(Box::new(deciders))
            }
        })
    }

    /// The policy of a queue in copy mode: the kernel copies each frame, so another copy never pays.
    pub(super) fn of_copy_mode() -> Self {
        Self::with(Setting::Fixed(SendMethod::Reference))
    }

    fn with(setting: Setting) -> Self {
        Self { setting, notified: Notifications::default() }
    }

    /// True if nothing is measured.
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self.setting, Setting::Fixed(_))
    }

    /// The method for a frame of `bytes` bytes.
    pub(super) fn method(&self, bytes: usize) -> SendMethod {
        match (&self.setting, self.decider(bytes)) {
            (Setting::Fixed(method), _) => *method,
            (Setting::Auto(_), decider) => decider.map_or(SendMethod::Copy, Decider::method),
        }
    }

    /// Returns true if the cost of a frame of `bytes` bytes is wanted.
    pub(super) fn measures(&self, bytes: usize) -> bool {
        self.decider(bytes).is_some_and(Decider::measures)
    }

    /// Records a frame that was sent by [`Self::method`]; `cost` is its CPU time, if it was measured.
    pub(super) fn sent(&mut self, bytes: usize, cost: Option<Duration>) {
        let notified = self.notified;
        if let Some(decider) = self.decider_mut(bytes) {
            decider.sent(bytes, cost, notified);
        }
    }

    /// Updates the notifications of the ring, before its next frames.
    pub(super) fn notified(&mut self, now: Notifications) {
        let restarted = now.kicks < self.notified.kicks || now.calls < self.notified.calls;
        self.notified = now;
        if let (true, Setting::Auto(deciders)) = (restarted, &mut self.setting) {
            let Deciders { short, long } = &mut **deciders;
            [short, long].into_iter().for_each(Decider::restart_comparison);
        }
    }

    fn decider(&self, bytes: usize) -> Option<&Decider> {
        match &self.setting {
            Setting::Fixed(_) => None,
            Setting::Auto(deciders) if bytes <= SHORT_BYTES => Some(&deciders.short),
            Setting::Auto(deciders) => Some(&deciders.long),
        }
    }

    fn decider_mut(&mut self, bytes: usize) -> Option<&mut Decider> {
        match &mut self.setting {
            Setting::Fixed(_) => None,
            Setting::Auto(deciders) => {
                let Deciders { short, long } = &mut **deciders;
                Some(if bytes <= SHORT_BYTES { short } else { long })
            }
        }
    }
}

impl Decider {
    fn new(class: Class) -> Self {
        Self {
            class,
            phase: Phase::Comparing(Comparison::default()),
            frames: 0,
            interval: INTERVAL_MIN,
            decision: None,
        }
    }

    fn method(&self) -> SendMethod {
        match &self.phase {
            Phase::Comparing(comparison) => TURNS[comparison.turn],
            Phase::Chosen(method) => *method,
        }
    }

    fn measures(&self) -> bool {
        matches!(self.phase, Phase::Comparing(_))
            && self.frames >= SETTLING_FRAMES
            && self.frames.is_multiple_of(MEASURE)
    }

    fn restart_comparison(&mut self) {
        if let Phase::Comparing(comparison) = &mut self.phase {
            (*comparison, self.frames) = (Comparison::default(), 0);
        }
    }

    fn sent(&mut self, bytes: usize, cost: Option<Duration>, notified: Notifications) {
        self.frames += 1;
        match &mut self.phase {
            Phase::Comparing(comparison) => {
                if self.frames == SETTLING_FRAMES {
                    comparison.begun = notified;
                }
                comparison.measured().costs.extend(cost.map(|cost| per_mib(cost, bytes)));
                if self.frames < TURN_FRAMES {
                    return;
                }
                self.frames = 0;
                if comparison.end_turn(notified) {
                    let method = comparison.cheaper(self.class);
                    self.choose(method);
                }
            }
            Phase::Chosen(_) if self.frames >= self.interval => {
                (self.phase, self.frames) = (Phase::Comparing(Comparison::default()), 0);
            }
            Phase::Chosen(_) => {}
        }
    }

    fn choose(&mut self, method: SendMethod) {
        let same = self.decision.replace(method) == Some(method);
        self.interval = if same { (self.interval * 2).min(INTERVAL_MAX) } else { INTERVAL_MIN };
        self.phase = Phase::Chosen(method);
    }
}

impl Comparison {
    /// Measurements of the current turn's method.
    fn measured(&mut self) -> &mut Measured {
        match TURNS[self.turn] {
            SendMethod::Copy => &mut self.copies,
            SendMethod::Reference => &mut self.references,
        }
    }

    /// Begins the next turn. Returns true after the last one.
    fn end_turn(&mut self, now: Notifications) -> bool {
        let begun = self.begun;
        let notified = &mut self.measured().notified;
        notified.kicks += now.kicks - begun.kicks;
        notified.calls += now.calls - begun.calls;
        if self.turn + 1 == TURNS.len() {
            return true;
        }
        self.turn += 1;
        false
    }

    fn cheaper(&mut self, class: Class) -> SendMethod {
        let (copy, reference) = (self.copies.cost(), self.references.cost());
        let (copies, references) = (self.copies.notified, self.references.notified);
        let less =
            |cost: u64, other: u64| cost.saturating_mul(100) < other.saturating_mul(100 - GAIN_PERCENT_MIN);
        let references = match class {
            Class::Short => {
                let more = references.kicks > copies.kicks || references.calls > copies.calls;
                less(reference, copy) && !more
            }
            Class::Long => !less(copy, reference),
        };
        if references { SendMethod::Reference } else { SendMethod::Copy }
    }
}

impl Measured {
    /// Mean cost without the most expensive quarter, which may have been disturbed.
    fn cost(&mut self) -> u64 {
        self.costs.sort_unstable();
        let kept = &self.costs[..self.costs.len() - self.costs.len() / 4];
        kept.iter().sum::<u64>() / (kept.len().max(1) as u64)
    }
}

fn per_mib(cost: Duration, bytes: usize) -> u64 {
    // Bounded, so that no sum overflows.
    u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX).min(1 << 32) * (1 << 20) / bytes as u64
}

#[cfg(test)]
mod tests;
