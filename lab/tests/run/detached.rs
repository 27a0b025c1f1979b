//! Guests that outlive the towline which started them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use towline_lab::{Finished, Version, require_lab, wait_until};

use crate::support::{Saved, WITHIN};

fn events(finished: &Finished, kind: &str) -> Vec<Value> {
    let events = finished.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == kind).collect()
}

/// The kernel shows the lock's owner only as long as one exists.
fn is_locked(image: &str) -> bool {
    let file = fs::File::open(image).unwrap();
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
}

#[test]
fn detached_guests_outlive_the_command_and_are_controlled_by_name() {
    if !require_lab("detached_guests_outlive_the_command_and_are_controlled_by_name") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let options = ["--name", "web", "--count", "2", "--detach", "--json", "--share"];
    let finished = saved.run(&options, &saved.settings()).wait_done(WITHIN).unwrap();
    let running = events(&finished, "running");
    assert_eq!(running.len(), 2, "{}", finished.stdout);
    assert!(running.iter().all(|event| event["memory"] == "mapped"), "{running:?}");
    assert!(
        running.iter().all(|event| event["answered-us"].as_u64() < event["running-us"].as_u64()),
        "{running:?}"
    );
    assert_eq!(events(&finished, "starting").len(), 2);
    let last = events(&finished, "run");
    assert!(last[0]["guests"] == 2 && last[0]["outcome"] == "done", "{last:?}");

    // One whose monitor has not replied at once is busy.
    let replied = |listed: &Vec<Value>| listed.iter().all(|guest| guest["state"] != "busy");
    let listed = || Ok(Some(saved.listed()).filter(replied));
    let listed = wait_until("monitors that reply", WITHIN, listed).unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|guest| guest["detached"] == true), "{listed:?}");
    assert!(listed.iter().all(|guest| guest["state"] == "running"), "{listed:?}");
    let ps = |options: &[&str]| {
        let words = ["ps"].iter().chain(options).map(|word| (*word).to_owned());
        saved.towline(words).wait_done(WITHIN).unwrap().stdout
    };
    assert_eq!(ps(&["-q"]), "web-0\nweb-1\n");
    let text = || Ok(Some(ps(&[])).filter(|text| !text.contains(" busy ")));
    let text = wait_until("monitors that reply", WITHIN, text).unwrap();
    let (heading, rows) = text.split_once('\n').unwrap();
    assert_eq!(
        heading.split_whitespace().collect::<Vec<_>>(),
        ["NAME", "PID", "STATE", "AGE", "MEMORY", "IMAGE"]
    );
    assert!(rows.lines().all(|row| row.contains(" running ") && row.ends_with("  detached")), "{rows}");
    let owner = listed[0]["owner-pid"].as_u64().unwrap();
    assert!(!Path::new(&format!("/proc/{owner}")).exists(), "towline has ended");
    assert!(is_locked(&saved.image()), "its guests still need the image");
    for name in ["web-0", "web-1"] {
        saved.assert_is_saved_guest(&mut saved.agent(name));
    }
    // An image that is renamed onto it changes nothing for them.
    fs::write(saved.path("other"), "other").unwrap();
    let kept = saved.path("kept.img");
    fs::rename(saved.image(), &kept).unwrap();
    fs::rename(saved.path("other"), saved.image()).unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("web-0"));
    fs::rename(&kept, saved.image()).unwrap();

    assert_eq!(saved.ctl(&["web-0", "status"])["status"], "running");
    saved.ctl(&["web-0", "stop"]);
    assert_eq!(saved.ctl(&["web-0", "status"])["status"], "paused");
    saved.ctl(&["web-0", "cont"]);
    assert_eq!(saved.ctl(&["web-0", "status"])["running"], true);
    saved.ctl(&["web-1", "powerdown"]);

    let taken = saved.run(&["--name", "web-0"], &saved.settings_in("other-{name}.agent"));
    let taken = taken.wait(WITHIN).unwrap();
    assert!(taken.stderr.contains("name web-0 is taken by process"), "{}", taken.stderr);
    for (name, left) in [("web-0", 1), ("web-1", 0)] {
        let process = format!("/proc/{}", saved.pid(name));
        saved.ctl(&[name, "quit"]);
        wait_until("a guest that has ended", WITHIN, || Ok((!Path::new(&process).exists()).then_some(())))
            .unwrap();
        assert_eq!(saved.guests().len(), left);
    }
    assert!(!is_locked(&saved.image()));
    let gone = saved.towline(["ctl", "web-0", "status"].map(str::to_owned)).wait(WITHIN).unwrap();
    assert_eq!(gone.status.code(), Some(1));
    assert!(gone.stderr.contains("web-0: no guest of this user has this name"), "{}", gone.stderr);
    saved.assert_intact();
}

#[test]
fn a_detached_guest_that_is_not_restored_does_not_stay() {
    if !require_lab("a_detached_guest_that_is_not_restored_does_not_stay") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    // Its device state needs the memory size that was saved.
    let settings = [saved.settings(), vec!["smp=1".into()]].concat();
    let failed = saved.run(&["--name", "web", "--detach", "--json"], &settings).wait(WITHIN).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}{}", failed.stdout, failed.stderr);
    let last = events(&failed, "run");
    assert!(last.len() == 1 && last[0]["guests"] == 0 && last[0]["outcome"] == "failed", "{}", failed.stdout);
    assert_eq!(saved.guests(), Vec::<String>::new());
    assert!(!saved.directory("web").exists());
}

/// A QEMU that outlives a towline which is killed while it starts.
#[test]
fn a_guest_whose_towline_is_killed_at_its_start_is_listed_and_ended_by_name() {
    let test = "a_guest_whose_towline_is_killed_at_its_start_is_listed_and_ended_by_name";
    if !require_lab(test) {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let (path, starting, go) = (saved.path("qemu"), saved.path("starting"), saved.path("go"));
    let wait = format!("touch {}; while ! [ -e {} ]; do sleep 0.05; done", starting.display(), go.display());
    let script =
        format!("#!/bin/sh\n[ \"$1\" = --version ] || {{ {wait}; }}\nexec {} \"$@\"\n", saved.binary());
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let binary = path.display().to_string();
    let mut run = saved.run_image(&saved.image(), &["--name", "web", "--detach", "--qemu", &binary]);
    wait_until("a QEMU that starts", WITHIN, || {
        assert!(run.runs()?, "towline has ended: {}", run.stderr());
        Ok((starting.exists() && saved.directory("web").join("state.json").exists()).then_some(()))
    })
    .unwrap();
    run.kill().unwrap();
    assert_eq!(saved.guests(), ["web"]);
    let process = format!("/proc/{}", saved.pid("web"));
    fs::write(&go, "").unwrap();
    saved.ctl(&["web", "quit"]);
    wait_until("a guest that has ended", WITHIN, || Ok((!Path::new(&process).exists()).then_some(())))
        .unwrap();
    assert_eq!(saved.guests(), Vec::<String>::new());
    let mut next = saved.run(&["--name", "web"], &saved.settings());
    saved.assert_runs(&mut next, "web");
    saved.interrupt(next);
}
