//! Statistics of a protection.

use std::sync::Mutex;

use towline_control::protect::Checkpoints;
use towline_control::statistics::{Metric, StatsObject, StatsSource};

use crate::endpoint::Endpoint;
use crate::lock::lock;

/// Counters of a protection, since its command began.
#[derive(Debug)]
pub(crate) struct ProtectionCounters {
    destination: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_protected: bool,
    generation: u64,
    losses: u64,
    /// All checkpoints; of their times those of the last second, and the total ones.
    all: Checkpoints,
}

impl ProtectionCounters {
    /// Counters of a guest that this host protects.
    pub(crate) fn new(destination: &Endpoint) -> Self {
        Self { destination: destination.to_string(), state: Mutex::default() }
    }

    /// The other host has the guest's state of this generation.
    pub(crate) fn protected(&self, generation: u64) {
        let mut state = lock(&self.state);
        (state.is_protected, state.generation) = (true, generation);
    }

    /// It may not have it any more.
    pub(crate) fn lost(&self) {
        let mut state = lock(&self.state);
        state.losses += u64::from(std::mem::take(&mut state.is_protected));
        (state.all.pause.longest_us, state.all.latency.longest_us) = (0, 0);
    }

    /// Adds these checkpoints.
    pub(crate) fn add(&self, new: &Checkpoints) {
        let Checkpoints { epoch, count, bytes, pages, mut pause, mut latency } = *new;
        let all = &mut lock(&self.state).all;
        pause.total_us += all.pause.total_us;
        latency.total_us += all.latency.total_us;
        *all = Checkpoints {
            epoch,
            count: all.count + count,
            bytes: all.bytes + bytes,
            pages: all.pages + pages,
            pause,
            latency,
        };
    }
}

impl StatsSource for ProtectionCounters {
    fn statistics(&self) -> Vec<StatsObject> {
        let State { is_protected, generation, losses, all } = &*lock(&self.state);
        let total = |name, help, us: u64| Metric::counter(name, help, us / 1000).in_milliseconds();
        let longest = |name, help, us: u64| Metric::gauge(name, help, us.div_ceil(1000)).in_milliseconds();
        let metrics = vec![
            Metric::gauge(
                "protected",
                "1 if the other host goes on with the guest should this one be lost, else 0",
                (*is_protected).into(),
            ),
            Metric::gauge("generation", "generation of the guest that was protected last", *generation),
            Metric::counter("losses", "protections that were lost", *losses),
            Metric::counter("checkpoints", "checkpoints of the guest", all.count),
            Metric::byte_counter("bytes", "bytes of all checkpoints", all.bytes),
            Metric::counter("pages", "pages of all checkpoints", all.pages),
            total("pause", "time for which the guest was stopped for checkpoints", all.pause.total_us),
            longest("pause-longest", "longest stop in the last second", all.pause.longest_us),
            total(
                "latency",
                "time from the end of each stop until its output was sent, of all",
                all.latency.total_us,
            ),
            longest("latency-longest", "longest such time in the last second", all.latency.longest_us),
        ];
        vec![StatsObject {
            kind: "protection",
            labels: vec![("destination", self.destination.clone())],
            metrics,
        }]
    }
}
