//! The four routes of a guest, on each QEMU, with each number of lanes: of every change a cover of all pairs of
//! these, at night all.

use towline_lab::{Version, require_lab};

use crate::support::{
    Row, Scratch, WITHIN, completed, copy_with, listen, listening_on, load_by_qemu, migrate, prove_equal,
    qmp, start_copy, store_by_qemu, wait_migrated, waiting,
};

/// QEMU → image → QEMU, streamed.
fn through_an_image(row: Row, lanes: usize) {
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let source = row.boot();
    copy_with(lanes, &[&qmp(&source), &image]);
    let destination = waiting(row.builder());
    let count = lanes.to_string();
    let done = completed(&["--multifd-channels", &count, "--stream", "--paused", &image, &qmp(&destination)]);
    assert_eq!(done["handed-over"], false, "{done}");
    prove_equal(&source, &destination);
}

/// QEMU → image, loaded by stock QEMU 10.0: once by QMP, and once by towline.
fn loaded_by_qemu(row: Row, lanes: usize) {
    let scratch = Scratch::new();
    let image = scratch.path("guest.img");
    let source = row.boot();
    copy_with(lanes, &[&qmp(&source), image.to_str().unwrap()]);
    let loaded = load_by_qemu(row.builder_on_10_0(), &image, lanes);
    prove_equal(&source, &loaded);
    drop(loaded);
    let destination = waiting(row.builder_on_10_0());
    let (count, to) = (lanes.to_string(), qmp(&destination));
    let done = completed(&["--multifd-channels", &count, "--paused", image.to_str().unwrap(), &to]);
    assert_eq!(done["handed-over"], true, "{done}");
    prove_equal(&source, &destination);
}

/// Stock QEMU 10.0's own image → QEMU, streamed.
fn from_an_image_of_qemus(row: Row, lanes: usize) {
    let scratch = Scratch::new();
    let image = scratch.path("guest.img");
    let source = row.boot_on(Version::V10_0);
    store_by_qemu(&source, &image, lanes);
    let destination = waiting(row.builder());
    copy_with(lanes, &["--stream", "--paused", image.to_str().unwrap(), &qmp(&destination)]);
    prove_equal(&source, &destination);
}

/// QEMU `migrate tcp:` → towline → a QEMU that listens.
fn between_two_sockets(row: Row, lanes: usize) {
    let source = row.boot();
    let destination = waiting(row.builder().paused());
    let there = listen(&destination, lanes);
    let count = lanes.to_string();
    let mut towline = start_copy(&["--json", "--multifd-channels", &count, "tcp:127.0.0.1:0", &there]);
    let here = listening_on(&mut towline);
    migrate(&source, &here, lanes);
    towline.wait_done(WITHIN).unwrap();
    wait_migrated(&source);
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    prove_equal(&source, &destination);
}

macro_rules! cells {
    ($($name:ident: $row:ident, $lanes:literal, [$($usual:ident)*] nightly [$($nightly:ident)*];)*) => {$(
        mod $name {
            use super::{Row, require_lab};

            $(cells!(@cell $name, $row, $lanes, $usual);)*
            $(cells!(@cell $name, $row, $lanes, $nightly, #[ignore = "nightly"]);)*
        }
    )*};
    (@cell $name:ident, $row:ident, $lanes:literal, $cell:ident $(, #[$ignored:meta])?) => {
        #[test]
        $(#[$ignored])?
        fn $cell() {
            if require_lab(concat!(stringify!($name), "::", stringify!($cell))) {
                super::$cell(Row::$row, $lanes);
            }
        }
    };
}

// Every route meets each number of lanes and each QEMU, and each number of lanes each QEMU.
cells! {
    qemu_10_0_without_multifd: Qemu10_0, 0,
        [through_an_image from_an_image_of_qemus] nightly [loaded_by_qemu between_two_sockets];
    qemu_10_0_with_1_lane: Qemu10_0, 1,
        [loaded_by_qemu between_two_sockets] nightly [through_an_image from_an_image_of_qemus];
    qemu_10_0_with_4_lanes: Qemu10_0, 4,
        [through_an_image from_an_image_of_qemus] nightly [loaded_by_qemu between_two_sockets];
    qemu_10_0_with_8_lanes: Qemu10_0, 8,
        [loaded_by_qemu between_two_sockets] nightly [through_an_image from_an_image_of_qemus];
    qemu_7_2_without_multifd: Qemu7_2, 0,
        [loaded_by_qemu between_two_sockets] nightly [through_an_image from_an_image_of_qemus];
    qemu_7_2_with_1_lane: Qemu7_2, 1,
        [through_an_image from_an_image_of_qemus] nightly [loaded_by_qemu between_two_sockets];
    qemu_7_2_with_4_lanes: Qemu7_2, 4,
        [loaded_by_qemu between_two_sockets] nightly [through_an_image from_an_image_of_qemus];
    qemu_7_2_with_8_lanes: Qemu7_2, 8,
        [through_an_image from_an_image_of_qemus] nightly [loaded_by_qemu between_two_sockets];
}
