//! Two hosts, each a network namespace with a towline: all traffic between them goes over their one link.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use towline_lab::{LinuxGuest, Qemu, Towline, require_lab, skip, towline_binary, wait_until};

use crate::support::{MIB, WITHIN, assert_ended, linux, prove_alive, qmp, waiting, writing};

const RATE: u64 = 20_000_000;
const RANGE: u64 = 24 * MIB;
const IP: &str = "/usr/sbin/ip";
const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];
const PORT: u16 = 4444;

/// Two network namespaces connected by a veth pair. Dropping it removes both, and the link with them.
struct Hosts {
    names: [String; 2],
}

impl Hosts {
    fn new() -> Result<Self> {
        let pid = std::process::id();
        let hosts = Self { names: ["a", "b"].map(|host| format!("towline-{pid}-{host}")) };
        for name in &hosts.names {
            ip(&["netns", "add", name])?;
        }
        let [a, b] = &hosts.names;
        // Created within the first, so that no interface name of the machine is in the way.
        let link = ["link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", b];
        ip(&[&["-n", a][..], &link].concat())?;
        for (name, address) in hosts.names.iter().zip(ADDRESSES) {
            ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", "link0"])?;
            ip(&["-n", name, "link", "set", "link0", "up"])?;
        }
        Ok(hosts)
    }

    /// Starts a towline on one of them, with space-separated arguments.
    fn towline(&self, host: usize, arguments: &str) -> Result<Towline> {
        let binary = towline_binary()?.display().to_string();
        let line = ["netns", "exec", &self.names[host], &binary];
        Towline::start(IP.as_ref(), line.into_iter().chain(arguments.split(' ')))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // It may not exist, and a destructor cannot return an error.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new(IP).args(arguments).output().with_context(|| format!("{IP} cannot be run"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), text.trim());
    Ok(())
}

/// Asserts that memory is equal to the byte while both are stopped, and that the guest then runs on at the
/// destination.
fn prove(source: &Qemu, destination: &Qemu, tick: u64) {
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    assert_eq!(destination.qmp().status().unwrap(), "paused");
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    destination.qmp().execute("cont", Value::Null).unwrap();
    prove_alive(destination, RANGE, tick);
}

fn tick(mut guest: LinuxGuest) -> u64 {
    guest.tick().unwrap()
}

#[test]
fn from_host_to_host_by_a_towline_on_each() {
    let name = "from_host_to_host_by_a_towline_on_each";
    if !require_lab(name) {
        return;
    }
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(error) => return skip(name, &format!("no network namespaces can be made here: {error:#}")),
    };
    let builder = linux(256);
    let (source, guest) = writing(&builder, RATE, RANGE);
    let tick = tick(guest);
    for lanes in [4, 0] {
        let destination = waiting(&builder);
        let options = format!("copy --multifd-channels {lanes}");
        let there = format!("{options} --paused tcp:0.0.0.0:{PORT} {}", qmp(&destination));
        let mut there = hosts.towline(1, &there).unwrap();
        wait_until("a towline that listens", WITHIN, || {
            assert!(there.runs()?, "it ended: {}", there.stderr());
            Ok(there.stderr().contains("listening on").then_some(()))
        })
        .unwrap();
        let here = format!("{options} {} tcp:{}:{PORT}", qmp(&source), ADDRESSES[1]);
        let here = hosts.towline(0, &here).unwrap();
        assert_ended(&here.wait(WITHIN).unwrap(), 0, &[]);
        assert_ended(&there.wait(WITHIN).unwrap(), 0, &[]);
        prove(&source, &destination, tick);
        // For the next round, from where it was left.
        destination.kill().unwrap();
        source.qmp().execute("cont", Value::Null).unwrap();
    }
}
