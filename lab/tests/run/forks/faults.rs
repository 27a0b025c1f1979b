//! Forks that are killed, cancelled or refused: their guest runs on with its disk.

use std::fs;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::number;
use towline_lab::{Qmp, require_lab, signal, wait_until};

use super::{disk, disk_written, with_disk};
use crate::support::WITHIN;

/// Lines of a fork's log, in their order.
const MOMENTS: [&str; 6] =
    ["starting QEMU", "started QEMU", "devices saved", "memory copied", "guest taken", "phase transfer"];

/// Forks after which QEMU joins the files of the guest's disk above its first.
const CHAIN: u64 = 40;

/// `cargo xtask soak fork` does this 200 times.
#[test]
fn a_fork_that_is_killed_leaves_the_guest_running() {
    let test = "a_fork_that_is_killed_leaves_the_guest_running";
    if !require_lab(test) {
        return;
    }
    let saved = with_disk();
    let mut web = saved.agent("web");
    let mut random = fastrand::Rng::with_seed(number("TOWLINE_SOAK_SEED", 38));
    for round in 0..number("TOWLINE_SOAK_FORK_KILLS", 12) {
        let text = format!("round-{round}");
        web.shell(&disk_written(&text), WITHIN).unwrap();
        if round % CHAIN == CHAIN - 1 {
            let base = saved.path("disk.raw").display().to_string();
            let monitor = saved.monitor("web");
            monitor.execute("block-stream", json!({ "device": "disk0", "base": base })).unwrap();
            wait_streamed(&monitor);
        }
        let name = format!("killed-{round}");
        let mut fork = saved.start_fork("web", &["--name", &name, "--log", "debug"]);
        // At a line of the log, or somewhere between two of them.
        let moment = MOMENTS[(round / 2) as usize % MOMENTS.len()];
        let later = Duration::from_micros(if random.bool() { 0 } else { random.u64(..20_000) });
        wait_until(moment, WITHIN, || Ok((fork.stderr().contains(moment) || !fork.runs()?).then_some(())))
            .unwrap();
        assert!(fork.runs().unwrap(), "it ended by itself: {}", fork.stderr());
        thread::sleep(later);
        // A cancelled one ends by itself, and has run the guest on.
        if round % 2 == 1 {
            fork.kill().unwrap();
        } else {
            signal(fork.pid(), Signal::INT);
            fork.wait(WITHIN).unwrap();
            let status = saved.monitor("web").execute("query-status", Value::Null).unwrap();
            assert_eq!(status["status"], "running", "round {round}, cancelled {later:?} after {moment:?}");
        }
        let monitor = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
        saved.towline(["repair", &monitor].map(str::to_owned)).wait_done(WITHIN).unwrap();
        let status = saved.monitor("web").execute("query-status", Value::Null).unwrap();
        assert_eq!(status["status"], "running", "round {round}, {later:?} after {moment:?}");
        web.wait_ticking(WITHIN).unwrap();
        assert_eq!(disk(&mut web), text, "round {round}, {later:?} after {moment:?}");
        let left = |name: &&String| *name != "web";
        wait_until("the end of the fork's QEMU", WITHIN, || {
            Ok((!saved.guests().iter().any(|name| left(&name))).then_some(()))
        })
        .unwrap();
    }
    saved.assert_is_saved_guest(&mut web);
    saved.quit("web");
}

/// Waits until QEMU has joined the files of the guest's disk.
pub(crate) fn wait_streamed(monitor: &Qmp) {
    wait_until("a shorter chain", WITHIN, || {
        let jobs = monitor.execute("query-block-jobs", Value::Null)?;
        Ok(jobs.as_array().unwrap().is_empty().then_some(()))
    })
    .unwrap();
}

/// The way out is the one that the refusal names.
#[test]
#[ignore = "nightly"]
fn a_chain_that_is_too_long_is_refused_by_name() {
    if !require_lab("a_chain_that_is_too_long_is_refused_by_name") {
        return;
    }
    let saved = with_disk();
    let mut web = saved.agent("web");
    web.shell(&disk_written("kept"), WITHIN).unwrap();
    let refused = (0..100).find_map(|n| {
        let name = format!("job-{n}");
        let forked = saved.fork("web", &["--name", &name, "--detach"]);
        if !forked.status.success() {
            return Some(forked);
        }
        saved.quit(&name);
        wait_until("its end", WITHIN, || Ok((saved.guests() == ["web"]).then_some(()))).unwrap();
        None
    });
    let refused = refused.unwrap();
    assert!(refused.stderr.contains("has a chain of 65 files"), "{}", refused.stderr);
    let command = refused.stderr.split('`').nth(1).unwrap().strip_prefix("towline ").unwrap();
    saved.towline(command.split(' ').map(str::to_owned)).wait_done(WITHIN).unwrap();
    wait_streamed(&saved.monitor("web"));
    let forked = saved.fork("web", &["--name", "job", "--detach"]);
    assert!(forked.status.success(), "{}", forked.stderr);
    assert_eq!(disk(&mut saved.agent("job")), "kept");
    assert_eq!(disk(&mut web), "kept");
    ["job", "web"].iter().for_each(|name| saved.quit(name));
}

#[test]
fn of_two_forks_at_once_each_has_its_own_instant() {
    if !require_lab("of_two_forks_at_once_each_has_its_own_instant") {
        return;
    }
    let saved = with_disk();
    let mut web = saved.agent("web");
    web.shell(&disk_written("one"), WITHIN).unwrap();
    let forks = ["a", "b", "c"].map(|name| saved.start_fork("web", &["--name", name, "--detach"]));
    let finished = forks.map(|fork| fork.wait(WITHIN).unwrap());
    let forked = finished.iter().filter(|fork| fork.status.success()).count();
    assert!(forked > 0, "{}", finished[0].stderr);
    for refused in finished.iter().filter(|fork| !fork.status.success()) {
        assert!(refused.stderr.contains("was changed meanwhile"), "{}", refused.stderr);
    }
    web.shell(&disk_written("two"), WITHIN).unwrap();
    let names: Vec<_> = saved.guests().into_iter().filter(|name| name != "web").collect();
    assert_eq!(names.len(), forked);
    for name in &names {
        assert_eq!(disk(&mut saved.agent(name)), "one", "{name}");
    }
    names.iter().chain([&"web".to_owned()]).for_each(|name| saved.quit(name));
}

/// A job of the drive is the user's: nothing was changed, and the guest runs on.
#[test]
fn a_guest_with_a_job_is_refused_and_keeps_its_disk() {
    if !require_lab("a_guest_with_a_job_is_refused_and_keeps_its_disk") {
        return;
    }
    let saved = with_disk();
    let mirror = json!({ "device": "disk0", "target": saved.path("mirror.raw"), "sync": "full", "format": "raw", "speed": 1 });
    saved.monitor("web").execute("drive-mirror", mirror).unwrap();
    let refused = saved.fork("web", &["--detach"]);
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("refuses transaction"), "{}", refused.stderr);
    assert_eq!(saved.guests(), ["web"]);
    let overlays = fs::read_dir(saved.path("")).unwrap().flatten();
    let overlays: Vec<_> =
        overlays.filter(|entry| entry.file_name().to_string_lossy().ends_with(".qcow2")).collect();
    assert!(overlays.is_empty(), "{overlays:?}");
    let drives = saved.monitor("web").execute("query-block", Value::Null).unwrap();
    assert!(drives.to_string().contains("disk.raw"), "{drives}");
    saved.agent("web").wait_ticking(WITHIN).unwrap();
    saved.quit("web");
}
