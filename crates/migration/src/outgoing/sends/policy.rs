//! Policy for the sends of a lane: decisions only, no system calls.
//!
//! ```text
//!             one packet              its completion             SAMPLES of each, in turn
//!   Ask ───── zero-copy ──► Answer ── truly without ──► Compare ── the cheapest way ──► Chosen
//!    ▲                        └────── copied ──► Compare or Chosen(plain) ◄── copied · no memory ┘ │
//!    └────────────────────────── after RECONSIDER_AFTER_PACKETS ───────────────────────────────────┘
//! ```
//!
//! The methods are a plain send, one without a copy unless the kernel copies anyway, and splicing where
//! packets come from a socket. Cost is the thread's CPU time per byte, with that of receiving where it could
//! splice instead. The cost of a completion elsewhere, and effects on the network, are not measured. Packets
//! shorter than [`LARGE_BYTES`] are sent plainly and yield no samples.

use std::time::Duration;

use towline_channel::ZeroCopyStatistics;

use super::ZeroCopySend;
use crate::statistics::{SendMethod, SendReason};

/// Below this, pinning the pages and reading the completion costs about what the copy does.
pub(super) const LARGE_BYTES: usize = 64 << 10;
/// Packets of each method that are compared, by their median, since any of them may be disturbed.
pub(super) const SAMPLES: usize = 16;
/// Packets until a decision is reconsidered: 2 GiB of full ones. A probe that is copied costs one packet
/// about 1.5 times.
pub(super) const RECONSIDER_AFTER_PACKETS: u32 = 4096;
/// Interval in packets at which a lane that sends with zero-copy evaluates its completions.
const EVALUATE_EVERY_PACKETS: u32 = 64;
/// Minimum gain of the other method; a smaller one changes nothing.
const GAIN_PERCENT_MIN: u64 = 5;
/// One in this number of calls since the last check may have failed for lack of the kernel's memory.
const NO_MEMORY_SHARE: u64 = 8;
/// Outside of comparisons one packet in this number is measured, for the statistics.
const MEASURE: u32 = 16;

/// State of the policy for one lane.
#[derive(Debug)]
pub(super) struct SendPolicy {
    phase: Phase,
    /// The method chosen last; plain before the first choice.
    method: SendMethod,
    /// Packets since the phase began.
    packets: u32,
    /// Statistics of the last evaluation.
    evaluated: ZeroCopyStatistics,
    /// Packets can be spliced.
    splices: bool,
    /// The kernel copied the last packet of a zero-copy send.
    copies: bool,
}

#[derive(Debug)]
enum Phase {
    /// Decided in advance.
    Fixed(SendMethod, SendReason),
    Ask,
    Answer,
    Compare(Vec<MethodTrial>),
    Chosen(SendMethod, SendReason),
}

/// A method that is measured.
#[derive(Debug)]
struct MethodTrial {
    method: SendMethod,
    /// Nanoseconds for a MiB.
    samples: Vec<u64>,
}

impl SendPolicy {
    /// Policy of a lane; `can`: its channel has zero-copy sends.
    pub(super) fn new(asked: ZeroCopySend, can: Result<(), SendReason>) -> Self {
        let phase = match (asked, can) {
            (ZeroCopySend::Off, _) => Phase::Fixed(SendMethod::Plain, SendReason::Asked),
            (ZeroCopySend::On, _) => Phase::Fixed(SendMethod::ZeroCopy, SendReason::Asked),
            (ZeroCopySend::Auto, Err(reason)) => Phase::Fixed(SendMethod::Plain, reason),
            (ZeroCopySend::Auto, Ok(())) => Phase::Ask,
        };
        Self {
            phase,
            method: SendMethod::Plain,
            packets: 0,
            evaluated: ZeroCopyStatistics::default(),
            splices: false,
            copies: false,
        }
    }

    /// Packets can be spliced from now on.
    pub(super) fn allow_splices(&mut self) {
        self.splices = true;
    }

    pub(super) fn is_auto(&self) -> bool {
        !matches!(self.phase, Phase::Fixed(..))
    }

    /// The method for the next packet, which has `bytes` bytes.
    pub(super) fn method(&self, bytes: usize) -> SendMethod {
        match &self.phase {
            Phase::Fixed(method, _) => *method,
            _ if bytes < LARGE_BYTES => SendMethod::Plain,
            Phase::Ask => SendMethod::ZeroCopy,
            Phase::Answer => SendMethod::Plain,
            Phase::Compare(candidates) => candidates
                .iter()
                .min_by_key(|candidate| candidate.samples.len())
                .map_or(SendMethod::Plain, |candidate| candidate.method),
            Phase::Chosen(method, _) => *method,
        }
    }

    /// Returns true if the next packet's cost is wanted.
    pub(super) fn measures(&self, bytes: usize) -> bool {
        let compares = matches!(self.phase, Phase::Compare(_));
        bytes >= LARGE_BYTES && (compares || self.packets.is_multiple_of(MEASURE))
    }

