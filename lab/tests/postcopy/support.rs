//! Helpers of these tests: images of small guests, restores, and the events of QEMU and towline.

use std::time::Duration;

use serde_json::{Value, json};
pub(crate) use towline_lab::expect::{Scratch, assert_ended, completed, events, number, qmp};
use towline_lab::{BootSector, Builder, Finished, Qemu, Towline, Version, expect, towline};

/// Timeout of anything that must happen. Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(90);
pub(crate) const PAGE: u64 = 4096;

/// Starts `towline` with these space-separated arguments.
pub(crate) fn start(arguments: &str) -> Towline {
    towline(arguments.split_whitespace()).unwrap()
}

/// Runs `towline` until it exits.
pub(crate) fn run(arguments: &str) -> Finished {
    start(arguments).wait(WITHIN).unwrap()
}

/// Waits for an event of a towline with `--json`; towline must not exit before.
pub(crate) fn tells(towline: &mut Towline, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    expect::tells(towline, what, WITHIN, wanted)
}

/// Waits for the event that the guest is resumed.
pub(crate) fn tells_running(towline: &mut Towline) {
    tells(towline, "guest that runs", |event| event["phase"] == "running");
}

/// The small guest: 16 MiB filled, one of them dirtied for ever.
pub(crate) fn small(version: Version) -> Builder {
    Qemu::builder(version).memory_mib(64).boot_sector(BootSector::default())
}

/// Starts a guest, stores it when it counts, and ends its QEMU. Returns its counter before it was stored.
pub(crate) fn store(builder: &Builder, image: &str) -> u64 {
    let source = builder.clone().start().unwrap();
    let count = source.wait_counting(WITHIN).unwrap();
    assert_ended(&run(&format!("copy {} {image}", qmp(&source))), 0, &[]);
    count
}

pub(crate) fn waiting(builder: &Builder) -> Qemu {
    builder.clone().incoming_defer().start().unwrap()
}

/// Statuses in QEMU's migration events since the last call.
pub(crate) fn statuses(qemu: &Qemu) -> Vec<String> {
    // A reply comes after all events that precede it.
    qemu.qmp().status().unwrap();
    let events = qemu.qmp().take_events();
    let migration = events.iter().filter(|event| event["event"] == "MIGRATION");
    migration.filter_map(|event| Some(event["data"]["status"].as_str()?.to_owned())).collect()
}

/// Asserts that every page was sent, and none twice, if no connection was lost.
#[track_caller]
pub(crate) fn assert_each_page_once(completed: &Value) {
    let ram = &completed["ram"];
    let pages = ram["normal"].as_u64().unwrap() + ram["duplicate"].as_u64().unwrap();
    assert_eq!(pages * PAGE, ram["total"].as_u64().unwrap(), "{completed}");
}

/// Asserts that the small guest runs on from its state: it counts on, and every page is as written.
#[track_caller]
pub(crate) fn prove_alive(qemu: &Qemu, count: u64) {
    assert!(qemu.wait_counting(WITHIN).unwrap() > count);
    qemu.qmp().execute("stop", Value::Null).unwrap();
    qemu.check_filled().unwrap();
    qemu.qmp().execute("cont", Value::Null).unwrap();
}

/// Sets up a waiting QEMU as a postcopy destination, for a towline that cannot.
pub(crate) fn set_postcopy(qemu: &Qemu) {
    let on = json!([
        { "capability": "postcopy-ram", "state": true },
        { "capability": "events", "state": true }
    ]);
    qemu.qmp().execute("migrate-set-capabilities", json!({ "capabilities": on })).unwrap();
}
