//! A guest goes to a QEMU that waits on another host, over a link of 1 Gbit/s, by each way of `move`, and by QEMU's own commands, as an
//! operator would enter them. They take turns; `TOWLINE_SOAK_WAYS` is the number of rounds.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use towline_lab::expect::{completed, number, qmp};
use towline_lab::{Qemu, Qmp};

use crate::support::{Hosts, MIB, WITHIN, with_disk};

/// Random bytes in the guest's 1 GiB, which are sent once; bytes that it writes each second, and the size of the range that it writes
/// round and round.
const CONTENT: u64 = 800 * MIB;
const RATE: u64 = 4 * MIB;
const RANGE: u64 = 16 * MIB;
const ADDRESS: &str = "10.213.78.2";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Towline(&'static [&'static str]),
    Qemu { is_encrypted: bool },
}

const WAYS: [(&str, Way); 5] = [
    ("relay, TLS", Way::Towline(&["--via", "relay"])),
    ("direct, TLS", Way::Towline(&["--via", "direct"])),
    ("QEMU, TLS", Way::Qemu { is_encrypted: true }),
    ("direct, zero-copy", Way::Towline(&["--via", "direct", "--zero-copy-send", "on"])),
    ("QEMU, zero-copy", Way::Qemu { is_encrypted: false }),
];

/// Figures of one move.
#[derive(Debug, Clone, Copy)]
struct Figures {
    total_ms: u64,
    downtime_ms: u64,
    sent: u64,
    /// Of the whole machine, both hosts and both guests.
    busy_ms: u64,
}

#[test]
#[ignore = "nightly"]
fn a_guest_goes_to_another_host_by_each_way() {
    let Some(hosts) = Hosts::new("a_guest_goes_to_another_host_by_each_way") else { return };
    hosts.source.kill().unwrap();
    hosts.limit("1gbit");
    fs::write(hosts.place.path("keys.psk"), format!("qemu:{}\n", "5a".repeat(32))).unwrap();
    let mut all: [Vec<Figures>; WAYS.len()] = Default::default();
    for round in 0..number("TOWLINE_SOAK_WAYS", 1) {
        for turn in 0..WAYS.len() {
            let index = (turn + usize::try_from(round).unwrap()) % WAYS.len();
            let (name, way) = WAYS[index];
            let found = moved(&hosts, way);
            println!("{name}: {found:?}");
            all[index].push(found);
        }
    }
    for ((name, _), figures) in WAYS.iter().zip(&all) {
        let median = |of: fn(&Figures) -> u64| {
            let mut values: Vec<_> = figures.iter().map(of).collect();
            values.sort_unstable();
            (values[0], values[values.len() / 2], values[values.len() - 1])
        };
        println!(
            "{name}: least, median, most of total {:?} ms, downtime {:?} ms, sent {:?}, processors {:?} ms",
            median(|one| one.total_ms),
            median(|one| one.downtime_ms),
            median(|one| one.sent),
            median(|one| one.busy_ms)
        );
    }
}

fn moved(hosts: &Hosts, way: Way) -> Figures {
    let disk = hosts.place.path("disk.raw");
    let builder = with_disk(&disk).memory_mib(1024);
    let (source, mut guest) = builder.clone().within(hosts.network()).boot(WITHIN).unwrap();
    guest.fill(CONTENT, 1).unwrap();
    guest.dirty(RATE, RANGE).unwrap();
    let tick = guest.wait_ticking(WITHIN).unwrap();
    drop(guest);
    let waiting = builder.within(hosts.there.network()).incoming_defer().start().unwrap();
    let (sent, busy, begun) = (hosts.sent(), busy_ms(), Instant::now());
    let downtime_ms = match way {
        Way::Towline(options) => by_towline(hosts, &source, &waiting, options),
        Way::Qemu { is_encrypted } => {
            let keys = hosts.place.path("");
            by_qemu(&source, &waiting, is_encrypted.then_some(keys.as_ref()))
        }
    };
    let total_ms = u64::try_from(begun.elapsed().as_millis()).unwrap();
    let figures = Figures { total_ms, downtime_ms, sent: hosts.sent() - sent, busy_ms: busy_ms() - busy };
    assert!(waiting.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap() > tick);
    figures
}

fn by_towline(hosts: &Hosts, source: &Qemu, waiting: &Qemu, options: &[&str]) -> u64 {
    let (source, place, client) = (qmp(source), format!("ssh:other/{}", qmp(waiting)), hosts.there.client());
    let words = [&["move", &source, &place, "--ssh", &client, "--json"][..], options].concat();
    let moved = completed(&hosts.towline(&words).wait(WITHIN).unwrap());
    moved["downtime"].as_u64().unwrap()
}

/// Time for which the processors of this machine have worked, in milliseconds.
fn busy_ms() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let fields = stat.lines().next().unwrap().split_whitespace().skip(1);
    let times: Vec<u64> = fields.map(|field| field.parse().unwrap()).collect();
    // All but idle and waiting for a disk, in ticks of 10 ms.
    times.iter().enumerate().filter(|(n, _)| !matches!(n, 3 | 4)).map(|(_, ticks)| ticks * 10).sum()
}

/// With four lanes, and TLS by the key in this directory or zero-copy sends.
fn by_qemu(source: &Qemu, waiting: &Qemu, keys: Option<&Path>) -> u64 {
    let (here, there) = (source.qmp(), waiting.qmp());
    let execute = |monitor: &Qmp, command: &str, arguments: Value| {
        monitor.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error:#}"))
    };
    for (monitor, end) in [(here, "client"), (there, "server")] {
        let mut capabilities = vec!["multifd", "events", "return-path"];
        let mut parameters = json!({ "multifd-channels": 4, "max-bandwidth": 1_u64 << 40 });
        match keys {
            Some(keys) => {
                let tls = json!({ "qom-type": "tls-creds-psk", "id": "tls", "dir": keys, "endpoint": end });
                execute(monitor, "object-add", tls);
                parameters["tls-creds"] = "tls".into();
            }
            None if end == "client" => capabilities.push("zero-copy-send"),
            None => {}
        }
        let on: Vec<_> =
            capabilities.iter().map(|name| json!({ "capability": name, "state": true })).collect();
        execute(monitor, "migrate-set-capabilities", json!({ "capabilities": on }));
        execute(monitor, "migrate-set-parameters", parameters);
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let uri = format!("tcp:{ADDRESS}:{port}");
    execute(there, "migrate-incoming", json!({ "uri": uri }));
    execute(here, "migrate", json!({ "uri": uri }));
    let migration = here.wait_migration("completed", WITHIN).unwrap();
    there.wait_status("running", WITHIN).unwrap();
    migration["downtime"].as_u64().unwrap()
}
