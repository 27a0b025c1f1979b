//! Helpers of these tests: images of small guests, restores, and the events of QEMU and towline.

use std::time::Duration;

use serde_json::{Value, json};
pub(crate) use towline_lab::expect::{Scratch, assert_ended, completed, events, number, qmp, waiting};
use towline_lab::{BootSector, Builder, Finished, Qemu, Towline, Version, expect, towline};

/// Timeout of anything that must happen. Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
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
pub(crate) fn wait_event(towline: &mut Towline, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    expect::wait_event(towline, what, WITHIN, wanted)
}

/// Waits for the event that the guest is resumed.
pub(crate) fn wait_running(towline: &mut Towline) {
    wait_event(towline, "guest that runs", |event| event["phase"] == "running");
}

/// The small guest, which takes no interrupts: 16 MiB filled, one of them dirtied forever.
pub(crate) fn spinning() -> BootSector {
    BootSector { steps_per_tick: 0, ..BootSector::default() }
}

/// A QEMU with that guest.
pub(crate) fn small(version: Version) -> Builder {
    Qemu::builder(version).memory_mib(64).boot_sector(spinning())
}

/// Starts a guest, stores it when it counts, and ends its QEMU. Returns its counter before it was stored.
pub(crate) fn store(builder: &Builder, image: &str) -> u64 {
    let source = builder.clone().start().unwrap();
    let count = source.wait_counting(WITHIN).unwrap();
    assert_ended(&run(&format!("copy {} {image}", qmp(&source))), 0, &[]);
    count
}

/// A small guest of QEMU 10.0 that is stored in an image.
pub(crate) struct Stored {
    /// Directory of the image.
    pub(crate) scratch: Scratch,
    pub(crate) builder: Builder,
    pub(crate) image: String,
    /// Value of the counter before the guest was stored.
    pub(crate) count: u64,
}

impl Stored {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::new();
        let (builder, image) = (small(Version::V10_0), scratch.text("guest.img"));
        let count = store(&builder, &image);
        Self { scratch, builder, image, count }
    }

    /// Restores it by postcopy at this bandwidth, and waits until it runs.
    pub(crate) fn restore_until_running(&self, bandwidth: &str) -> (Qemu, Towline) {
        let destination = waiting(&self.builder);
        let options = format!("--max-bandwidth {bandwidth} --json");
        let mut towline = start(&format!("copy --postcopy {options} {} {}", self.image, qmp(&destination)));
        wait_running(&mut towline);
        (destination, towline)
    }
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
