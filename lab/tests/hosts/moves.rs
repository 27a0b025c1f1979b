//! Moves, copies and checks that succeed, or are refused before anything changes.

use std::fs;
use std::path::Path;

use rustix::process::Signal;

use towline_lab::expect::{assert_ended, completed, qmp, wait_event};
use towline_lab::{signal, towline};

use crate::support::{Hosts, MIB, WITHIN, assert_is_guest, last, with_disk};

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
    assert_hosts(&checked.stdout);
    hosts.assert_stays();
    let tick = hosts.last_tick();
    let moved = hosts.run("move", "/web", &[&start[..], &["--json"]].concat());
    let event = completed(&moved);
    assert_hosts(&moved.stdout);
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
fn an_image_of_another_host_is_copied_to_this_one() {
    let Some(mut hosts) = Hosts::new("an_image_of_another_host_is_copied_to_this_one") else { return };
    // Only that host has it.
    let (there, on_host) = ("/run/guest.img", "ssh:other//run/guest.img");
    let tick = hosts.last_tick();
    completed(&hosts.run("copy", &format!("/{there}"), &["--json"]));
    let client = hosts.there.client();
    let start = |from: &str, to: &str, options: &[&str]| {
        let words = ["copy", from, to, "--ssh", &client, "--json"].into_iter();
        hosts.towline(&words.chain(options.iter().copied()).collect::<Vec<_>>())
    };
    let copy = |from: &str, to: &str, options: &[&str]| start(from, to, options).wait(WITHIN).unwrap();
    let image = hosts.place.path("fetched.img").display().to_string();
    // Whatever ends while it is copied, there is no image; the next copy takes the rest over.
    let slow = ["--max-bandwidth", "4M", "--peer-timeout", "3"];
    for kill in ["user", "agent", "link", "towline"] {
        let mut copying = start(on_host, &image, &slow);
        wait_event(&mut copying, kill, WITHIN, |event| event["ram"]["transferred"].as_u64() >= Some(MIB));
        match kill {
            "user" => signal(copying.pid(), Signal::INT),
            "agent" => signal(hosts.there.agent().unwrap(), Signal::KILL),
            "link" => hosts.cut(),
            _ => signal(copying.pid(), Signal::KILL),
        }
        let ended = copying.wait(WITHIN).unwrap();
        if kill == "link" {
            hosts.mend();
        }
        if kill != "towline" {
            assert_ended(&ended, 1, &["in its image, which is as it was"]);
        }
        assert!(!Path::new(&image).exists(), "{kill}");
        assert_ended(&towline(["inspect", &image]).unwrap().wait(WITHIN).unwrap(), 1, &["fetched.img"]);
    }
    let fetched = completed(&copy(on_host, &image, &["--verify", "--compression", "zstd"]));
    assert_eq!(
        (&fetched["source"], &fetched["multifd-channels"], &fetched["destination-state"]),
        (&"ssh:other/file:/run/guest.img".into(), &4.into(), &"stored".into())
    );
    let inspected = towline(["inspect", "--verify", "--json", &image]).unwrap().wait_done(WITHIN).unwrap();
    assert!(inspected.stdout.contains("ssh:other/file:/run/guest.img"), "{}", inspected.stdout);
    // Into a store here, and from the same one there.
    let store = format!("store:{}/guest", hosts.place.path("images").display());
    completed(&copy(on_host, &store, &[]));
    let second = hosts.place.path("second.img").display().to_string();
    completed(&copy(&format!("ssh:other/{store}"), &second, &[]));
    let blocks = |image: &str| {
        let inspected = towline(["inspect", "--verify", "--json", image]).unwrap().wait_done(WITHIN).unwrap();
        last(&inspected)["blocks"].clone()
    };
    assert!(blocks(&image).is_array());
    assert_eq!(blocks(&image), blocks(&second));
    // What is refused.
    assert_ended(&copy(on_host, &image, &[]), 1, &["exists"]);
    assert_ended(&copy("ssh:other//run/missing.img", &second, &[]), 1, &["other: ", "missing.img"]);
    assert_ended(&copy("ssh:other/web", &second, &[]), 2, &["only an image there can be copied"]);
    assert_ended(&copy(on_host, "tcp:127.0.0.1:9", &[]), 2, &["copy it to a file first"]);
    let small = with_disk(&hosts.place.path("disk.raw")).memory_mib(128).incoming_defer().start().unwrap();
    assert_ended(&copy(on_host, &qmp(&small), &[]), 1, &["does not fit"]);
    small.kill().unwrap();
    // It continues here.
    let waiting = with_disk(&hosts.place.path("disk.raw")).incoming_defer().start().unwrap();
    completed(&copy(on_host, &qmp(&waiting), &[]));
    waiting.qmp().wait_status("running", WITHIN).unwrap();
    let mut guest = waiting.linux(WITHIN).unwrap();
    assert_is_guest(&mut guest, tick);
    drop(guest);
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
    let page = hosts.place.path("refused.html");
    let reported = [&elsewhere[..], &["--report", page.to_str().unwrap()]].concat();
    for (command, code, options) in [("check", 1, &elsewhere), ("move", 1, &reported), ("move", 1, &mapped)] {
        let refused = hosts.run(command, "/web", options);
        assert!(refused.stderr.contains("--with-disks copies the disks there"), "{}", refused.stderr);
        let text = format!("{}{}", refused.stdout, refused.stderr);
        assert!(
            refused.status.code() == Some(code) && text.contains("is another file there (/run/disk.raw)"),
            "{text}"
        );
        hosts.assert_stays();
    }
    let page = fs::read_to_string(page).unwrap();
    for text in ["source host", "destination host", "QEMU 10.0.", "is another file there"] {
        assert!(page.contains(text), "{text}: {page}");
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

/// An event names both hosts, with the QEMU of each.
fn assert_hosts(stdout: &str) {
    let events = stdout.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let hosts: Vec<_> = events.filter(|event| event["event"] == "hosts").collect();
    let [hosts] = &hosts[..] else { panic!("{stdout}") };
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for end in ["source-host", "destination-host"] {
        assert_eq!(hosts[end]["name"], name.trim(), "{hosts}");
        assert!(hosts[end]["qemu"].as_str().unwrap().starts_with("10.0."), "{hosts}");
    }
}
