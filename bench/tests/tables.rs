//! The benchmarks run, with small guests and short windows whose figures are meaningless.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{Network, require_lab, signal, skip, towline_binary};

/// Returns the command of a table with one run of the smallest size, with temporary files in this directory.
fn command(name: &str, directory: &Path, table: &str, options: &[&str]) -> Option<Command> {
    let towline = towline_binary().map_err(|error| skip(name, &format!("{error:#}"))).ok()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline-bench"));
    command.args([table, "--runs", "1", "--window", "0.2"]).args(options);
    command.env("TOWLINE_BIN", towline).env("TMPDIR", directory);
    Some(command)
}

/// Runs a table, and checks that each wanted row has figures, and that no file is left.
#[track_caller]
fn measure(name: &str, table: &str, options: &[&str], is_wanted: impl Fn(&str) -> bool) {
    let (directory, report) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let Some(mut command) = command(name, directory.path(), table, options) else { return };
    let output = command.arg("--report").arg(report.path()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    println!("{}", String::from_utf8_lossy(&output.stdout));
    let json = std::fs::read(report.path().join(format!("{table}.json"))).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let tables = json["tables"].as_array().unwrap();
    let rows: Vec<&Value> = tables.iter().flat_map(|table| table["rows"].as_array().unwrap()).collect();
    let label = |row: &&&Value| row["label"].as_str().unwrap().to_owned();
    let missing: Vec<_> = rows
        .iter()
        .filter(|row| {
            is_wanted(&label(row)) && (row["not-measured"].is_string() || row["data"] == Value::Null)
        })
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(rows.iter().any(|row| is_wanted(&label(&row))), "{rows:?}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
}

#[test]
fn every_row_of_lanes_is_measured() {
    let name = "every_row_of_lanes_is_measured";
    // iperf3 and zero-copy may be missing.
    let is_wanted = |label: &str| !label.contains("iperf3") && !label.contains("zero-copy");
    if require_lab(name) {
        measure(name, "lanes", &["--sizes", "32M", "--rows", "1 lane", "--rows", "4 lanes"], is_wanted);
    }
}

#[test]
fn every_row_of_saves_and_restores_is_measured() {
    let name = "every_row_of_saves_and_restores_is_measured";
    if require_lab(name) {
        // Direct I/O may be missing.
        measure(name, "ram", &["--sizes", "128M"], |label| !label.contains("direct"));
    }
}

#[test]
fn vsock_is_measured_beside_its_limit() {
    let rows = ["--rows", "stream, 64 B", "--rows", "stream, 64 KiB", "--rows", "request"];
    measure("vsock_is_measured_beside_its_limit", "vsock", &rows, |label| !label.contains("vhost-device"));
}

#[test]
fn a_nic_is_measured_beside_its_limits() {
    let name = "a_nic_is_measured_beside_its_limits";
    if let Err(error) = Network::new() {
        return skip(name, &format!("{error:#}"));
    }
    let rows = ["--rows", "transmit", "--rows", "receive, 64 B", "--rows", " 65536 B", "--rows", "TCP_"];
    let labels = ["towline", "the tap itself", "veth pair", "loop between taps"];
    measure(name, "net", &rows, |label| labels.contains(&label));
}

#[test]
fn filters_are_measured_beside_none() {
    measure("filters_are_measured_beside_none", "sandbox", &[], |_| true);
}

#[test]
fn a_cancelled_run_ends_and_removes_its_files() {
    let name = "a_cancelled_run_ends_and_removes_its_files";
    if !require_lab(name) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let Some(mut command) = command(name, directory.path(), "ram", &["--sizes", "256M"]) else { return };
    let child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    sleep(Duration::from_millis(1500));
    signal(child.id(), Signal::TERM);
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("bench: cancelling; guests and images are removed"), "{errors}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left: {errors}");
}
