//! Record of a copy, for its report.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use towline_control::plan::{CopyPhase, CopyReport, Failure};
use towline_migration::LaneSends;

use crate::events;
use crate::progress::{Estimate, Estimator};

/// Maximum number of samples: of a longer copy every second one is dropped, and half as many are kept from then on.
pub(super) const SAMPLES_MAX: usize = 2000;

#[derive(Debug, Default)]
pub(super) struct CopyRecording {
    pub(super) estimator: Estimator,
    pub(super) phases: Vec<PhaseStart>,
    pub(super) samples: Samples,
    pub(super) lanes: Vec<LaneSends>,
    pub(super) notices: Vec<String>,
}

/// Beginning of a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PhaseStart {
    pub(super) at: Duration,
    pub(super) name: &'static str,
}

/// Estimates at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TimedEstimate {
    pub(super) at: Duration,
    pub(super) estimate: Estimate,
}

/// Samples of a whole copy, about equally far apart.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) kept: Vec<TimedEstimate>,
    /// Of this number of samples one is kept.
    pub(super) stride: usize,
    /// Number of samples since the last one that was kept.
    pub(super) skipped: usize,
}

impl Default for Samples {
    fn default() -> Self {
        Self { kept: Vec::new(), stride: 1, skipped: 0 }
    }
}

impl Samples {
    pub(super) fn push(&mut self, sample: TimedEstimate) {
        if !self.kept.is_empty() && self.skipped + 1 < self.stride {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        self.kept.push(sample);
        if self.kept.len() > SAMPLES_MAX {
            let mut index = 0;
            // The first one is kept, and so is the last, from which the stride continues.
            self.kept.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride *= 2;
        }
    }
}

impl CopyRecording {
    /// Time at which a phase began.
    pub(super) fn begin_of(&self, phase: CopyPhase) -> Option<Duration> {
        let name = events::phase(phase);
        self.phases.iter().find(|start| start.name == name).map(|start| start.at)
    }
}

/// Records what a report shows.
#[derive(Debug)]
pub(crate) struct ReportRecorder {
    pub(super) started: Instant,
    pub(super) recorded: Mutex<CopyRecording>,
}

/// A guest of several, and what was recorded of it.
pub(crate) struct GuestReport<'a> {
    pub(crate) name: &'a str,
    pub(crate) recorder: &'a ReportRecorder,
    pub(crate) copied: Result<&'a CopyReport, &'a Failure>,
}
