//! Two hosts, each a network namespace with a towline: all traffic between them goes over their one link.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{
    BootSector, Builder, LinuxGuest, Network, Qemu, Towline, Version, is_asleep, require_lab, signal, skip,
    wait_until,
};

use crate::support::{
    MIB, WITHIN, assert_ended, linux, prove_alive, qmp, run, small, wait_event, waiting, writing,
};

const RATE: u64 = 20_000_000;
const RANGE: u64 = 24 * MIB;
const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];
const PORT: u16 = 4444;

/// Two networks connected by a veth pair.
struct Hosts([Network; 2]);

impl Hosts {
    fn new() -> Result<Self> {
        Ok(Self(Network::pair(ADDRESSES)?))
    }

    /// Cuts the link: what is sent is lost, and neither end notices.
    fn cut(&self) {
        for (network, address) in self.0.iter().zip([ADDRESSES[1], ADDRESSES[0]]) {
            let absent = ["lladdr", "02:00:00:00:00:01", "dev", "link0", "nud", "permanent"];
            network.run(&[&["ip", "neighbor", "replace", address][..], &absent].concat()).unwrap();
        }
    }

    /// Starts a towline on one of them, with space-separated arguments.
    fn towline(&self, host: usize, arguments: &str) -> Result<Towline> {
        Towline::start_after(&self.0[host].prefix(), &arguments.split(' ').collect::<Vec<_>>())
    }
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
    // The last one takes several heartbeats.
    for options in
        ["--multifd-channels 4", "--multifd-channels 0", "--multifd-channels 4 --max-bandwidth 40M"]
    {
        let destination = waiting(&builder);
        let options = format!("copy {options}");
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

/// Silence after which the ends of these tests give up.
const PEER_TIMEOUT: Duration = Duration::from_secs(3);
/// The peer's last sign is a heartbeat of 1 s old at most when it is cut off or stopped, and as much older as a loaded
/// machine sends heartbeats late.
const ENDS_AFTER: Duration = Duration::from_secs(1);
/// Attempts at the moment between the last byte and the acknowledgement.
const TRIES: usize = 40;
/// A source that has sent nothing for this time has sent everything, if all of it arrived and no process waits for a
/// processor.
const QUIET: Duration = Duration::from_millis(300);
/// The kernel runs its timers, and the ends undo what they did.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

/// A copy from host to host.
struct Copying {
    hosts: Hosts,
    source: Qemu,
    destination: Qemu,
    here: Towline,
    there: Towline,
}

impl Copying {
    fn start(builder: &Builder, options: &str) -> Result<Self> {
        let hosts = Hosts::new()?;
        let (source, destination) = (builder.clone().start()?, waiting(builder));
        source.wait_counting(WITHIN)?;
        let options = format!("copy --json --peer-timeout {} {options}", PEER_TIMEOUT.as_secs());
        let mut there = hosts.towline(1, &format!("{options} tcp:0.0.0.0:{PORT} {}", qmp(&destination)))?;
        wait_event(&mut there, "a towline that listens", |event| {
            event["text"].as_str().is_some_and(|text| text.contains("listening on"))
        });
        let here = hosts.towline(0, &format!("{options} {} tcp:{}:{PORT}", qmp(&source), ADDRESSES[1]))?;
        Ok(Self { hosts, source, destination, here, there })
    }

    /// Both ends notice the cut, and the guest runs on at its source only. Returns the source's error.
    fn assert_undone(self, cut_at: Instant, exit_there: i32) -> String {
        let (here, there) = (self.here.wait(WITHIN).unwrap(), self.there.wait(WITHIN).unwrap());
        let took = cut_at.elapsed();
        println!("both ends ended {took:?} after the cut: {} / {}", here.stderr.trim(), there.stderr.trim());
        assert!(took >= ENDS_AFTER && took <= ENDS_WITHIN, "{took:?}: {} {}", here.stderr, there.stderr);
        let exits = (here.status.code(), there.status.code());
        assert_eq!(exits, (Some(1), Some(exit_there)), "{} / {}", here.stderr, there.stderr);
        assert!(!here.stderr.contains("multifd-channels"), "a false cause: {}", here.stderr);
        self.source.qmp().wait_status("running", WITHIN).unwrap();
        self.source.wait_counting(WITHIN).unwrap();
        assert_ne!(self.destination.qmp().status().unwrap(), "running");
        here.stderr
    }
}

#[test]
fn a_link_that_is_cut_in_mid_transfer_ends_both_ends() {
    let name = "a_link_that_is_cut_in_mid_transfer_ends_both_ends";
    if !require_lab(name) {
        return;
    }
    for lanes in [0, 4] {
        let options = format!("--multifd-channels {lanes} --max-bandwidth 2M");
        let mut copying = match Copying::start(&small(), &options) {
            Ok(copying) => copying,
            Err(error) => return skip(name, &format!("no network namespaces can be made here: {error:#}")),
        };
        wait_event(&mut copying.here, "a MiB that moved", |event| {
            event["ram"]["transferred"].as_u64() >= Some(MIB)
        });
        copying.hosts.cut();
        copying.assert_undone(Instant::now(), 1);
    }
}

/// The acknowledgement is sent and lost: the destination holds a whole guest, and does not know whether the
/// source has it too.
#[test]
fn a_link_that_is_cut_at_the_acknowledgement_leaves_the_guest_at_its_source() {
    let name = "a_link_that_is_cut_at_the_acknowledgement_leaves_the_guest_at_its_source";
    if !require_lab(name) {
        return;
    }
    let Some(copying) = sent_and_not_loaded(name) else { return };
    copying.hosts.cut();
    let cut_at = Instant::now();
    signal(copying.destination.pid(), Signal::CONT);
    copying.assert_undone(cut_at, 3);
}

/// Starts a copy and stops it where the source has sent everything, and the destination's QEMU cannot load it
/// yet.
fn sent_and_not_loaded(name: &str) -> Option<Copying> {
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 8, ..BootSector::default() };
    let builder = Qemu::builder(Version::V10_0).memory_mib(32).boot_sector(boot_sector);
    for _ in 0..TRIES {
        let copying = match Copying::start(&builder, "--multifd-channels 0") {
            Ok(copying) => copying,
            Err(error) => {
                skip(name, &format!("no network namespaces can be made here: {error:#}"));
                return None;
            }
        };
        // So that this thread does not wait for a processor behind others, for the moment is short.
        rustix::process::nice(-20).unwrap();
        copying.source.qmp().wait_event("STOP", WITHIN).unwrap();
        signal(copying.destination.pid(), Signal::STOP);
        if is_sent(&copying) {
            return Some(copying);
        }
        signal(copying.destination.pid(), Signal::CONT);
    }
    panic!("the destination was quicker {TRIES} times");
}

/// Its host's kernel acknowledges everything, so only its heartbeats show that it is at work.
#[test]
fn a_stopped_towline_at_the_destination_leaves_the_guest_at_its_source() {
    let name = "a_stopped_towline_at_the_destination_leaves_the_guest_at_its_source";
    if !require_lab(name) {
        return;
    }
    let Some(copying) = sent_and_not_loaded(name) else { return };
    let Copying { source, destination, here, there, .. } = &copying;
    let stopped_at = Instant::now();
    signal(there.pid(), Signal::STOP);
    source.qmp().wait_status("running", ENDS_WITHIN).unwrap();
    let took = stopped_at.elapsed();
    assert!(took >= ENDS_AFTER && took <= ENDS_WITHIN, "{took:?}: {}", here.stderr());
    signal(there.pid(), Signal::CONT);
    signal(destination.pid(), Signal::CONT);
    let said = copying.assert_undone(stopped_at, 1);
    assert!(said.contains("sent no heartbeat for"), "{said}");
}

#[test]
fn a_stopped_towline_at_the_source_does_not_hold_the_destination() {
    let name = "a_stopped_towline_at_the_source_does_not_hold_the_destination";
    if !require_lab(name) {
        return;
    }
    let Some(Copying { source, destination, here, there, hosts: _hosts }) = sent_and_not_loaded(name) else {
        return;
    };
    signal(here.pid(), Signal::STOP);
    let stopped_at = Instant::now();
    signal(destination.pid(), Signal::CONT);
    let there = there.wait(WITHIN).unwrap();
    let took = stopped_at.elapsed();
    assert!(took >= ENDS_AFTER && took <= ENDS_WITHIN, "{took:?}: {}", there.stderr);
    assert_ended(&there, 3, &["did not report within 3."]);
    signal(here.pid(), Signal::CONT);
    assert_ended(&here.wait(WITHIN).unwrap(), 3, &[]);
    let running = [&source, &destination].map(|qemu| qemu.qmp().status().unwrap() == "running");
    assert_eq!(running, [false, false]);
}

/// Waits until the source has sent all. False if it was acknowledged, or waits for the stopped destination to read.
fn is_sent(copying: &Copying) -> bool {
    let Copying { source, here, there, .. } = copying;
    let mut last = (None, Instant::now());
    wait_until("a source that has sent everything", WITHIN, || {
        let sent = source.qmp().execute("query-migrate", Value::Null)?["ram"]["transferred"].as_u64();
        if sent != last.0 {
            last = (sent, Instant::now());
        }
        let status = source.qmp().status()?;
        let is_quiet = last.1.elapsed() >= QUIET && status == "finish-migrate";
        let all_sleep = is_quiet && [source.pid(), here.pid(), there.pid()].into_iter().all(is_asleep);
        let has_arrived = unacknowledged_bytes(here)? == 0;
        let waits_to_send = all_sleep && !has_arrived && last.1.elapsed() >= 10 * QUIET;
        let has_failed = status == "postmigrate" || waits_to_send;
        Ok(if has_failed { Some(false) } else { (all_sleep && has_arrived).then_some(true) })
    })
    .unwrap()
}

/// Bytes that the source's towline has sent, and the kernel of the destination's host has not acknowledged.
fn unacknowledged_bytes(here: &Towline) -> Result<u64> {
    let sockets = std::fs::read_to_string(format!("/proc/{}/net/tcp", here.pid()))?;
    let queues = sockets.lines().skip(1).filter_map(|socket| socket.split_whitespace().nth(4));
    queues
        .map(|queue| Ok(u64::from_str_radix(queue.split_once(':').context("tx_queue:rx_queue")?.0, 16)?))
        .sum()
}

#[test]
fn a_listener_gives_up_after_its_time() {
    if !require_lab("a_listener_gives_up_after_its_time") {
        return;
    }
    let destination = waiting(&small());
    let finished = run(&format!("copy --accept-timeout 0.5 tcp:127.0.0.1:0 {}", qmp(&destination)));
    assert_ended(&finished, 1, &["accept a main channel on tcp:127.0.0.1:", "nothing happened within 0."]);
    assert_eq!(destination.qmp().status().unwrap(), "inmigrate");
}
