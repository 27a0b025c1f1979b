//! iperf3 with one stream for each lane.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use towline_lab::{Towline as Process, wait_until};

use super::transfer::Cost;
use crate::guest::number;

const SECONDS: &str = "2";
const WITHIN: Duration = Duration::from_secs(17);

/// Runs iperf3; the CPU time is from its own report.
pub(super) fn run(streams: usize) -> Result<Cost> {
    let start = |arguments: &[&str]| {
        Process::start(Path::new("iperf3"), arguments)
            .context("iperf3 is missing; install it (`apt-get install iperf3`)")
    };
    // A port that was free just now, as iperf3 does not accept an open socket.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let mut server = start(&["-s", "-1", "-B", "127.0.0.1", "-p", &port])?;
    let streams = streams.to_string();
    let report = wait_until("a connection between two iperf3", WITHIN, || {
        let client = start(&["-c", "127.0.0.1", "-p", &port, "-t", SECONDS, "-P", &streams, "-J"])?;
        // With -J iperf3 reports a failed connection in its report, and exits with 0.
        let report: Value =
            serde_json::from_str(&client.wait(WITHIN)?.stdout).context("iperf3's report is not JSON")?;
        Ok(report["end"]["sum_received"]["bytes"].is_number().then_some(report))
    })?;
    server.kill()?;
    let end = &report["end"];
    let (received, percent) = (&end["sum_received"], &end["cpu_utilization_percent"]);
    let (seconds, bytes) = (number(received, "seconds")?, number(received, "bytes")?);
    let percent = number(percent, "host_total")? + number(percent, "remote_total")?;
    Ok(Cost { seconds, cpu_seconds: percent / 100.0 * seconds, bytes })
}
