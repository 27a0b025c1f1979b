//! Cost of a protection before it begins: an estimate, by what the guest writes now.
//!
//! ```text
//!   QEMU: pages written in one epoch, by samples ─► + 80 KiB: a checkpoint ─┬─► / epoch: bandwidth
//!                                                                           └─► 2.5 ms + 7 µs for each page: pause ─► / epoch: share of time
//! ```
//! An epoch is measured as such, not taken from a rate: a guest that writes the same pages again and again has them in each checkpoint.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;
use towline_compat::facts::QemuFacts;
use towline_compat::{Finding, Report, Severity};
use towline_qmp as qmp;

use super::keeper::{Error, check_departing};
use crate::generations::ManagedGuest;
use crate::qemu::Qemu;
use crate::remote::DepartingGuest;

/// Pause for a checkpoint without pages, and what each page adds.
const PAUSE_BASE: Duration = Duration::from_micros(2500);
const PAUSE_PER_PAGE: Duration = Duration::from_micros(7);
const PAGE_BYTES: u64 = 4096;
/// Devices of a checkpoint.
const DEVICES_BYTES: u64 = 80 << 10;
/// Seconds that a clock may lose in a second, so that NTP corrects it.
const CLOCK_LOSS_MAX: f64 = 0.5e-3;
/// Shortest time for which QEMU counts writes.
const MEASURED_MIN: Duration = Duration::from_millis(50);
/// Measurements of an epoch, whose mean counts.
const MEASUREMENTS: u64 = 4;
/// Time for QEMU to look at its samples, twice.
const SAMPLED_WITHIN: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Pages that are looked at of all memory, and of each GiB: QEMU's default, and its maximum.
const SAMPLES: u64 = 16 << 10;
const SAMPLES_PER_GIB: [u64; 2] = [512, 16 << 10];
const GIB: u64 = 1 << 30;

/// Protection that is planned.
#[derive(Debug)]
pub struct CostRequest {
    /// Times from one checkpoint to the next.
    pub epochs: Vec<Duration>,
    /// Maximum size of a checkpoint.
    pub checkpoint_bytes_max: u64,
    /// As of a [`ProtectRequest`](super::ProtectRequest).
    pub leaks_output: bool,
}

/// Estimated cost of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochCost {
    /// Time from one checkpoint to the next, by which replies are delayed.
    pub epoch: Duration,
    /// Size of a checkpoint.
    pub bytes: u64,
    /// Time for which the guest is stopped for it.
    pub pause: Duration,
}

impl EpochCost {
    fn new(epoch: Duration, written: u64) -> Self {
        let pages = u32::try_from(written.div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX);
        Self { epoch, bytes: written + DEVICES_BYTES, pause: PAUSE_BASE + PAUSE_PER_PAGE * pages }
    }

    /// A checkpoint is taken after the one before.
    fn interval(&self) -> f64 {
        self.epoch.max(self.pause).as_secs_f64()
    }

    /// Bytes in a second, on the link between the hosts.
    pub fn bandwidth(&self) -> u64 {
        (self.bytes as f64 / self.interval()) as u64
    }

    /// Part of the time for which the guest is stopped, which a clock of KVM loses.
    pub fn stopped_share(&self) -> f64 {
        self.pause.as_secs_f64() / self.interval()
    }
}

/// Findings on a guest that would be protected, and the cost.
#[derive(Debug)]
pub struct Forecast {
    /// Reasons against, and warnings.
    pub report: Report,
    /// Costs of the epochs; none of a guest whose writes are not known.
    pub costs: Vec<EpochCost>,
}

/// Adds to the findings on a guest and its place what is against its protection here, and what that would cost. `report`: `None` if no other host
/// was asked. Changes nothing.
///
/// # Errors
/// Its QEMU cannot be queried.
pub fn foresee(
    socket: &Path,
    guest: &DepartingGuest,
    report: Option<Report>,
    request: &CostRequest,
) -> Result<Forecast, Error> {
    let not_asked =
        || finding("other-host", Severity::Note, "no other host was asked".into(), "name one: ssh:HOST");
    let report = report.unwrap_or_else(|| Report::default().with(not_asked()));
    let mut qemu = Qemu::inspect(socket, &qmp::Options::default())?;
    let managed = ManagedGuest::of_qemu(&qemu)?.map(|managed| Error::from(managed.refuse()));
    let refusals = [managed, check_departing(guest, request.leaks_output).err()];
    let report = refusals
        .into_iter()
        .flatten()
        .fold(report, |report, error| report.with(finding("protect", Severity::No, error.to_string(), "")));
    let Some(facts) = guest.qemu().filter(|facts| facts.status == "running") else {
        return Ok(Forecast { report, costs: Vec::new() });
    };
    let samples = samples_per_gib(facts.blocks.iter().map(|block| block.used_bytes).sum());
    let measured: Result<Vec<_>, _> =
        request.epochs.iter().map(|epoch| measure(&mut qemu, *epoch, samples)).collect();
    Ok(match measured {
        Ok(costs) => {
            Forecast { report: warnings(report, facts, &costs, request.checkpoint_bytes_max), costs }
        }
        Err(reason) => {
            let text = format!("the cost is not known: {reason}");
            let remedy = "QEMU 8.2 and later measure what a guest writes in an epoch";
            Forecast { report: report.with(finding("cost", Severity::Note, text, remedy)), costs: Vec::new() }
        }
    })
}

