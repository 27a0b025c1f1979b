//! Limits of the machine that rates are compared with.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use towline_lab::{Towline as Process, wait_until};

use super::bench::Parameters;
use super::part::Named;
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Size of a copy, larger than any cache.
const COPY_BYTES: usize = 256 << 20;
const COPIES: usize = 8;
const MARGIN: Duration = Duration::from_secs(15);

/// Limits in GB/s, or the reason for the lack of a figure.
pub(super) struct Limits {
    copy: Summary,
    tcp: std::result::Result<f64, String>,
}

pub(super) fn measure(parameters: &Parameters) -> Result<Limits> {
    eprintln!("ram: limits");
    let copy = copy();
    parameters.cancel.check()?;
    let tcp = tcp(parameters.tcp_time).map_err(|error| format!("{error:#}"));
    parameters.cancel.check()?;
    Ok(Limits { copy, tcp })
}

impl Limits {
    /// Returns the limits, and each rate as a share of them.
    pub(super) fn table(&self, rates: &[Named]) -> Table {
        let mut rows = vec![Row {
            group: "limits".into(),
            label: "copy of touched memory, one thread".into(),
            content: measured(self.copy, None, None),
        }];
        let tcp = match &self.tcp {
            Ok(rate) => measured(Summary { median: *rate, min: *rate, max: *rate, count: 1 }, None, None),
            Err(reason) => Content::Missing(reason.clone()),
        };
        rows.push(Row {
            group: "limits".into(),
            label: "one TCP stream on loopback (iperf3)".into(),
            content: tcp,
        });
        rows.extend(rates.iter().map(|rate| Row {
            group: rate.group.clone(),
            label: rate.label.clone(),
            content: measured(rate.value, Some(self.copy.median), self.tcp.as_ref().ok().copied()),
        }));
        Table {
            name: "limits",
            title: "Rates against the machine's own limits".into(),
            columns: vec!["what", "GB/s", "of a copy", "of a TCP stream"],
            rows,
            notes: vec![
                "GB/s: random data over the whole time, start and end of all processes included".into(),
            ],
        }
    }
}

fn measured(rate: Summary, copy: Option<f64>, tcp: Option<f64>) -> Content {
    let share = |limit: Option<f64>| {
        limit.map_or_else(String::new, |limit| format!("{:.0} %", rate.median / limit * 100.0))
    };
    let cells = vec![rate.to_string(), share(copy), share(tcp)];
    Content::Measured { cells, data: json!({ "gigabytes-per-second": rate.median }) }
}

fn copy() -> Summary {
    let source = vec![1_u8; COPY_BYTES];
    let mut target = vec![2_u8; COPY_BYTES];
    let rates = (0..COPIES).map(|_| {
        let started = Instant::now();
        target.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&target);
        COPY_BYTES as f64 / started.elapsed().as_secs_f64() / 1e9
    });
    Summary::of(rates).expect("there are several copies")
}

/// Measures one TCP stream by iperf3.
fn tcp(time: Duration) -> Result<f64> {
    // A port that was free just now, as iperf3 does not accept an open socket.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let iperf3 = Path::new("iperf3");
    let mut server = Process::start(iperf3, ["-s", "-1", "-B", "127.0.0.1", "-p", &port])
        .context("iperf3 is missing; install it (`apt-get install iperf3`)")?;
    let seconds = time.as_secs().max(1).to_string();
    let client = || Process::start(iperf3, ["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-J"]);
    let bits = wait_until("a connection between two iperf3", time + MARGIN, || {
        let finished = client()?.wait(time + MARGIN)?;
        // With -J iperf3 reports a failed connection in its report, and exits with 0.
        let report: Value = serde_json::from_str(&finished.stdout).context("iperf3's report is not JSON")?;
        Ok(report["end"]["sum_received"]["bits_per_second"].as_f64())
    })?;
    server.kill()?;
    Ok(bits / 8e9)
}
