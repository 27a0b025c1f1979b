//! Effects of the options: run states afterwards, and refusals.

use serde_json::Value;
use towline_lab::require_lab;

use crate::support::{Row, Scratch, WITHIN, boot, completed, copy, prove_equal, qmp, refused, stop, waiting};

/// Stores a paused guest, copies it in each of the three ways, and asserts the destination's run state.
fn paused_guest_arrives(how: &[&str], status: &str) {
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    for row in [Row::Qemu10_0, Row::Qemu7_2] {
        let source = boot(row.builder());
        stop(&source);
        copy(&["--overwrite", &qmp(&source), &image]);
        for stream in [false, true] {
            let destination = waiting(row.builder());
            let stream = if stream { &["--stream"][..] } else { &[] };
            copy(&[how, stream, &[&image, &qmp(&destination)]].concat());
            assert_eq!(destination.qmp().status().unwrap(), status, "{row:?} {stream:?}");
        }
        source.qmp().execute("cont", Value::Null).unwrap();
        source.wait_counting(WITHIN).unwrap();
        stop(&source);
        let destination = waiting(row.builder());
        copy(&[how, &[&qmp(&source), &qmp(&destination)]].concat());
        assert_eq!(destination.qmp().status().unwrap(), status, "{row:?} relayed");
    }
}

#[test]
fn a_paused_guest_stays_paused() {
    if require_lab("a_paused_guest_stays_paused") {
        paused_guest_arrives(&[], "paused");
    }
}

#[test]
fn run_runs_a_guest_that_was_paused() {
    if require_lab("run_runs_a_guest_that_was_paused") {
        paused_guest_arrives(&["--run"], "running");
    }
}

#[test]
fn an_image_runs_on_as_its_guest_did() {
    if !require_lab("an_image_runs_on_as_its_guest_did") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let source = boot(Row::Qemu10_0.builder());
    copy(&[&qmp(&source), &image]);
    let counter = source.counter().unwrap();
    for how in [&["--stream"][..], &[]] {
        let destination = waiting(Row::Qemu10_0.builder());
        let done = completed(&[how, &[&image, &qmp(&destination)]].concat());
        assert_eq!(done["destination-state"], "running", "{done}");
        assert_eq!(destination.qmp().status().unwrap(), "running");
        assert!(destination.wait_counting(WITHIN).unwrap() > counter);
    }
}

#[test]
fn resume_runs_the_source_on_and_it_can_be_copied_again() {
    if !require_lab("resume_runs_the_source_on_and_it_can_be_copied_again") {
        return;
    }
    for row in [Row::Qemu10_0, Row::Qemu7_2] {
        let scratch = Scratch::new();
        let source = boot(row.builder());
        let done = completed(&["--resume", &qmp(&source), &scratch.text("first.img")]);
        assert_eq!(done["source-state"], "running", "{done}");
        assert_eq!(source.qmp().status().unwrap(), "running");
        source.wait_counting(WITHIN).unwrap();
        copy(&[&qmp(&source), &scratch.text("second.img")]);
        source.qmp().wait_status("postmigrate", WITHIN).unwrap();
        let third = [&qmp(&source)[..], &scratch.text("third.img")];
        let output = refused(1, &third);
        assert!(output.contains("run `cont`, or pass --resume"), "{output}");
        assert!(!scratch.path("third.img").exists());
        source.qmp().wait_status("postmigrate", WITHIN).unwrap();
        copy(&[&["--resume"], &third[..]].concat());
        source.wait_counting(WITHIN).unwrap();
        stop(&source);
        // Each image is the guest at its own moment.
        let mut counters = Vec::new();
        for image in ["first.img", "second.img", "third.img"] {
            let destination = waiting(row.builder());
            copy(&["--paused", &scratch.text(image), &qmp(&destination)]);
            if row == Row::Qemu10_0 {
                destination.check_filled().unwrap();
            }
            counters.push(destination.counter().unwrap());
        }
        assert!(counters.is_sorted_by(|first, second| first < second), "{counters:?}");
        assert!(source.counter().unwrap() > counters[2]);
    }
}

