//! A host that is emptied.

use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::expect::{assert_ended, completed, events, number, qmp};

use crate::support::{Hosts, MIB, WITHIN, WRITTEN, last};

/// Rate of the link that guests share, for `tc` and in bytes per second.
const LINK: (&str, u64) = ("1gbit", 125_000_000);
/// Rate at which the busiest guest writes.
const RATE_MAX: u64 = 20_000_000;
const NAMES: [&str; 3] = ["web-0", "web-1", "web-2"];

#[test]
fn every_guest_of_a_host_goes_to_another_one() {
    let Some(hosts) = Hosts::new("every_guest_of_a_host_goes_to_another_one") else { return };
    let image = hosts.place.path("web.img").display().to_string();
    completed(&hosts.towline(&["copy", "--json", &qmp(&hosts.source), &image]).wait(WITHIN).unwrap());
    let here = hosts.with_own_guests();
    let clones = ["run", &image, "--name", "web", "--count", "3", "--detach", "--overlay"];
    assert_ended(&hosts.with_guests(&here, &clones, "here."), 0, &[]);
    // Another guest of this name runs there.
    let taken = ["run", &image, "--name", "web-1", "--detach", "--overlay"];
    let elsewhere = ["--overlay-dir", "/run"];
    assert_ended(
        &hosts.with_guests(&hosts.there.prefix(), &[&taken[..], &elsewhere].concat(), "other."),
        0,
        &[],
    );
    // As another version would write it.
    let state = hosts.place.path("towline/guests/web-2/state.json");
    let readable = std::fs::read_to_string(&state).unwrap();
    std::fs::write(&state, readable.replacen("\"version\":1", "\"version\":2", 1)).unwrap();
    let client = hosts.there.client();
    let all = ["move", "--all", "ssh:other", "--ssh", &client, "--parallel", "2", "--max-bandwidth", "64M"];
    let moved = hosts.with_guests(&here, &[&all[..], &["--json"]].concat(), "there.");
    let event = last(&moved);
    let reported = (&event["event"], &event["completed"], &event["failed"], &event["exit"]);
    assert_eq!(
        reported,
        (&"all".into(), &1.into(), &2.into(), &1.into()),
        "{}{}",
        moved.stdout,
        moved.stderr
    );
    let failed: Vec<_> =
        events(&moved.stdout).into_iter().filter(|event| event["event"] == "failed").collect();
    let [unreadable, taken] = &failed[..] else { panic!("{failed:?}") };
    assert_eq!(taken["destination"], "ssh:other/web-1", "{taken}");
    assert!(taken["error"].as_str().unwrap().contains("name web-1 is taken"), "{taken}");
    assert_eq!(unreadable["path"], state.display().to_string(), "{unreadable}");
    assert_eq!(hosts.there.guests().unwrap(), NAMES[..2]);
    std::fs::write(&state, readable).unwrap();
    for (agents, name) in [("there.", "web-0"), ("here.", "web-1"), ("here.", "web-2")] {
        let mut guest = hosts.agent(&format!("{agents}{name}.agent"));
        guest.wait_ticking(WITHIN).unwrap();
        assert_eq!(guest.check().unwrap(), WRITTEN / 4096, "{name}");
    }
    // The same command continues with those that are still here.
    hosts.there.monitor("web-1", WITHIN).unwrap().execute("quit", serde_json::Value::Null).unwrap();
    hosts.wait_for_guests_there(&["web-0"]);
    let moved = hosts.with_guests(&here, &all, "there.");
    assert_ended(&moved, 0, &[]);
    let lines: Vec<_> = moved.stdout.lines().collect();
    for name in &NAMES[1..] {
        assert!(lines.iter().any(|line| line.starts_with(name) && line.contains(" moved ")), "{lines:?}");
    }
    assert_eq!(lines.last(), Some(&"2 of 2 guests moved to ssh:other"), "{lines:?}");
    assert_eq!(hosts.there.guests().unwrap(), NAMES);
}

/// Moves this number of guests, and prints how long that took. Without `parallel`, each is moved by its own command.
fn emptied(hosts: &Hosts, image: &str, count: u64, parallel: Option<&str>) {
    let here = hosts.with_own_guests();
    let client = hosts.there.client();
    let number = count.to_string();
    let start = ["run", image, "--name", "many", "--count", &number, "--detach", "--overlay"];
    assert_ended(&hosts.with_guests(&here, &start, "here."), 0, &[]);
    let names: Vec<String> = (0..count).map(|n| format!("many-{n}")).collect();
    for (n, name) in (0_u64..).zip(&names) {
        let mut guest = hosts.agent(&format!("here.{name}.agent"));
        guest.stop_dirtying().unwrap();
        if n > 0 {
            guest.dirty(RATE_MAX * n / count, WRITTEN).unwrap();
        }
    }
    let (begun, before) = (Instant::now(), hosts.sent());
    match parallel {
        Some(parallel) => {
            let all = ["move", "--all", "ssh:other", "--ssh", &client, "--parallel", parallel];
            assert_ended(&hosts.with_guests(&here, &all, "there."), 0, &[]);
        }
        None => {
            for name in &names {
                let monitor = hosts.place.path(&format!("towline/guests/{name}/qmp.sock"));
                let (source, place) = (format!("qmp:{}", monitor.display()), format!("ssh:other/{name}"));
                let one = ["move", &source, &place, "--ssh", &client];
                assert_ended(&hosts.with_guests(&here, &one, "there."), 0, &[]);
            }
        }
    }
    let (took, sent) = (begun.elapsed(), hosts.sent() - before);
    let least = Duration::from_secs_f64(sent as f64 / LINK.1 as f64);
    println!(
        "{count} guests, {}: {:.1} s, {} MiB, {:.2} times bytes by bandwidth",
        parallel.map_or("one by one".to_owned(), |parallel| format!("{parallel} at a time")),
        took.as_secs_f64(),
        sent / MIB,
        took.as_secs_f64() / least.as_secs_f64()
    );
    for name in &names {
        let mut guest = hosts.agent(&format!("there.{name}.agent"));
        guest.wait_ticking(WITHIN).unwrap();
        hosts.there.monitor(name, WITHIN).unwrap().execute("quit", Value::Null).unwrap();
    }
    hosts.wait_for_guests_there(&[]);
    for name in &names {
        std::fs::remove_file(hosts.place.path(&format!("{name}.disk0.qcow2"))).unwrap();
    }
}

/// `cargo xtask soak host-emptied` has twelve of them.
#[test]
#[ignore = "nightly"]
fn guests_of_a_host_share_its_link() {
    let Some(hosts) = Hosts::new("guests_of_a_host_share_its_link") else { return };
    let image = hosts.place.path("many.img").display().to_string();
    completed(&hosts.towline(&["copy", "--json", &qmp(&hosts.source), &image]).wait(WITHIN).unwrap());
    hosts.source.kill().unwrap();
    hosts.limit(LINK.0);
    let count = number("TOWLINE_SOAK_HOST_GUESTS", 2);
    for parallel in [None, Some("2"), Some("4")].into_iter().take(if count > 2 { 3 } else { 2 }) {
        emptied(&hosts, &image, count, parallel);
    }
}
