//! The benchmarks of vhost-user devices run, with short windows whose figures are meaningless.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use towline_bench::table::{Content, Table};
use towline_bench::{net, sandbox, vsock};
use towline_channel::Cancel;
use towline_lab::{skip, towline_binary};

const WINDOW: Duration = Duration::from_millis(200);

/// Returns the binary, and the labels of the rows that must exist: towline's own only if it has this command.
fn towline(name: &str, command: &str, labels: &[&'static str]) -> Option<(PathBuf, Vec<&'static str>)> {
    let towline = towline_binary().map_err(|error| skip(name, &format!("{error:#}"))).ok()?;
    let output = Command::new(&towline).args([command, "--help"]).output().expect("towline starts");
    let mut labels = labels.to_vec();
    if output.status.success() {
        labels.push("towline");
    } else {
        skip(name, &format!("this towline has no `{command}`; only the peers are measured"));
    }
    Some((towline, labels))
}

fn cancel() -> Cancel {
    Cancel::new().expect("a descriptor is left")
}

/// Returns the rows with these labels that have no figure, with the reason.
fn missing<'t>(tables: &'t [Table], labels: &'t [&str]) -> Vec<String> {
    let rows = tables.iter().flat_map(|table| &table.rows);
    rows.filter(|row| labels.contains(&row.label.as_str()))
        .filter_map(|row| match &row.content {
            Content::Missing(reason) => Some(format!("{}: {}: {reason}", row.group, row.label)),
            Content::Measured { .. } => None,
        })
        .collect()
}

#[test]
fn vsock_is_measured_beside_its_limit() {
    let name = "vsock_is_measured_beside_its_limit";
    let Some((towline, mut labels)) = towline(name, "vsock", &["Unix socket"]) else { return };
    let peer = std::env::var_os("TOWLINE_PEER_VSOCK").map(PathBuf::from);
    labels.extend(peer.iter().map(|_| vsock::PEER));
    let parameters = vsock::Parameters {
        sizes: vec![64, 64 << 10],
        connections: vec![2],
        window: WINDOW,
        ..vsock::Parameters::of(&towline, peer, 1, cancel())
    };
    let tables = vsock::measure(&parameters).unwrap();
    tables.iter().for_each(|table| println!("{table}"));
    let names: Vec<_> = tables.iter().map(|table| table.name).collect();
    assert_eq!(
        names,
        ["vsock-series", "vsock-to-guest", "vsock-from-guest", "vsock-requests", "vsock-goals"]
    );
    assert_eq!(missing(&tables, &labels), [""; 0]);
}

#[test]
fn a_nic_is_measured_beside_its_limits() {
    let name = "a_nic_is_measured_beside_its_limits";
    let limits = ["the tap itself", "veth pair"];
    let Some((towline, labels)) = towline(name, "net", &limits) else { return };
    if let Err(error) = towline_lab::Network::new() {
        return skip(name, &format!("{error:#}"));
    }
    let parameters = net::Parameters {
        stream_sizes: vec![64 << 10],
        window: WINDOW,
        testpmd: std::env::var_os("TOWLINE_PEER_TESTPMD").map(PathBuf::from),
        ..net::Parameters::of(&towline, 1, cancel())
    };
    let tables = net::measure(&parameters).unwrap();
    tables.iter().for_each(|table| println!("{table}"));
    let names: Vec<_> = tables.iter().map(|table| table.name).collect();
    assert_eq!(names, ["net-series", "net-frames", "net-streams", "net-requests", "net-goals"]);
    assert_eq!(missing(&tables, &labels), [""; 0]);
}

#[test]
fn a_sandbox_is_measured_beside_none() {
    let name = "a_sandbox_is_measured_beside_none";
    let Some((towline, _)) = towline(name, "copy", &[]) else { return };
    if let Err(error) = towline_lab::Network::new() {
        return skip(name, &format!("{error:#}"));
    }
    let parameters = sandbox::Parameters {
        window: WINDOW,
        memory_mib: 64,
        ..sandbox::Parameters::of(&towline, 1, cancel())
    };
    let tables = sandbox::measure(&parameters).unwrap();
    tables.iter().for_each(|table| println!("{table}"));
    assert_eq!(tables[0].rows.len(), 6);
    assert_eq!(missing(&tables, &["--sandbox none", "--sandbox on"]), [""; 0]);
}