fn samples_per_gib(memory: u64) -> u64 {
    let [least, most] = SAMPLES_PER_GIB;
    (SAMPLES * GIB).checked_div(memory).unwrap_or(most).clamp(least, most)
}

/// Has QEMU count the pages that the guest writes in an epoch, which it does beside the running guest.
fn measure(qemu: &mut Qemu, epoch: Duration, samples: u64) -> Result<EpochCost, String> {
    let ms = epoch.max(MEASURED_MIN).as_millis() as u64;
    let arguments = json!({"calc-time": ms, "calc-time-unit": "millisecond", "sample-pages": samples});
    let mut rates = 0;
    for _ in 0..MEASUREMENTS {
        let arguments = arguments.as_object().cloned();
        qemu.client().execute_raw("calc-dirty-rate", arguments).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + Duration::from_millis(ms) + SAMPLED_WITHIN;
        rates += loop {
            sleep(LOOK_INTERVAL);
            let reply =
                qemu.client().execute_raw("query-dirty-rate", None).map_err(|error| error.to_string())?;
            match reply["dirty-rate"].as_u64() {
                Some(rate) if reply["status"] == "measured" => break rate,
                _ if Instant::now() > deadline => return Err("QEMU's measurement does not end".into()),
                _ => {}
            }
        };
    }
    // In MiB a second.
    let written = ((rates << 20) / MEASUREMENTS).saturating_mul(ms) / 1000;
    Ok(EpochCost::new(epoch, written))
}

/// Adds what the costs would mean for the guest.
fn warnings(report: Report, guest: &QemuFacts, costs: &[EpochCost], bytes_max: u64) -> Report {
    let too_large = costs.iter().filter(|cost| cost.bytes > bytes_max).map(|EpochCost { epoch, bytes, .. }| {
        let text = format!(
            "in {epoch:?} the guest writes {} MiB, above the {} MiB of a checkpoint: it would not be protected",
            bytes >> 20,
            bytes_max >> 20
        );
        finding("checkpoint-size", Severity::Note, text, "a higher --max-checkpoint, or a shorter --epoch")
    });
    let loss = costs.iter().map(EpochCost::stopped_share).reduce(f64::min);
    let clock = loss.filter(|loss| guest.kvm == Some(true) && *loss > CLOCK_LOSS_MAX).map(|loss| {
        let text = format!(
            "the guest's clock would lose {:.1} ms in a second or more, and NTP corrects up to 0.5",
            loss * 1e3
        );
        finding(
            "guest-clock",
            Severity::Note,
            text,
            "a longer --epoch, or a time service that steps the clock",
        )
    });
    too_large.chain(clock).fold(report, Report::with)
}

fn finding(rule: &'static str, severity: Severity, text: String, remedy: &str) -> Finding {
    Finding { rule, severity, configured_by: None, text, remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const MIB: u64 = 1 << 20;

    #[test]
    fn the_cost_of_an_epoch_follows_from_its_pages() {
        let cost = EpochCost::new(50 * MS, MIB);
        let (pause, bandwidth) = (Duration::from_micros(2500 + 256 * 7), 20 * (MIB + DEVICES_BYTES));
        assert_eq!((cost.pause, cost.bandwidth()), (pause, bandwidth));
        assert!((cost.stopped_share() - 4.292 / 50.0).abs() < 1e-9, "{cost:?}");
        // It takes longer than an epoch.
        let cost = EpochCost::new(50 * MS, 1024 * MIB);
        assert!(cost.pause > cost.epoch && cost.bandwidth() < 600 * MIB, "{cost:?}");
        assert!((cost.stopped_share() - 1.0).abs() < 1e-9, "{cost:?}");
        assert!(EpochCost::new(Duration::ZERO, 0).bandwidth() < 40 * MIB);
    }

    #[test]
    fn all_guests_have_about_as_many_samples() {
        let memory = [0, GIB / 4, 4 * GIB, 1024 * GIB];
        assert_eq!(memory.map(samples_per_gib), [16 << 10, 16 << 10, 4 << 10, 512]);
    }

    #[test]
    fn large_checkpoints_and_slow_clocks_are_noted() {
        let noted = |kvm, costs: &[EpochCost], max| {
            let guest = QemuFacts { kvm: Some(kvm), ..QemuFacts::default() };
            let report = warnings(Report::default(), &guest, costs, max);
            report.findings().iter().map(|finding| finding.rule).collect::<Vec<_>>()
        };
        let costs = [EpochCost::new(25 * MS, MIB / 2), EpochCost::new(50 * MS, MIB)];
        assert_eq!(noted(false, &costs, 2 * MIB), [""; 0]);
        assert_eq!(noted(false, &costs, MIB), ["checkpoint-size"]);
        assert_eq!(noted(true, &costs, MIB), ["checkpoint-size", "guest-clock"]);
        assert_eq!(noted(true, &[EpochCost::new(10_000 * MS, 0)], MIB), [""; 0]);
        assert_eq!(noted(true, &[], MIB), [""; 0]);
    }
}