#[test]
fn an_image_goes_to_two_destinations() {
    if !require_lab("an_image_goes_to_two_destinations") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let source = boot(Row::Qemu10_0.builder());
    copy(&[&qmp(&source), &image]);
    let (one, two) = (waiting(Row::Qemu10_0.builder()), waiting(Row::Qemu10_0.builder()));
    let other = scratch.text("other.img");
    copy(&["--paused", &image, &qmp(&one), &qmp(&two), &other]);
    prove_equal(&source, &one);
    prove_equal(&source, &two);
    let three = waiting(Row::Qemu10_0.builder());
    copy(&["--paused", "--verify", &other, &qmp(&three)]);
    prove_equal(&source, &three);
}

#[test]
fn a_running_guest_goes_to_one_destination() {
    if !require_lab("a_running_guest_goes_to_one_destination") {
        return;
    }
    let scratch = Scratch::new();
    let source = boot(Row::Qemu10_0.builder());
    let (from, one, two) = (qmp(&source), scratch.text("one.img"), scratch.text("two.img"));
    let output = refused(2, &[&from, &one, &two]);
    let wanted = format!(
        "towline: 2 destinations, but {from} can be read only once: copy it to an image first, then the image to all of them\n"
    );
    assert_eq!(output, wanted);
    assert!(!scratch.path("one.img").exists() && !scratch.path("two.img").exists());
    source.wait_counting(WITHIN).unwrap();
}

#[test]
fn an_existing_image_is_not_replaced_without_overwrite() {
    if !require_lab("an_existing_image_is_not_replaced_without_overwrite") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("guest.img");
    std::fs::write(&image, "somebody's").unwrap();
    let source = boot(Row::Qemu10_0.builder());
    let output = refused(1, &[&qmp(&source), image.to_str().unwrap()]);
    let wanted = "exists already; choose another name, remove it, or pass --overwrite\n";
    let wanted = format!("towline: {} {wanted}", image.display());
    assert!(output.starts_with(&wanted), "{output}");
    assert_eq!(std::fs::read(&image).unwrap(), b"somebody's");
    assert_eq!(source.qmp().status().unwrap(), "running");
    source.wait_counting(WITHIN).unwrap();
}

#[test]
fn a_bandwidth_limit_applies_to_qemu_and_to_towline() {
    if !require_lab("a_bandwidth_limit_applies_to_qemu_and_to_towline") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let source = boot(Row::Qemu10_0.builder());
    // More than the guest's rate of writes, so it converges; with a limit, an image is streamed and not
    // loaded by QEMU.
    copy(&["--max-bandwidth", "1G", "--downtime-limit", "1000", &qmp(&source), &image]);
    let destination = waiting(Row::Qemu10_0.builder());
    let done = completed(&["--max-bandwidth", "1G", "--paused", &image, &qmp(&destination)]);
    assert_eq!(done["handed-over"], false, "{done}");
    prove_equal(&source, &destination);
}

#[test]
fn a_destination_that_does_not_fit_is_refused_before_anything_is_sent() {
    if !require_lab("a_destination_that_does_not_fit_is_refused_before_anything_is_sent") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let source = boot(Row::Qemu10_0.builder());
    let destination = waiting(Row::Qemu7_2.builder().memory_mib(128));
    let output = refused(1, &[&qmp(&source), &qmp(&destination)]);
    let machine = "the guest's machine type is pc-q35-10.0, there it is pc-q35-7.2 (start it with -machine pc-q35-10.0)";
    let memory =
        "RAM block \"pc.ram\" has 64 MiB (67108864 bytes) in the guest and 128 MiB (134217728 bytes) there";
    assert!(output.contains(machine) && output.contains(memory), "{output}");
    assert_eq!(source.qmp().status().unwrap(), "running");
    source.wait_counting(WITHIN).unwrap();
    copy(&[&qmp(&source), &image]);
    let output = refused(1, &[&image, &qmp(&destination)]);
    assert!(output.contains(machine) && output.contains(memory), "{output}");
    // It still waits: no migration was started.
    assert_eq!(destination.qmp().status().unwrap(), "inmigrate");
}
