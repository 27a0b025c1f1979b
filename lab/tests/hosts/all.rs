//! A host that is emptied.

use towline_lab::LinuxGuest;
use towline_lab::expect::{assert_ended, completed, events, qmp};

use crate::support::{Hosts, WITHIN, WRITTEN, last};

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
    let client = hosts.there.client();
    let all = ["move", "--all", "ssh:other", "--ssh", &client, "--parallel", "2", "--max-bandwidth", "64M"];
    let moved = hosts.with_guests(&here, &[&all[..], &["--json"]].concat(), "there.");
    let event = last(&moved);
    let told = (&event["event"], &event["completed"], &event["failed"], &event["exit"]);
    assert_eq!(told, (&"all".into(), &2.into(), &1.into(), &1.into()), "{}{}", moved.stdout, moved.stderr);
    let failed = events(&moved.stdout).into_iter().find(|event| event["event"] == "failed").unwrap();
    assert_eq!(failed["destination"], "ssh:other/web-1", "{failed}");
    assert!(failed["error"].as_str().unwrap().contains("name web-1 is taken"), "{failed}");
    assert_eq!(hosts.there.guests().unwrap(), NAMES);
    for (agents, name) in [("there.", "web-0"), ("here.", "web-1"), ("there.", "web-2")] {
        let mut guest = LinuxGuest::connect_at(&hosts.place.path(&format!("{agents}{name}.agent"))).unwrap();
        guest.wait_ready(WITHIN).unwrap();
        guest.wait_ticking(WITHIN).unwrap();
        assert_eq!(guest.check().unwrap(), WRITTEN / 4096, "{name}");
    }
    // The same command continues with those that are still here.
    hosts.there.monitor("web-1", WITHIN).unwrap().execute("quit", serde_json::Value::Null).unwrap();
    hosts.wait_for_guests_there(&["web-0", "web-2"]);
    let moved = hosts.with_guests(&here, &all, "there.");
    assert_ended(&moved, 0, &[]);
    let lines: Vec<_> = moved.stdout.lines().collect();
    assert!(lines.iter().any(|line| line.starts_with("web-1") && line.contains(" moved ")), "{lines:?}");
    assert_eq!(lines.last(), Some(&"1 of 1 guests moved to ssh:other"), "{lines:?}");
    assert_eq!(hosts.there.guests().unwrap(), NAMES);
}
