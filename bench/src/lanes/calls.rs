//! Number of calls, pages and seconds with pages copied into a linear buffer and with vectors: the comparison of the proposal for
//! QEMU's vectored stream (Kemari, 2010), on one main channel and on lanes.

use anyhow::Result;
use serde_json::json;

use super::end::Mode;
use super::entry::{MIB, Parameters};
use super::process::{self, Cost, End, Job};
use crate::rounds::{self, Contender, Outcome};
use crate::table::{Content, Row, Table};

/// In that proposal 36,150 of 1,052,950 pages were duplicate.
const ZERO_PERCENT: u64 = 3;
const LANES: [usize; 2] = [0, 4];
const MODES: [Mode; 2] = [Mode::Linear, Mode::Vectored];

/// Measures the table.
///
/// # Errors
/// The ends do not start, or the run was cancelled.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let bytes = parameters.calls_mib * MIB;
    let mut source = End::start(
        &parameters.program,
        &json!({ "source": { "bytes": bytes, "zero-percent": ZERO_PERCENT } }),
    )?;
    let mut destination = End::start(&parameters.program, &json!({ "destination": { "bytes": bytes } }))?;
    let entries: Vec<_> = LANES.into_iter().flat_map(|lanes| MODES.map(|mode| (lanes, mode))).collect();
    let contender = |&(lanes, mode): &(usize, Mode)| {
        let group = if lanes == 0 { "one main channel".into() } else { format!("{lanes} lanes") };
        Contender { group, label: mode.name().into() }
    };
    let contenders: Vec<_> = entries.iter().map(contender).collect();
    let outcomes = rounds::run(&contenders, parameters.calls_runs, &parameters.cancel, |index| {
        let (lanes, mode) = entries[index];
        let job = Job { mode: mode.name(), lanes, is_cold: false, cpus: None, tls: None };
        process::migrate(&mut source, &mut destination, job)
    })?;
    let rows = contenders.iter().zip(&outcomes).map(|(contender, outcome)| row(contender, outcome)).collect();
    Ok(vec![Table {
        name: "calls",
        title: format!(
            "Calls: a {} MiB guest over TCP on the loopback, {} runs, mean ± standard deviation",
            parameters.calls_mib, parameters.calls_runs
        ),
        columns: vec![
            "what",
            "vectored calls",
            "plain calls",
            "plain pages",
            "duplicate pages",
            "s",
            "± s",
            "CPU s/GB",
        ],
        rows,
        notes: vec![
            "the first row copies pages into a buffer of 32 KiB, which is written when it is full".into(),
            "calls: system calls of the source with several buffers, and with one".into(),
        ],
    }])
}

fn row(contender: &Contender, outcome: &Outcome<Cost>) -> Row {
    let Contender { group, label } = contender.clone();
    let last = outcome.values.last();
    let content = match (&outcome.failure, last) {
        (Some(reason), _) => Content::Missing(reason.clone()),
        (None, None) => Content::Missing("no run".into()),
        (None, Some(last)) => {
            let seconds: Vec<f64> = outcome.values.iter().map(|cost| cost.seconds).collect();
            let (mean, deviation) = mean_and_deviation(&seconds);
            let (cpu, _) =
                mean_and_deviation(&outcome.values.iter().map(Cost::cpu_per_gigabyte).collect::<Vec<_>>());
            let count = |key: &str| last.source[key].as_u64().unwrap_or_default().to_string();
            let cells = vec![
                count("vectored-calls"),
                count("plain-calls"),
                count("plain-pages"),
                count("duplicate-pages"),
                format!("{mean:.3}"),
                format!("{deviation:.3}"),
                format!("{cpu:.2}"),
            ];
            Content::Measured { cells, data: json!({ "seconds": seconds, "source": last.source }) }
        }
    };
    Row { group, label, content }
}

/// Returns the mean and the standard deviation of the sample; 0 for one value.
fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_is_the_samples() {
        assert_eq!(mean_and_deviation(&[2.0]), (2.0, 0.0));
        assert_eq!(mean_and_deviation(&[1.0, 3.0]), (2.0, 2.0_f64.sqrt()));
    }
}
