//! iperf3 with one stream for each lane.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use towline_lab::{Towline as Process, wait_until};

use super::process::Cost;

const MARGIN: Duration = Duration::from_secs(15);

/// Runs iperf3; the CPU time is from its own report.
pub(super) fn run(streams: usize, seconds: u64, cpus: Option<(&[usize], &[usize])>) -> Result<Cost> {
    // A port that was free just now, as iperf3 does not accept an open socket.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let (from, to) = cpus.unzip();
    let server = ["-s", "-1", "-B", "127.0.0.1", "-p", &port];
    let mut server = start(&server, to)?;
    let (time, streams) = (seconds.to_string(), streams.to_string());
    let client = ["-c", "127.0.0.1", "-p", &port, "-t", &time, "-P", &streams, "-J"];
    let within = Duration::from_secs(seconds) + MARGIN;
    let report = wait_until("a connection between two iperf3", within, || {
        let finished = start(&client, from)?.wait(within)?;
        // With -J iperf3 reports a failed connection in its report, and exits with 0.
        let report: Value = serde_json::from_str(&finished.stdout).context("iperf3's report is not JSON")?;
        Ok(report["end"]["sum_received"]["bytes"].is_number().then_some(report))
    })?;
    server.kill()?;
    let end = &report["end"];
    let number = |value: &Value| value.as_f64().context("missing number in iperf3's report");
    let seconds = number(&end["sum_received"]["seconds"])?;
    let percent = number(&end["cpu_utilization_percent"]["host_total"])?
        + number(&end["cpu_utilization_percent"]["remote_total"])?;
    let bytes = number(&end["sum_received"]["bytes"])?;
    Ok(Cost { seconds, cpu_seconds: percent / 100.0 * seconds, bytes, source: Value::Null })
}

/// Starts it, on these CPUs if there are any.
fn start(arguments: &[&str], cpus: Option<&[usize]>) -> Result<Process> {
    let arguments = arguments.iter().map(OsString::from);
    let started = match cpus {
        None => Process::start(Path::new("iperf3"), arguments),
        Some(cpus) => {
            let list: Vec<_> = cpus.iter().map(ToString::to_string).collect();
            let first = ["-c", &list.join(","), "iperf3"].map(OsString::from);
            Process::start(Path::new("taskset"), first.into_iter().chain(arguments))
        }
    };
    started.context("iperf3 is missing; install it (`apt-get install iperf3`)")
}
