//! Record of a copy, for its report.

use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_control::plan::{CopyPhase, CopyReport, Failure, HostFacts};
use towline_migration::LaneSends;

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
    /// Source and destination; none of a copy on one host.
    pub(super) hosts: Vec<HostFacts>,
}

/// Beginning of a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PhaseStart {
    pub(super) at: Duration,
    pub(super) name: &'static str,
}

/// A phase with its length.
pub(super) struct PhaseLength {
    /// Its number among all phases.
    pub(super) index: usize,
    pub(super) name: &'static str,
    pub(super) at: Duration,
    pub(super) length: Duration,
}

impl PhaseLength {
    /// The part of this whole, for a page.
    pub(super) fn part(&self, whole: Duration, color: usize, cells: &[&str]) -> Value {
        let share = self.length.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
        json!({ "name": self.name, "share": share, "color": color, "cells": cells })
    }
}

/// Estimates at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TimedEstimate {
    pub(super) at: Duration,
    pub(super) estimate: Estimate,
}

/// Samples of a whole copy, about equally far apart.
#[derive(Debug, Default)]
pub(super) struct Samples {
    pub(super) kept: Vec<TimedEstimate>,
    /// Number of times that every second one was dropped: of `1 << halvings` samples one is kept.
    halvings: u32,
    /// Number of samples since the last one that was kept.
    skipped: usize,
}

impl Samples {
    pub(super) fn push(&mut self, sample: TimedEstimate) {
        if !self.kept.is_empty() && self.skipped + 1 < 1 << self.halvings {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        self.kept.push(sample);
        if self.kept.len() > SAMPLES_MAX {
            let mut index = 0;
            // The first one is kept, and so is the last, from which the distance continues.
            self.kept.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.halvings += 1;
        }
    }
}

impl CopyRecording {
    /// Phases that began in this time. The last one ends with it.
    pub(super) fn lengths(&self, within: Range<Duration>) -> Vec<PhaseLength> {
        let starts = self.phases.iter().enumerate().filter(|(_, phase)| within.contains(&phase.at));
        let ends = starts.clone().skip(1).map(|(_, phase)| phase.at).chain([within.end]);
        let length = |((index, phase), end): ((usize, &PhaseStart), Duration)| PhaseLength {
            index,
            name: phase.name,
            at: phase.at,
            length: end.saturating_sub(phase.at),
        };
        starts.zip(ends).map(length).collect()
    }

    /// Time at which a phase began.
    pub(super) fn begin_of(&self, phase: CopyPhase) -> Option<Duration> {
        let name = phase.name();
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
