//! Moves, copies and checks that succeed, or are refused before anything changes.

use std::fs;

use rustix::process::Signal;

use towline_lab::expect::{assert_ended, completed, qmp};
use towline_lab::{signal, towline};

use crate::support::{Hosts, WITHIN, last, with_disk};

#[test]
fn a_guest_continues_on_another_host_in_a_qemu_that_is_started_there() {
    let Some(mut hosts) = Hosts::new("a_guest_continues_on_another_host_in_a_qemu_that_is_started_there")
    else {
        return;
    };
    let start = hosts.start_options();
    let start: Vec<&str> = start.iter().map(String::as_str).collect();
    // A check starts a QEMU there, and leaves none.
    let checked = hosts.run("check", "/web", &[&start[..], &["--json"]].concat());
    assert_ended(&checked, 0, &[]);
    assert_eq!(last(&checked)["verdict"], "yes-with-notes", "{}", checked.stdout);
    hosts.assert_stays();
    let tick = hosts.last_tick();
    let moved = hosts.run("move", "/web", &[&start[..], &["--json"]].concat());
    let event = completed(&moved);
    assert_eq!(
        (&event["destination"], &event["multifd-channels"]),
        (&"ssh:other/web".into(), &4.into()),
        "{event}"
    );
    hosts.source.wait_exit(WITHIN).unwrap();
    assert_eq!(hosts.there.guests().unwrap(), ["web"]);
    hosts.assert_continues_there("web", tick);
    // Its QEMU ends as any other does.
    let state = fs::read(hosts.there.path("/run/towline/guests/web/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    signal(u32::try_from(state["pid"].as_u64().unwrap()).unwrap(), Signal::TERM);
    hosts.wait_for_guests_there(&[]);
}

#[test]
fn a_guest_continues_in_a_qemu_that_waits_on_another_host() {
    let Some(mut hosts) = Hosts::new("a_guest_continues_in_a_qemu_that_waits_on_another_host") else {
        return;
    };
    let disk = hosts.place.path("disk.raw");
    let waiting = with_disk(&disk).incoming_defer().start().unwrap();
    let place = format!("/{}", qmp(&waiting));
    let tick = hosts.last_tick();
    let options = ["--multifd-channels", "2", "--compression", "zstd", "--json"];
    completed(&hosts.run("move", &place, &options));
    hosts.source.wait_exit(WITHIN).unwrap();
    waiting.qmp().wait_status("running", WITHIN).unwrap();
    assert!(waiting.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap() > tick);
}

#[test]
fn a_guest_is_stored_on_another_host() {
    let Some(hosts) = Hosts::new("a_guest_is_stored_on_another_host") else { return };
    let image = hosts.place.path("guest.img").display().to_string();
    let place = format!("/{image}");
    completed(&hosts.run("copy", &place, &["--json"]));
    hosts.source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    towline(["inspect", "--verify", &image]).unwrap().wait_done(WITHIN).unwrap();
    // It exists now.
    hosts.source.qmp().execute("cont", serde_json::Value::Null).unwrap();
    let refused = hosts.run("copy", &place, &[]);
    assert_ended(&refused, 1, &["exists"]);
    hosts.source.qmp().wait_status("running", WITHIN).unwrap();
    let refused = hosts.run("copy", "/qmp:/run/b.qmp", &[]);
    assert_ended(&refused, 2, &["would be a second guest", "towline move"]);
}

#[test]
fn what_cannot_run_there_is_refused_before_anything_changes() {
    let Some(mut hosts) = Hosts::new("what_cannot_run_there_is_refused_before_anything_changes") else {
        return;
    };
    let start = hosts.start_options();
    let start: Vec<&str> = start.iter().map(String::as_str).collect();
    // Another file of the disk's name, on storage that only that host has.
    let local = hosts.there.path("/run/disk.raw");
    fs::copy(hosts.place.path("disk.raw"), &local).unwrap();
    let elsewhere = [&start[..], &["--set", "drive.disk0.file=/run/disk.raw"]].concat();
    // By a file with the names of both hosts, too.
    let map = hosts.place.path("other.map");
    fs::write(&map, format!("# names\n{}=/run/disk.raw\n", hosts.place.path("disk.raw").display())).unwrap();
    let mapped = [&start[..], &["--map", map.to_str().unwrap()]].concat();
    for (command, code, options) in [("check", 1, &elsewhere), ("move", 1, &elsewhere), ("move", 1, &mapped)]
    {
        let refused = hosts.run(command, "/web", options);
        let text = format!("{}{}", refused.stdout, refused.stderr);
        assert!(
            refused.status.code() == Some(code) && text.contains("is another file there (/run/disk.raw)"),
            "{text}"
        );
        hosts.assert_stays();
    }
    // Without trust, an image's rules hold.
    let untrusted: Vec<_> = start.iter().copied().filter(|word| *word != "--trust-command-line").collect();
    let refused = hosts.run("move", "/web", &untrusted);
    assert_ended(&refused, 1, &["other: ", "kernel"]);
    hosts.assert_stays();
    // Names and hosts.
    for (place, options, texts) in [
        ("", &["--qemu", "qemu-missing"][..], &["other: ", "kernel"][..]),
        ("/qmp:/run/missing.qmp", &[], &["other: no QMP socket"]),
    ] {
        assert_ended(&hosts.run("move", place, options), 1, texts);
        hosts.assert_stays();
    }
    let source = qmp(&hosts.source);
    let unreachable = ["move", &source, "ssh:127.0.0.1:9/web", "--ssh", "ssh -o BatchMode=yes"];
    assert_ended(&hosts.towline(&unreachable).wait(WITHIN).unwrap(), 1, &["no connection to 127.0.0.1:9"]);
    fs::remove_file(hosts.there.programs().join("towline")).unwrap();
    assert_ended(&hosts.run("move", "/web", &start), 1, &["other has no towline"]);
    // An older one, which has no agent; a shell that greets its user.
    let program = hosts.there.programs().join("towline");
    for (script, text) in [
        ("echo \"error: unrecognized subcommand 'agent'\" >&2; exit 2", "towline on other is older"),
        ("echo Welcome; cat > /dev/null", "Welcome"),
    ] {
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert_ended(&hosts.run("move", "/web", &start), 1, &[text]);
    }
    hosts.assert_stays();
}
