//! Failures before and after the guest runs, and the reports of its place.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::thread;

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{BootSector, Towline, Version, require_lab, require_qemu, signal, wait_until};

use crate::support::{Stored, WITHIN, assert_ended, completed, prove_alive, qmp, run, small, waiting};

fn interrupt(towline: &Towline) {
    signal(towline.pid(), Signal::INT);
}

/// State of a running guest whose image has become unreadable.
const UNREADABLE: &str = "the guest: in its image, which cannot be read to its end; running at its destination: it lacks a part of its \
    memory, and stops where it needs that (postcopy-paused): if the image can be made whole again (a missing chunk or a file's content \
    put back), run `towline copy --postcopy --recover` with it and the same destination, which sends the rest; else end the destination, \
    and restore another image of the guest\n";

#[test]
fn options_that_exclude_postcopy_are_refused_before_the_copy() {
    if !require_lab("options_that_exclude_postcopy_are_refused_before_the_copy") {
        return;
    }
    let Stored { scratch, builder, image, count } = Stored::new();
    let destination = waiting(&builder);
    for (options, text) in [
        ("--multifd-channels 2", "no QEMU receives pages on lanes once it runs"),
        ("--compression zstd", "--compression applies to lanes"),
        ("--zero-copy-send on", "--zero-copy-send on applies to lanes"),
        ("--return-path off", "needs the return path"),
        ("--recover --paused", "leave --run and --paused out"),
    ] {
        let finished = run(&format!("copy --postcopy {options} {image} {}", qmp(&destination)));
        assert_ended(&finished, 2, &[text]);
    }
    assert_ended(
        &run(&format!("copy --postcopy {image} {}", scratch.text("new.img"))),
        2,
        &["that runs the guest"],
    );
    // A guest that does not fit is refused as always, and the destination is untouched.
    let other = waiting(&small(Version::V10_0).memory_mib(96));
    let finished = run(&format!("copy --postcopy {image} {}", qmp(&other)));
    assert_ended(&finished, 1, &["does not fit", "in its image"]);
    assert_eq!(
        completed(&run(&format!("copy --postcopy --json {image} {}", qmp(&destination))))["event"],
        "completed"
    );
    prove_alive(&destination, count);
}

#[test]
fn lanes_beside_postcopy_are_refused_by_a_qemu_that_has_none() {
    if !require_lab("lanes_beside_postcopy_are_refused_by_a_qemu_that_has_none") {
        return;
    }
    let builder = small(Version::V10_0);
    let (source, destination) = (builder.clone().start().unwrap(), waiting(&builder));
    let count = source.wait_counting(WITHIN).unwrap();
    let ends = format!("{} {}", qmp(&source), qmp(&destination));
    let output = ["--multifd-channels with --postcopy: QEMU 10.0", "came with 10.1: leave the option out"];
    assert_ended(&run(&format!("copy --postcopy --multifd-channels 2 {ends}")), 2, &output);
    prove_alive(&source, count);
    let done = completed(&run(&format!("copy --postcopy --json {ends}")));
    assert_eq!(done["multifd-channels"], 0, "{done}");
    prove_alive(&destination, count);
}

/// From QEMU 10.1 on the writes of an emulated guest are lost to a postcopy migration.
#[test]
fn a_running_guest_whose_writes_would_be_lost_is_refused() {
    let name = "a_running_guest_whose_writes_would_be_lost_is_refused";
    if !require_qemu(name, &[Version::Newest]) {
        return;
    }
    let builder = small(Version::Newest);
    let (source, destination) = (builder.clone().start().unwrap(), waiting(&builder));
    let count = source.wait_counting(WITHIN).unwrap();
    let line = format!("copy --postcopy {} {}", qmp(&source), qmp(&destination));
    let output = [
        "cannot send this guest: --postcopy with a running guest that QEMU",
        "emulates",
        "safe at its source",
    ];
    assert_ended(&run(&line), 1, &output);
    prove_alive(&source, count);
    source.qmp().execute("stop", Value::Null).unwrap();
    let (memory, line) = (source.memory_hash().unwrap(), format!("{line} --paused"));
    assert_ended(&run(&line), 0, &[]);
    assert_eq!(destination.memory_hash().unwrap(), memory);
    destination.qmp().execute("cont", Value::Null).unwrap();
    prove_alive(&destination, count);
}

