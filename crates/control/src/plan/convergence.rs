//! Detects guests that write faster than they can be sent, by QEMU's figures and the engine's policy.
//!
//! QEMU itself decides when to stop its guest, and continues without end if that moment does not come. So its
//! `query-migrate` is evaluated: [`Error::CannotConverge`] ends a copy whose passes do not become shorter, or has it switched
//! to postcopy. A QEMU that throttles its guest (auto-converge) is given time until it throttles it no further.

use std::time::{Duration, Instant};

use towline_migration::Snapshot;
use towline_migration::convergence::{
    CannotConverge, ConvergencePolicy, Limits, MinWindow, PassDecision, Sample, Sampler,
};
use towline_qmp::commands::{Capability, MigrationInfo, MigrationStatus};

use super::error::Error;
use super::progress::Progress;
use super::request::{CopyRequest, Throttling};
use crate::qemu::QemuState;

/// Default of QEMU's `max-cpu-throttle`, in percent.
const THROTTLE_PERCENT_MAX: u8 = 99;
/// Bytes in a megabit.
const MEGABIT_BYTES: f64 = 1e6 / 8.0;

/// Convergence of one source.
#[derive(Debug)]
pub(super) struct Convergence {
    started: Instant,
    sampler: Sampler,
    policy: ConvergencePolicy,
    downtime_limit: Duration,
    throttle: Throttle,
    /// Maximum throttle of the guest in percent.
    throttle_max: u64,
}

/// Throttling of the guest by QEMU.
#[derive(Debug)]
enum Throttle {
    Off,
    /// It begins when the guest is found not to converge.
    Permitted,
    On {
        /// Throttle in percent when the guest was last found not to converge.
        then: Option<u64>,
    },
}

impl Convergence {
    pub(super) fn new(options: &CopyRequest, facts: &QemuState) -> Self {
        let downtime = options.downtime_limit;
        let limits = Limits { downtime, switchover_cost: Duration::ZERO, min_window: MinWindow::default() };
        let is_on = facts.capabilities.get(&Capability::AUTO_CONVERGE).is_some_and(|on| *on);
        let throttle = match options.transfer_options().throttling {
            Throttling::IfNotConverging => Throttle::Permitted,
            Throttling::Unchanged if !is_on => Throttle::Off,
            Throttling::Unchanged | Throttling::Always => Throttle::On { then: None },
        };
        let max = facts.parameters.max_cpu_throttle.unwrap_or(THROTTLE_PERCENT_MAX);
        Self {
            started: Instant::now(),
            sampler: Sampler::default(),
            policy: ConvergencePolicy::new(limits),
            downtime_limit: downtime,
            throttle,
            throttle_max: max.into(),
        }
    }

    /// Sets the downtime limit from now on.
    pub(super) fn set_downtime(&mut self, limit: Duration) {
        self.policy.set_downtime(limit);
        self.downtime_limit = limit;
    }

    /// Progress from a reply to `query-migrate`.
    pub(super) fn progress(&self, migration: &MigrationInfo) -> Progress {
        let downtime_limit = Some(self.downtime_limit);
        let Some(ram) = &migration.ram else { return Progress { downtime_limit, ..Progress::default() } };
        Progress {
            pass: Some(ram.dirty_sync_count),
            rate: Some((ram.mbps * MEGABIT_BYTES) as u64),
            dirty_rate: Some(ram.dirty_pages_rate * ram.page_size),
            remaining: Some(ram.remaining),
            throttle_percent: migration.cpu_throttle_percentage,
            expected_downtime: milliseconds(migration.expected_downtime),
            moved: moved(migration),
            downtime_limit,
            ..Progress::default()
        }
    }

    /// Evaluates a reply to `query-migrate`. Returns the reason for which the guest is to be throttled from now on, if it is.
    ///
    /// # Errors
    /// [`Error::CannotConverge`].
    pub(super) fn observe(&mut self, migration: &MigrationInfo) -> Result<Option<CannotConverge>, Error> {
        let Some(ram) = migration.ram.as_ref().filter(|_| migration.status == Some(MigrationStatus::ACTIVE))
        else {
            return Ok(None);
        };
        let sample = Sample {
            at: self.started.elapsed(),
            dirty_sync_count: ram.dirty_sync_count,
            transferred: ram.transferred,
            remaining: ram.remaining,
            dirty_pages_rate: ram.dirty_pages_rate,
            page_size: ram.page_size,
            expected_downtime: milliseconds(migration.expected_downtime),
        };
        let Some(observation) = self.sampler.observe(sample) else { return Ok(None) };
        let decision = self.policy.observe(&observation);
        tracing::debug!(?observation, ?decision, "a pass");
        let PassDecision::CannotConverge(why) = decision else { return Ok(None) };
        let now = migration.cpu_throttle_percentage.unwrap_or(0);
        match &mut self.throttle {
            Throttle::Off => Err(Error::CannotConverge { why, throttle: None }),
            Throttle::Permitted => {
                self.throttle = Throttle::On { then: None };
                Ok(Some(why))
            }
            // It is being throttled further, which may help.
            Throttle::On { then } if now < self.throttle_max && *then != Some(now) => {
                *then = Some(now);
                Ok(None)
            }
            Throttle::On { .. } => Err(Error::CannotConverge { why, throttle: Some(now) }),
        }
    }
}

/// Counters of QEMU's own migration.
pub(super) fn moved(migration: &MigrationInfo) -> Snapshot {
    let Some(ram) = &migration.ram else { return Snapshot::default() };
    Snapshot {
        total: ram.total,
        transferred: ram.transferred,
        normal: ram.normal,
        duplicate: ram.duplicate,
        normal_bytes: ram.normal_bytes,
        dirty_sync_count: ram.dirty_sync_count,
        ..Snapshot::default()
    }
}

fn milliseconds(of: Option<i64>) -> Option<Duration> {
    of.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis)
}
