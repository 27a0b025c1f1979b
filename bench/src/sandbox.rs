//! `cargo xtask bench sandbox-paths`: throughput of whole commands with `--sandbox on` and `none`.
//!
//! Both take turns in each row: a stream of a guest over vsock, frames that a guest sends, and an image that is copied over TCP to
//! another towline, which receives it into memory and hashes it. The time of a copy is that of its processes, and so includes the
//! confinement.

pub mod calls;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use tempfile::TempDir;
use towline_channel::Cancel;
use towline_lab::Towline;

use crate::rounds::{self, Contender, Outcome};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
use crate::{net, vsock};

/// Goal of the ratio.
const RATIO_MIN: f64 = 0.99;
const SETTINGS: [&str; 2] = ["none", "on"];
const LANES: &str = "4";
const COPY_WITHIN: Duration = Duration::from_secs(120);

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Length of each window.
    pub window: Duration,
    /// Memory of the copied guest in MiB.
    pub memory_mib: u64,
    /// Number of runs of each row.
    pub runs: usize,
    /// Binary under test.
    pub towline: PathBuf,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

impl Parameters {
    /// Returns the parameters of the published table.
    pub fn of(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        Self { window: Duration::from_secs(1), memory_mib: 2048, runs, towline: towline.into(), cancel }
    }
}

/// A measured command.
#[derive(Debug, Clone, Copy)]
struct Work {
    name: &'static str,
    unit: &'static str,
    measure: fn(&Bench, &'static str) -> Result<f64>,
}

const WORKS: [Work; 3] = [
    Work { name: "vsock, a stream of 64 KiB from the guest", unit: "Gbit/s", measure: Bench::vsock },
    Work { name: "net, frames of 1514 B from the guest", unit: "1000 frames/s", measure: Bench::net },
    Work { name: "copy, an image over TCP, 4 lanes", unit: "GB/s", measure: Bench::copy },
];

struct Bench {
    parameters: Parameters,
    directory: TempDir,
}

/// Measures the table.
///
/// # Errors
/// The run was cancelled, or the image cannot be created. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let bench = Bench { parameters: parameters.clone(), directory: TempDir::with_prefix("towline-bench-")? };
    let memory = format!("mem:{}M", parameters.memory_mib);
    Towline::start(&parameters.towline, ["copy", "--quiet", &memory, &bench.image()])?
        .wait_done(COPY_WITHIN)?;
    let rows: Vec<(Work, &str)> =
        WORKS.iter().flat_map(|work| SETTINGS.map(|setting| (*work, setting))).collect();
    let contender = |(work, setting): &(Work, &str)| Contender {
        group: format!("{}, {}", work.name, work.unit),
        label: format!("--sandbox {setting}"),
    };
    let contenders: Vec<Contender> = rows.iter().map(contender).collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        let (work, setting) = rows[index];
        (work.measure)(&bench, setting)
    })?;
    Ok(vec![table(parameters, &contenders, &outcomes)])
}

impl Bench {
    fn image(&self) -> String {
        self.directory.path().join("guest.img").display().to_string()
    }

    fn vsock(&self, setting: &'static str) -> Result<f64> {
        let Parameters { window, towline, cancel, .. } = &self.parameters;
        let parameters = vsock::Parameters::of(towline, None, 1, cancel.clone());
        let parameters = vsock::Parameters { window: *window, sandbox: Some(setting), ..parameters };
        Ok(vsock::one_stream(&parameters)?.rate() * 8.0 / 1e9)
    }

    fn net(&self, setting: &'static str) -> Result<f64> {
        let Parameters { window, towline, cancel, .. } = &self.parameters;
        let parameters = net::Parameters::of(towline, 1, cancel.clone());
        let parameters = net::Parameters { window: *window, sandbox: Some(setting), ..parameters };
        Ok(net::sent_frames(&parameters)?.rate() / 1e3)
    }

    /// Measures from the start of the sender to the end of both processes.
    fn copy(&self, setting: &'static str) -> Result<f64> {
        self.parameters.cancel.check()?;
        let options = ["copy", "--multifd-channels", LANES, "--sandbox", setting];
        let start =
            |ends: [&str; 2]| Towline::start(&self.parameters.towline, options.into_iter().chain(ends));
        let mut receiver = start(["tcp:127.0.0.1:0", "mem:"])?;
        let address = receiver.listens_at(COPY_WITHIN)?;
        let begun = Instant::now();
        start([&self.image(), &address])?.wait_done(COPY_WITHIN).context("the sender")?;
        receiver.wait_done(COPY_WITHIN).context("the receiver")?;
        let bytes = (self.parameters.memory_mib << 20) as f64;
        Ok(bytes / begun.elapsed().as_secs_f64() / 1e9)
    }
}

fn table(parameters: &Parameters, contenders: &[Contender], outcomes: &[Outcome<f64>]) -> Table {
    let rows = contenders.iter().zip(outcomes).enumerate().map(|(index, (contender, outcome))| {
        // The first of each pair is unconfined.
        let base = &outcomes[index / 2 * 2].values;
        let ratio = Summary::of_ratios(&outcome.values, base);
        let content = match (&outcome.failure, Summary::of(outcome.values.iter().copied()), ratio) {
            (None, Some(rate), Some(ratio)) => {
                let met = if ratio.median >= RATIO_MIN { "yes" } else { "no" };
                let goal = if index % 2 == 0 { "–".into() } else { format!("≥ {RATIO_MIN}: {met}") };
                Content::Measured {
                    cells: vec![rate.to_string(), format!("{ratio:.3}"), goal],
                    data: json!({ "rates": outcome.values, "ratio": ratio.median }),
                }
            }
            (failure, ..) => Content::Missing(failure.clone().unwrap_or_else(|| "no run".into())),
        };
        Row { group: contender.group.clone(), label: contender.label.clone(), content }
    });
    Table {
        name: "sandbox-paths",
        title: format!("Whole commands in a sandbox, {} runs, median (min–max)", parameters.runs),
        columns: vec!["what", "rate", "× none", "goal"],
        rows: rows.collect(),
        notes: vec!["a copy's time is of both processes, from the start of the sender".into()],
    }
}
