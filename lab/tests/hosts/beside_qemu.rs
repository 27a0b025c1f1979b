//! A guest with its disk goes to a waiting QEMU by `move --with-disks`, and by QEMU's own commands, as an operator would enter them. The two
//! take turns; `TOWLINE_SOAK_DISK_MOVES` is the number of pairs.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_lab::expect::{completed, number, qmp};
use towline_lab::{Qemu, Qmp, Version, wait_until};

use crate::support::{Hosts, MIB, WITHIN, with_disk_of};

/// Content of the disk, of twice this size, and of the guest's memory that is written once.
const CONTENT: u64 = 256 * MIB;
/// Bytes of memory that the guest writes each second, and the range.
const RATE: u64 = 4 * MIB;
const RANGE: u64 = 32 * MIB;
/// Name of the key, the node, the job and the export.
const NAME: &str = "disk0";

/// Times of one move.
struct Times {
    total: Duration,
    downtime_ms: u64,
}

#[test]
#[ignore = "nightly"]
fn a_disk_and_memory_go_to_another_qemu() {
    let Some(hosts) = Hosts::new("a_disk_and_memory_go_to_another_qemu") else { return };
    hosts.source.kill().unwrap();
    let (here, there) = (hosts.place.path("here.raw"), hosts.place.path("there.raw"));
    fs::write(hosts.place.path("keys.psk"), format!("{NAME}:{}", "5a".repeat(32))).unwrap();
    let mut all: [Vec<Times>; 2] = [Vec::new(), Vec::new()];
    for pair in 0..number("TOWLINE_SOAK_DISK_MOVES", 1) {
        for turn in [pair % 2, (pair + 1) % 2] {
            make(&here, true);
            make(&there, false);
            let (source, mut guest) = with_disk_of(Version::V10_0, &here, "raw").boot(WITHIN).unwrap();
            guest.dirty(RATE, RANGE).unwrap();
            let tick = guest.wait_ticking(WITHIN).unwrap();
            drop(guest);
            let waiting = with_disk_of(Version::V10_0, &there, "raw").incoming_defer().start().unwrap();
            let begun = Instant::now();
            let downtime_ms = match turn {
                0 => by_towline(&hosts, &source, &waiting),
                _ => by_qemu(&source, &waiting, hosts.place.path("").as_path()),
            };
            let total = begun.elapsed();
            assert!(waiting.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap() > tick);
            waiting.kill().unwrap();
            // The guest wrote nothing to it.
            assert!(fs::read(&here).unwrap() == fs::read(&there).unwrap(), "the disks differ");
            let name = ["towline", "QEMU"][usize::try_from(turn).unwrap()];
            println!("{name}: {:.2} s, downtime {downtime_ms} ms", total.as_secs_f64());
            all[usize::try_from(turn).unwrap()].push(Times { total, downtime_ms });
        }
    }
    let [towline, qemu] = all.map(|times| {
        (median(&times, |one| one.total.as_millis()), median(&times, |one| u128::from(one.downtime_ms)))
    });
    println!(
        "medians: towline {towline:?} ms in all and stopped, QEMU {qemu:?}, ratio of times {:.2}",
        towline.0 as f64 / qemu.0 as f64
    );
}

fn median(times: &[Times], of: impl Fn(&Times) -> u128) -> u128 {
    let mut values: Vec<_> = times.iter().map(of).collect();
    values.sort_unstable();
    values[values.len() / 2]
}

/// A disk, with or without content.
fn make(path: &Path, has_content: bool) {
    let mut file = File::create(path).unwrap();
    if has_content {
        let mut block = vec![0; usize::try_from(MIB).unwrap()];
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..CONTENT / MIB {
            rng.fill(&mut block);
            file.write_all(&block).unwrap();
        }
    }
    file.set_len(2 * CONTENT).unwrap();
    file.sync_all().unwrap();
}

