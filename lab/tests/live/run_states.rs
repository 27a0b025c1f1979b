//! A guest keeps its run state, or its copy is refused: there are states in which QEMU would lose it, or run
//! it.

use serde_json::{Value, json};
use towline_lab::expect::lift_rate_limit;
use towline_lab::{BootSector, Builder, Qemu, Version, require_qemu};

use crate::support::{
    Scratch, WITHIN, assert_ended, completed, counting, qmp, run, settings, start, wait_event, waiting,
};

const VERSIONS: [Version; 3] = [Version::V7_2, Version::V10_0, Version::Newest];

/// A run state, and how a guest gets there.
struct Case {
    status: &'static str,
    arguments: &'static [&'static str],
    /// Writes to the ports of its machine, as lines of the human monitor.
    writes: &'static [&'static str],
}

/// A disk whose sectors cannot be read, on an IDE bus.
const BAD_DISK: &[&str] = &[
    "-blockdev",
    "driver=blkdebug,node-name=bad,image.driver=null-co,image.size=1048576,inject-error.0.event=none,\
     inject-error.0.iotype=read,inject-error.0.errno=5",
    "-device",
    "piix3-ide,id=legacy,addr=7",
    "-device",
    "ide-hd,bus=legacy.0,drive=bad,rerror=stop",
];
const RUNNING: Case = Case { status: "running", arguments: &[], writes: &[] };
const PAUSED: Case = Case { status: "paused", arguments: &[], writes: &[] };
const PRELAUNCH: Case = Case { status: "prelaunch", arguments: &[], writes: &[] };
const SUSPENDED: Case = Case { status: "suspended", arguments: &[], writes: &["o/h 0x604 0x2400"] };
const SHUTDOWN: Case =
    Case { status: "shutdown", arguments: &["-no-shutdown"], writes: &["o/h 0x604 0x2000"] };
const PANICKED: Case = Case {
    status: "guest-panicked",
    arguments: &["-device", "pvpanic", "-action", "panic=pause"],
    writes: &["o/b 0x505 1"],
};
const IO_ERROR: Case = Case {
    status: "io-error",
    arguments: BAD_DISK,
    writes: &["o/b 0x1f6 0xe0", "o/b 0x1f2 1", "o/b 0x1f7 0x20"],
};

fn builder(version: Version) -> Builder {
    let boot_sector = BootSector { fill_mib: 4, sweep_pages: 128, ..BootSector::default() };
    Qemu::builder(version).memory_mib(32).boot_sector(boot_sector)
}

/// Starts a guest and brings it into the run state.
fn in_state(version: Version, case: &Case) -> Qemu {
    let builder = builder(version).args(case.arguments.iter().copied());
    if case.status == "prelaunch" {
        return builder.paused().start().unwrap();
    }
    let qemu = builder.start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    if case.status == "paused" {
        qemu.qmp().execute("stop", Value::Null).unwrap();
    }
    case.writes.iter().for_each(|line| drop(qemu.qmp().hmp(line).unwrap()));
    qemu.qmp().wait_status(case.status, WITHIN).unwrap();
    qemu
}

#[test]
fn a_live_copy_keeps_the_run_state_or_is_refused() {
    if !require_qemu("a_live_copy_keeps_the_run_state_or_is_refused", &VERSIONS) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    for version in VERSIONS {
        for case in [RUNNING, PAUSED, SUSPENDED, SHUTDOWN, PANICKED, IO_ERROR, PRELAUNCH] {
            let qemu = in_state(version, &case);
            let finished =
                run(&format!("copy --json --overwrite --live --memory-only {} {image}", qmp(&qemu)));
            let is_kept = match case.status {
                "running" => true,
                "paused" | "suspended" => version != Version::V7_2,
                _ => false,
            };
            if is_kept {
                let after = if case.status == "running" { "running" } else { "unchanged" };
                assert_eq!(completed(&finished)["source-state"], after, "{version:?} {}", case.status);
            } else {
                let reason = format!("with --live and a guest that is `{}`", case.status);
                assert_ended(&finished, 1, &[&reason, "the guest: safe at its source"]);
            }
            assert_eq!(qemu.qmp().status().unwrap(), case.status, "{version:?}");
        }
    }
}