    /// Returns true if [`Self::evaluate`] needs the channel's statistics before the next packet.
    pub(super) fn needs_statistics(&self) -> bool {
        match self.phase {
            Phase::Answer => true,
            Phase::Chosen(SendMethod::ZeroCopy, _) => self.packets.is_multiple_of(EVALUATE_EVERY_PACKETS),
            _ => false,
        }
    }

    /// Evaluates the totals of the channel's sends so far.
    pub(super) fn evaluate(&mut self, now: ZeroCopyStatistics) {
        let before = std::mem::replace(&mut self.evaluated, now);
        let copied = now.copied - before.copied;
        let zero_copied = now.zero_copied - before.zero_copied;
        match self.phase {
            Phase::Answer if copied > 0 => self.found_copies(),
            Phase::Answer if zero_copied > 0 => {
                self.copies = false;
                self.begin_compare();
            }
            Phase::Chosen(SendMethod::ZeroCopy, _) if copied > zero_copied => self.found_copies(),
            Phase::Chosen(SendMethod::ZeroCopy, _)
                if (now.no_memory - before.no_memory) * NO_MEMORY_SHARE > now.sends - before.sends =>
            {
                self.choose(SendMethod::Plain, SendReason::NoMemory);
            }
            _ => {}
        }
    }

    /// Records a packet of `bytes` bytes that was sent by `method`; `cost` is its CPU time, if it was
    /// measured.
    pub(super) fn sent(&mut self, bytes: usize, method: SendMethod, cost: Option<Duration>) {
        self.packets = self.packets.wrapping_add(1);
        if bytes < LARGE_BYTES {
            return;
        }
        match &mut self.phase {
            Phase::Ask => self.enter(Phase::Answer),
            Phase::Fixed(..) | Phase::Answer => {}
            Phase::Compare(candidates) => {
                let measured = candidates.iter_mut().find(|candidate| candidate.method == method);
                if let Some(candidate) = measured.filter(|candidate| candidate.samples.len() < SAMPLES) {
                    candidate.samples.extend(cost.map(|cost| per_mib(cost, bytes)));
                }
                self.compare();
            }
            Phase::Chosen(_, reason) if self.packets >= RECONSIDER_AFTER_PACKETS => {
                if self.copies || *reason == SendReason::NoMemory {
                    self.enter(Phase::Ask);
                } else {
                    self.begin_compare();
                }
            }
            Phase::Chosen(..) => {}
        }
    }

    /// The kernel has no memory for any zero-copy send.
    pub(super) fn starve(&mut self) {
        self.choose(SendMethod::Plain, SendReason::NoMemory);
    }

    /// The current method and its reason.
    pub(super) fn state(&self) -> (SendMethod, SendReason) {
        match self.phase {
            Phase::Fixed(method, reason) | Phase::Chosen(method, reason) => (method, reason),
            _ => (SendMethod::Plain, SendReason::Undecided),
        }
    }

    fn found_copies(&mut self) {
        self.copies = true;
        if self.splices {
            self.begin_compare();
        } else {
            self.choose(SendMethod::Plain, SendReason::Copied);
        }
    }

    fn begin_compare(&mut self) {
        let zero_copy = (!self.copies).then_some(SendMethod::ZeroCopy);
        let splice = self.splices.then_some(SendMethod::Splice);
        let methods = [Some(SendMethod::Plain), zero_copy, splice].into_iter().flatten();
        let candidate = |method| MethodTrial { method, samples: Vec::with_capacity(SAMPLES) };
        self.enter(Phase::Compare(methods.map(candidate).collect()));
    }

    fn compare(&mut self) {
        let Phase::Compare(candidates) = &mut self.phase else { return };
        if candidates.iter().any(|candidate| candidate.samples.len() < SAMPLES) {
            return;
        }
        let costs = candidates.iter_mut().map(|candidate| (candidate.method, median(&mut candidate.samples)));
        let costs: Vec<_> = costs.collect();
        let of_present = costs.iter().find(|(method, _)| *method == self.method).map(|(_, cost)| *cost);
        let cheapest = costs.iter().min_by_key(|(_, cost)| *cost).copied();
        let (cheapest, cost) = cheapest.unwrap_or((SendMethod::Plain, 0));
        let is_kept = of_present.is_some_and(|present| {
            cost.saturating_mul(100) >= present.saturating_mul(100 - GAIN_PERCENT_MIN)
        });
        let method = if is_kept { self.method } else { cheapest };
        let reason = match method {
            SendMethod::Plain if self.copies => SendReason::Copied,
            SendMethod::Plain => SendReason::CostsMore,
            SendMethod::ZeroCopy => SendReason::CostsLess,
            SendMethod::Splice => SendReason::SpliceCostsLess,
        };
        self.choose(method, reason);
    }

    fn choose(&mut self, method: SendMethod, reason: SendReason) {
        self.method = method;
        self.enter(Phase::Chosen(method, reason));
    }

    fn enter(&mut self, phase: Phase) {
        (self.phase, self.packets) = (phase, 0);
    }
}

fn per_mib(cost: Duration, bytes: usize) -> u64 {
    u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1 << 20) / bytes as u64
}

fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

#[cfg(test)]
mod tests;
