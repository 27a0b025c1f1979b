//! Helpers of these tests: guests that write while they are moved.

use std::time::Duration;

use serde_json::Value;
pub(crate) use towline_lab::expect::{
    Scratch, assert_ended, completed, events, number, qmp, settings, waiting,
};
use towline_lab::{BootSector, Builder, Finished, LinuxGuest, Qemu, Towline, Version, expect, towline};

/// Timeout of anything that must happen. Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;

/// Starts `towline` with these space-separated arguments.
pub(crate) fn start(arguments: &str) -> Towline {
    towline(arguments.split(' ')).unwrap()
}

/// Runs `towline` until it exits.
pub(crate) fn run(arguments: &str) -> Finished {
    start(arguments).wait(WITHIN).unwrap()
}

/// Waits for an event of a towline with `--json`; towline must not exit before.
pub(crate) fn wait_event(towline: &mut Towline, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    expect::wait_event(towline, what, WITHIN, wanted)
}

/// The small guest: 16 MiB filled, one of them dirtied forever.
pub(crate) fn small() -> Builder {
    Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(BootSector::default())
}

/// Starts the small guest and waits until it counts.
pub(crate) fn counting() -> Qemu {
    let qemu = small().start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

/// A Linux of two processors.
pub(crate) fn linux(memory_mib: u64) -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(memory_mib).processors(2)
}

/// Boots Linux and has it write `range` bytes round and round at `rate` bytes per second, in a pattern that
/// can be checked.
pub(crate) fn writing(builder: &Builder, rate: u64, range: u64) -> (Qemu, LinuxGuest) {
    let (qemu, mut guest) = builder.boot(WITHIN).unwrap();
    guest.dirty(rate, range).unwrap();
    guest.wait_ticking(WITHIN).unwrap();
    (qemu, guest)
}

/// Asserts that the guest runs on: it counts on from `tick`, and every page that it wrote is as written.
pub(crate) fn prove_alive(qemu: &Qemu, range: u64, tick: u64) -> u64 {
    qemu.qmp().wait_status("running", WITHIN).unwrap();
    let mut guest = qemu.linux(WITHIN).unwrap();
    let now = guest.wait_ticking(WITHIN).unwrap();
    assert!(now > tick, "the counter is {now}, before it was {tick}");
    assert_eq!(guest.check().unwrap(), range / 4096);
    now
}