/// QEMU 10.0 and later abort at its `cont`, and 7.2 would run it.
#[test]
fn a_guest_that_sleeps_is_not_resumed_after_its_copy() {
    if !require_qemu("a_guest_that_sleeps_is_not_resumed_after_its_copy", &VERSIONS) {
        return;
    }
    let scratch = Scratch::new();
    for version in VERSIONS {
        let qemu = in_state(version, &SUSPENDED);
        let copy =
            format!("copy --overwrite --resume --memory-only {} {}", qmp(&qemu), scratch.text("a.img"));
        assert_ended(&run(&copy), 1, &["it is `suspended`, and QEMU aborts", "safe at its source"]);
        assert_eq!(qemu.qmp().status().unwrap(), "suspended");
    }
    let qemu = in_state(Version::V10_0, &RUNNING);
    let image = scratch.text("b.img");
    let slowly =
        format!("copy --json --resume --memory-only --max-bandwidth 1M --qmp {}", scratch.text("control"));
    let mut towline = start(&format!("{slowly} {} {image}", qmp(&qemu)));
    wait_event(&mut towline, "the transfer", |event| event["phase"] == "transfer");
    qemu.qmp().wait_migration("active", WITHIN).unwrap();
    qemu.qmp().hmp(SUSPENDED.writes[0]).unwrap();
    lift_rate_limit(&scratch.path("control"));
    let finished = towline.wait(WITHIN).unwrap();
    assert_ended(
        &finished,
        3,
        &[
            "fell asleep before it was stopped",
            "paused at its source (postmigrate); whole at its destination",
        ],
    );
    assert_eq!(qemu.qmp().status().unwrap(), "postmigrate");
}

#[test]
fn postcopy_of_a_guest_that_is_off_is_refused() {
    if !require_qemu("postcopy_of_a_guest_that_is_off_is_refused", &[Version::V10_0]) {
        return;
    }
    let (source, destination) = (in_state(Version::V10_0, &SHUTDOWN), waiting(&builder(Version::V10_0)));
    let finished = run(&format!("copy --postcopy {} {}", qmp(&source), qmp(&destination)));
    assert_ended(&finished, 1, &["a guest that is `shutdown` arrives as `paused`"]);
    let finished = run(&format!("copy {} {}", qmp(&source), qmp(&destination)));
    assert_ended(&finished, 0, &[]);
    assert_eq!(destination.qmp().status().unwrap(), "shutdown");
}

/// Another client has left `mode=cpr-reboot`, with which QEMU stops the guest at once.
#[test]
fn a_guest_runs_while_it_is_copied_in_any_mode() {
    if !require_qemu("a_guest_runs_while_it_is_copied_in_any_mode", &[Version::V10_0]) {
        return;
    }
    let (source, scratch) = (counting(), Scratch::new());
    source.qmp().execute("migrate-set-parameters", json!({ "mode": "cpr-reboot" })).unwrap();
    let before = settings(&source);
    let image = scratch.text("guest.img");
    let slowly =
        format!("copy --json --resume --memory-only --max-bandwidth 1M --qmp {}", scratch.text("control"));
    let mut towline = start(&format!("{slowly} {} {image}", qmp(&source)));
    wait_event(&mut towline, "the transfer", |event| event["phase"] == "transfer");
    source.qmp().wait_migration("active", WITHIN).unwrap();
    assert_eq!(source.qmp().status().unwrap(), "running");
    lift_rate_limit(&scratch.path("control"));
    completed(&towline.wait(WITHIN).unwrap());
    assert_eq!(settings(&source), before);
}

#[test]
fn a_guest_whose_execution_is_recorded_is_refused() {
    if !require_qemu("a_guest_whose_execution_is_recorded_is_refused", &VERSIONS) {
        return;
    }
    let scratch = Scratch::new();
    for version in VERSIONS {
        let record = format!("shift=auto,rr=record,rrfile={}", scratch.text("replay.bin"));
        let qemu = builder(version).args(["-icount".into(), record]).start().unwrap();
        let finished = run(&format!("copy {} {}", qmp(&qemu), scratch.text("guest.img")));
        assert_ended(&finished, 1, &["`-icount rr=record`, with which QEMU aborts", "safe at its source"]);
        assert_eq!(qemu.qmp().status().unwrap(), "running");
    }
}
