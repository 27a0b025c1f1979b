//! A running guest is relayed from QEMU to QEMU by towline, which drives both.

use serde_json::Value;
use towline_lab::{BootSector, Qemu, require_lab};

use crate::support::{Row, WITHIN, boot, completed, copy_with, prove_equal, qmp, waiting};

const PAGE_SIZE: usize = 4096;
/// Page of the small guest's counter.
const COUNTER_PAGE: u64 = 0x11_0000;

/// Relays a guest; the destination stays paused.
fn relay(row: Row, lanes: usize) {
    let source = row.boot();
    let destination = waiting(row.builder());
    copy_with(lanes, &["--paused", &qmp(&source), &qmp(&destination)]);
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    assert_eq!(destination.qmp().status().unwrap(), "paused");
    prove_equal(&source, &destination);
}

macro_rules! relays {
    ($($name:ident: $row:ident, $lanes:literal;)*) => {$(
        #[test]
        fn $name() {
            if require_lab(stringify!($name)) {
                relay(Row::$row, $lanes);
            }
        }
    )*};
}

relays! {
    qemu_10_0_without_multifd: Qemu10_0, 0;
    qemu_10_0_with_1_lane: Qemu10_0, 1;
    qemu_10_0_with_4_lanes: Qemu10_0, 4;
    qemu_7_2_without_multifd: Qemu7_2, 0;
    qemu_7_2_with_1_lane: Qemu7_2, 1;
    qemu_7_2_with_4_lanes: Qemu7_2, 4;
}

fn multifd(qemu: &Qemu) -> (Value, Value) {
    let capabilities = qemu.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
    let parameters = qemu.qmp().execute("query-migrate-parameters", Value::Null).unwrap();
    (capabilities, parameters)
}

/// Pages of the first 64 MiB that differ, by address.
fn differing(source: &Qemu, destination: &Qemu) -> Vec<u64> {
    let read = |qemu: &Qemu| qemu.read_memory(0, 64 << 20).unwrap();
    let (source, destination) = (read(source), read(destination));
    let pages = source.chunks(PAGE_SIZE).zip(destination.chunks(PAGE_SIZE));
    (0..).step_by(PAGE_SIZE).zip(pages).filter(|(_, (one, other))| one != other).map(|(at, _)| at).collect()
}

#[test]
fn a_running_guest_of_7_2_loses_only_pages_that_qemu_loses() {
    if !require_lab("a_running_guest_of_7_2_loses_only_pages_that_qemu_loses") {
        return;
    }
    for lanes in [0, 4] {
        let source = boot(Row::Qemu7_2.builder());
        let destination = waiting(Row::Qemu7_2.builder());
        copy_with(lanes, &["--paused", &qmp(&source), &qmp(&destination)]);
        // See `Row::boot_on`: the pages that the guest writes all the time may be of an earlier moment.
        let sweep_bytes = u64::from(BootSector::default().sweep_pages) * PAGE_SIZE as u64;
        let sweep = BootSector::FILL_ADDRESS..BootSector::FILL_ADDRESS + sweep_bytes;
        for address in differing(&source, &destination) {
            assert!(address == COUNTER_PAGE || sweep.contains(&address), "{address:#x} differs");
        }
        destination.qmp().execute("cont", Value::Null).unwrap();
        destination.wait_counting(WITHIN).unwrap();
    }
}

#[test]
fn a_relay_does_not_change_the_settings_of_either_end() {
    if !require_lab("a_relay_does_not_change_the_settings_of_either_end") {
        return;
    }
    let source = boot(Row::Qemu10_0.builder());
    let destination = waiting(Row::Qemu10_0.builder());
    let before = (multifd(&source), multifd(&destination));
    let done = completed(&[&qmp(&source), &qmp(&destination)]);
    assert_eq!(done["multifd-channels"], 4, "the default where both ends have QMP: {done}");
    assert_eq!(done["source-state"], "postmigrate", "{done}");
    assert_eq!(done["destination-state"], "running", "{done}");
    destination.qmp().wait_status("running", WITHIN).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > source.counter().unwrap());
    assert_eq!((multifd(&source), multifd(&destination)), before);
}
