//! From one version of QEMU to another: the same machine type, a named CPU model, and both ways.

use towline_lab::{Version, require_lab};

use crate::support::{Row, Scratch, copy, copy_with, prove_equal, qmp, waiting};

const LANES: [usize; 2] = [0, 4];

fn through_an_image(from: Version, to: Version) {
    for lanes in LANES {
        let scratch = Scratch::new();
        let image = scratch.text("guest.img");
        let source = Row::Qemu7_2.boot_on(from);
        copy_with(lanes, &[&qmp(&source), &image]);
        let destination = waiting(Row::Qemu7_2.builder_on(to));
        // Towline finds out itself if QEMU can load the image.
        copy(&["--verify", "--paused", &image, &qmp(&destination)]);
        prove_equal(&source, &destination);
    }
}

fn relayed(from: Version, to: Version) {
    for lanes in LANES {
        let source = Row::Qemu7_2.boot_on(from);
        let destination = waiting(Row::Qemu7_2.builder_on(to));
        copy_with(lanes, &["--paused", &qmp(&source), &qmp(&destination)]);
        prove_equal(&source, &destination);
    }
}

#[test]
#[ignore = "nightly"]
fn up_through_an_image() {
    if require_lab("up_through_an_image") {
        through_an_image(Version::V7_2, Version::V10_0);
    }
}

#[test]
#[ignore = "nightly"]
fn down_through_an_image() {
    if require_lab("down_through_an_image") {
        through_an_image(Version::V10_0, Version::V7_2);
    }
}

#[test]
#[ignore = "nightly"]
fn up_relayed() {
    if require_lab("up_relayed") {
        relayed(Version::V7_2, Version::V10_0);
    }
}

#[test]
fn down_relayed() {
    if require_lab("down_relayed") {
        relayed(Version::V10_0, Version::V7_2);
    }
}
