//! A QEMU that is busy, not broken.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{BootSector, Qemu, Version, require_lab};

use crate::support::{Fixture, WITHIN, assert_ended, counting, qmp, save, signal, small_guest, waiting};

/// A QEMU that loads an image itself does not answer until the load is done: a large guest, or a slow disk,
/// is not a failure.
#[test]
fn a_slow_load_at_the_destination_is_no_failure() {
    if !require_lab("a_slow_load_at_the_destination_is_no_failure") {
        return;
    }
    let fixture = Fixture::new();
    let boot_sector = BootSector { fill_mib: 512, words_per_page: 1, ..BootSector::default() };
    let large = Qemu::builder(Version::V10_0).memory_mib(640).boot_sector(boot_sector);
    save(&fixture, large.clone(), "guest.img");
    let destination = waiting(&large);
    let resident = || -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", destination.pid())).unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    };
    let before = resident();
    let mut towline = fixture.towline(&format!("copy {} {}", fixture.name("guest.img"), qmp(&destination)));
    // Pages: the load has begun, and is far from its end.
    while resident() < before + 8192 {
        assert!(towline.runs().unwrap(), "{}", towline.stderr());
    }
    signal(destination.pid(), Signal::STOP);
    // Longer than the timeout of any other command.
    std::thread::sleep(Duration::from_secs(11));
    assert!(towline.runs().unwrap(), "{}", towline.stderr());
    signal(destination.pid(), Signal::CONT);
    towline.wait_done(WITHIN).unwrap();
    destination.wait_counting(WITHIN).unwrap();
}

#[test]
fn status_tells_states_apart_by_its_exit_status() {
    if !require_lab("status_tells_states_apart_by_its_exit_status") {
        return;
    }
    let fixture = Fixture::new();
    let (guest, destination) = (counting(small_guest()), waiting(&small_guest()));
    let status = |endpoint: &str, exit: i32, state: &str, run_state: Option<&str>| {
        let finished = fixture.run(&format!("status --json {endpoint}"));
        assert_ended(&finished, exit, &[]);
        let event: Value = serde_json::from_str(finished.stdout.trim()).unwrap();
        let found = (event["state"].as_str(), event["run-state"].as_str());
        assert_eq!(found, (Some(state), run_state), "{event}");
    };
    status(&qmp(&guest), 0, "running", Some("running"));
    guest.qmp().execute("stop", Value::Null).unwrap();
    status(&qmp(&guest), 5, "paused", Some("paused"));
    status(&qmp(&destination), 6, "waiting", Some("inmigrate"));
    // Another client, and then one more that waits for it.
    let held = [(); 2].map(|()| UnixStream::connect(guest.qmp_path()).unwrap());
    status(&qmp(&guest), 4, "held", None);
    drop(held);
    guest.kill().unwrap();
    status(&qmp(&guest), 7, "ended", None);
    status("qmp:/nonexistent/a.qmp", 8, "none", None);
    status("no-such-guest", 8, "none", None);
}