#[test]
fn a_destination_that_disconnects_before_the_guest_runs_leaves_it_in_its_image() {
    if !require_lab("a_destination_that_disconnects_before_the_guest_runs_leaves_it_in_its_image") {
        return;
    }
    let Stored { scratch, image, .. } = Stored::new();
    // Reads the header and disconnects; the first time without a message, the second after a failure on the
    // return path.
    for answer in [&[][..], &[0, 1, 0, 4, 0, 0, 0, 1]] {
        let listener = UnixListener::bind(scratch.path("gone.sock")).unwrap();
        let gone = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 64]).unwrap() > 0);
            stream.write_all(answer).unwrap();
        });
        let finished = run(&format!("copy --postcopy {image} unix:{}", scratch.text("gone.sock")));
        gone.join().unwrap();
        assert_ended(&finished, 1, &["towline: ", "the guest: in its image, which is as it was"]);
        std::fs::remove_file(scratch.path("gone.sock")).unwrap();
    }
}

#[test]
fn a_destination_that_exits_after_the_guest_ran_is_reported() {
    if !require_lab("a_destination_that_exits_after_the_guest_ran_is_reported") {
        return;
    }
    let stored = Stored::new();
    let (destination, towline) = stored.restore_until_running("1M");
    destination.kill().unwrap();
    let finished = towline.wait(WITHIN).unwrap();
    assert_ended(
        &finished,
        3,
        &["the guest: in its image, which is as it was; its destination has ended: it may have run there"],
    );
}

#[test]
fn a_running_guest_is_too_late_to_cancel() {
    if !require_lab("a_running_guest_is_too_late_to_cancel") {
        return;
    }
    let stored = Stored::new();
    let (destination, mut towline) = stored.restore_until_running("2M");
    interrupt(&towline);
    crate::support::wait_event(&mut towline, "a notice that it is too late", |event| {
        event["text"].as_str().is_some_and(|text| text.contains("too late to cancel"))
    });
    assert_eq!(completed(&towline.wait(WITHIN).unwrap())["destination-state"], "running");
    prove_alive(&destination, stored.count);
}

#[test]
fn damage_that_is_found_when_the_guest_runs_is_named() {
    if !require_lab("damage_that_is_found_when_the_guest_runs_is_named") {
        return;
    }
    let Stored { scratch: _scratch, builder, image, .. } = Stored::new();
    let mut bytes = std::fs::read(&image).unwrap();
    // The head of a page that is not written, and not requested at once.
    let page = &BootSector::default().page(3000)[..64];
    let at = bytes.windows(64).position(|window| window == page).unwrap();
    bytes[at + 2000] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let destination = waiting(&builder);
    let finished = run(&format!("copy --postcopy --verify {image} {}", qmp(&destination)));
    // Its QEMU is slow now and then: the damage is found before it runs anything, or has loaded the devices and
    // not begun to run, when a broken connection ends it.
    let end = "the guest: in its image, which is as it was; its destination has ended: it may have run there";
    match finished.status.code() {
        Some(1) => assert_ended(&finished, 1, &["pc.ram", "the guest: in its image"]),
        _ if finished.stderr.contains(end) => {
            assert_ended(&finished, 3, &["pc.ram", end]);
            // It says so before it ends itself, in which a QEMU has been seen to hang.
            let failed = "postcopy_ram_listen_thread: loadvm failed";
            let has_failed =
                || destination.stderr().contains(failed) || destination.exited().unwrap().is_some();
            let ended = wait_until("the end of the destination", WITHIN, || Ok(has_failed().then_some(())));
            ended.unwrap_or_else(|error| panic!("{error:#}: {}", destination.stderr()));
        }
        _ => assert_ended(&finished, 3, &["pc.ram", UNREADABLE]),
    }
}

#[test]
fn an_image_that_is_cut_short_when_the_guest_runs_is_named() {
    if !require_lab("an_image_that_is_cut_short_when_the_guest_runs_is_named") {
        return;
    }
    let stored = Stored::new();
    let (_destination, towline) = stored.restore_until_running("1M");
    let image = &stored.image;
    std::fs::File::options().write(true).open(image).unwrap().set_len(2 << 20).unwrap();
    let finished = towline.wait(WITHIN).unwrap();
    let named = format!("{image}: not all of it could be read: the file has 2097152 bytes, expected ");
    assert_ended(&finished, 3, &[&named, UNREADABLE]);
}
