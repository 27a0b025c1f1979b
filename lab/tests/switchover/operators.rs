//! Changes of the run state by an operator or the guest during a copy are kept.

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::expect::{Scratch, lift_rate_limit};
use towline_lab::{Finished, Qemu, Towline, Version, require_lab};

use crate::support::{
    WITHIN, assert_ended, assert_runs_only_in, counting, end, is_live, qmp, signal, small, start, wait_phase,
    waiting,
};

/// Slow enough that an operator can act during the copy.
const SLOW: &str = "--max-bandwidth 1M";

/// A slow copy or move, with the socket at which its rate can be changed.
struct Slow {
    towline: Towline,
    scratch: Scratch,
}

impl Slow {
    fn start(command: &str, source: &Qemu, destination: &Qemu) -> Self {
        let scratch = Scratch::new();
        let ends = format!("{} {}", qmp(source), qmp(destination));
        let mut towline = start(&format!("{command} {SLOW} --qmp {} {ends}", scratch.text("control")));
        wait_phase(&mut towline, "transfer");
        source.qmp().wait_migration("active", WITHIN).unwrap();
        Self { towline, scratch }
    }

    /// Transfers the rest as fast as possible, and waits until it has ended.
    fn hurry(self) -> Finished {
        lift_rate_limit(&self.scratch.path("control"));
        end(self.towline)
    }
}

/// Starts a slow copy or move between QEMUs with these arguments.
fn under_way(command: &str, arguments: &[&str], paused: bool) -> (Qemu, Qemu, Slow) {
    let builder = small(Version::V10_0).args(arguments.iter().copied());
    let (source, destination) = (counting(&builder), waiting(&builder));
    if paused {
        source.qmp().execute("stop", Value::Null).unwrap();
    }
    let slow = Slow::start(command, &source, &destination);
    (source, destination, slow)
}

/// Writes the guest's ACPI sleep register, as the guest itself would.
fn sleep(qemu: &Qemu, value: u32) {
    qemu.qmp().hmp(&format!("o/h 0x604 {value:#x}")).unwrap();
}

/// Suspend to RAM (S3), and power off (S5).
const S3: u32 = 0x2400;
const S5: u32 = 0x2000;

#[test]
fn a_guest_paused_during_a_copy_that_is_cancelled_stays_paused() {
    if !require_lab("a_guest_paused_during_a_copy_that_is_cancelled_stays_paused") {
        return;
    }
    let (source, destination, slow) = under_way("copy", &[], false);
    source.qmp().execute("stop", Value::Null).unwrap();
    signal(slow.towline.pid(), Signal::INT);
    assert_ended(&end(slow.towline), 1, &["cancelled", "the guest: safe at its source"]);
    assert_eq!(source.qmp().status().unwrap(), "paused");
    source.qmp().execute("cont", Value::Null).unwrap();
    assert_runs_only_in(&source, &destination);
}

#[test]
fn a_guest_paused_during_a_copy_is_paused_at_its_destination() {
    if !require_lab("a_guest_paused_during_a_copy_is_paused_at_its_destination") {
        return;
    }
    let (source, destination, slow) = under_way("copy", &[], false);
    source.qmp().execute("stop", Value::Null).unwrap();
    assert_ended(&slow.hurry(), 0, &[]);
    assert_eq!(destination.qmp().status().unwrap(), "paused");
    assert_eq!(source.qmp().status().unwrap(), "postmigrate");
    assert_eq!(destination.counter().unwrap(), source.counter().unwrap());
}

#[test]
fn a_guest_run_during_a_copy_runs_at_its_destination() {
    if !require_lab("a_guest_run_during_a_copy_runs_at_its_destination") {
        return;
    }
    let (source, destination, slow) = under_way("copy", &[], true);
    source.qmp().execute("cont", Value::Null).unwrap();
    assert_ended(&slow.hurry(), 0, &[]);
    assert_runs_only_in(&destination, &source);
}

/// There is no guest to run, and the move is still complete.
#[test]
fn a_guest_that_powers_off_during_a_move_is_moved_and_not_run() {
    if !require_lab("a_guest_that_powers_off_during_a_move_is_moved_and_not_run") {
        return;
    }
    let (source, destination, slow) = under_way("move", &["-no-shutdown"], false);
    sleep(&source, S5);
    source.qmp().wait_status("shutdown", WITHIN).unwrap();
    assert_ended(&slow.hurry(), 0, &[]);
    assert!(source.wait_exit(WITHIN).unwrap().success());
    assert!(!is_live(&destination), "{:?}", destination.qmp().status());
}

#[test]
fn a_guest_that_sleeps_is_woken_at_its_destination() {
    if !require_lab("a_guest_that_sleeps_is_woken_at_its_destination") {
        return;
    }
    for asleep_before in [true, false] {
        let builder = small(Version::V10_0);
        let (source, destination) = (counting(&builder), waiting(&builder));
        let fall_asleep = || {
            sleep(&source, S3);
            source.qmp().wait_status("suspended", WITHIN).unwrap();
        };
        if asleep_before {
            fall_asleep();
        }
        let slow = Slow::start("move", &source, &destination);
        if !asleep_before {
            fall_asleep();
        }
        assert_ended(&slow.hurry(), 0, &[]);
        assert!(source.wait_exit(WITHIN).unwrap().success());
        assert_eq!(destination.qmp().status().unwrap(), "suspended");
        destination.qmp().execute("system_wakeup", Value::Null).unwrap();
        destination.qmp().wait_status("running", WITHIN).unwrap();
    }
}