fn by_towline(hosts: &Hosts, source: &Qemu, waiting: &Qemu) -> u64 {
    let (source, place, client) = (qmp(source), format!("ssh:other/{}", qmp(waiting)), hosts.there.client());
    let words = ["move", &source, &place, "--ssh", &client, "--with-disks", "--json"];
    let moved = completed(&hosts.towline(&words).wait(WITHIN).unwrap());
    moved["downtime"].as_u64().unwrap()
}

/// The node that the guest's disk has.
fn node(monitor: &Qmp) -> Value {
    let drives = monitor.execute("query-block", Value::Null).unwrap();
    let drive = drives.as_array().unwrap().iter().find(|drive| drive["device"] == NAME).unwrap().clone();
    drive["inserted"]["node-name"].clone()
}

/// With TLS by a key, four lanes, and a mirror by NBD, which is ended before the switchover.
fn by_qemu(source: &Qemu, waiting: &Qemu, keys: &Path) -> u64 {
    let (here, there) = (source.qmp(), waiting.qmp());
    let execute = |monitor: &Qmp, command: &str, arguments: Value| {
        monitor.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error:#}"))
    };
    for (monitor, end) in [(here, "client"), (there, "server")] {
        let tls = json!({ "qom-type": "tls-creds-psk", "id": "tls", "dir": keys, "endpoint": end, "username": NAME });
        let mut tls = tls.as_object().unwrap().clone();
        if end == "server" {
            tls.remove("username");
        }
        execute(monitor, "object-add", tls.into());
        let capabilities = ["multifd", "events", "pause-before-switchover"]
            .map(|name| json!({ "capability": name, "state": true }));
        execute(monitor, "migrate-set-capabilities", json!({ "capabilities": capabilities }));
        execute(
            monitor,
            "migrate-set-parameters",
            json!({ "multifd-channels": 4, "max-bandwidth": 1_u64 << 40, "tls-creds": "tls" }),
        );
    }
    let ports = [(); 2].map(|()| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port().to_string()
    });
    let address = json!({ "type": "inet", "data": { "host": "127.0.0.1", "port": ports[0] } });
    execute(there, "nbd-server-start", json!({ "addr": address, "tls-creds": "tls" }));
    execute(
        there,
        "block-export-add",
        json!({ "type": "nbd", "id": NAME, "node-name": node(there), "name": NAME, "writable": true }),
    );
    let server = json!({ "type": "inet", "host": "127.0.0.1", "port": ports[0] });
    execute(
        here,
        "blockdev-add",
        json!({ "driver": "nbd", "node-name": "target", "server": server, "export": NAME, "tls-creds": "tls" }),
    );
    execute(
        here,
        "blockdev-mirror",
        json!({ "job-id": NAME, "device": node(here), "target": "target", "sync": "full", "copy-mode": "write-blocking" }),
    );
    here.wait_event("BLOCK_JOB_READY", WITHIN).unwrap();
    let uri = format!("tcp:127.0.0.1:{}", ports[1]);
    execute(there, "migrate-incoming", json!({ "uri": uri }));
    execute(here, "migrate", json!({ "uri": uri }));
    while here.wait_event("MIGRATION", WITHIN).unwrap()["data"]["status"] != "pre-switchover" {}
    execute(here, "block-job-cancel", json!({ "device": NAME }));
    here.wait_event("BLOCK_JOB_COMPLETED", WITHIN).unwrap();
    execute(here, "blockdev-del", json!({ "node-name": "target" }));
    execute(here, "migrate-continue", json!({ "state": "pre-switchover" }));
    here.wait_migration("completed", WITHIN).unwrap();
    wait_until("the guest", WITHIN, || Ok((there.status()? != "inmigrate").then_some(()))).unwrap();
    if there.status().unwrap() == "paused" {
        execute(there, "cont", Value::Null);
    }
    there.wait_status("running", WITHIN).unwrap();
    execute(there, "nbd-server-stop", Value::Null);
    let migration = here.execute("query-migrate", Value::Null).unwrap();
    source.kill().unwrap();
    migration["downtime"].as_u64().unwrap()
}
