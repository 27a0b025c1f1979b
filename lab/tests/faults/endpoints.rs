//! Endpoints that are in use, missing, busy, or in the wrong state.

use std::os::unix::net::{UnixListener, UnixStream};

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::{Qemu, Qmp, require_lab};

use crate::support::{
    Fixture, SLOW, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, listens_at,
    migrate, qmp, save, set, signal, wait_transferred, waiting,
};

#[test]
fn a_socket_path_in_use_is_refused_and_a_stale_one_replaced() {
    if !require_lab("a_socket_path_in_use_is_refused_and_a_stale_one_replaced") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let (path, socket, image) = (fixture.path("s.sock"), fixture.name("s.sock"), fixture.name("guest.img"));
    let line = format!("copy unix:{socket} {image}");
    let live = UnixListener::bind(&path).unwrap();
    assert_safe(&fixture.run(&line), &[&socket, "is in use by a listening process; choose another path"]);
    assert!(UnixStream::connect(&path).is_ok(), "it still listens");
    fixture.assert_holds(&["s.sock"]);
    // The file of a listener that has exited.
    drop(live);
    assert!(path.exists());
    let mut towline = fixture.towline(&line);
    listens_at(&mut towline);
    set(&source, &["+return-path"], json!({}));
    migrate(&source, &format!("unix:{socket}"));
    assert_ended(&towline.wait(WITHIN).unwrap(), 0, &[]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    std::fs::write(&path, "a file").unwrap();
    let finished = fixture.run(&format!("copy --overwrite unix:{socket} {image}"));
    assert_safe(&finished, &[&socket, "is in use by a file that is not a socket"]);
    let finished = fixture.run(&format!("copy {image} unix:{}", fixture.name("missing.sock")));
    assert_safe(&finished, &[&fixture.name("missing.sock"), "No such file or directory"]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json", "s.sock"]);
}

#[test]
fn a_qmp_socket_that_is_missing_wrong_or_busy_is_named() {
    if !require_lab("a_qmp_socket_that_is_missing_wrong_or_busy_is_named") {
        return;
    }
    let (fixture, source, destination) = (Fixture::new(), counting(guest()), waiting(&guest()));
    let both = |bad: &str, texts: &[&str]| {
        let image = fixture.name("guest.img");
        for (line, guest) in [
            (format!("copy qmp:{bad} {image}"), "the guest: not touched; its QEMU was not reached"),
            (format!("copy {} qmp:{bad}", qmp(&source)), "the guest: safe at its source"),
            (format!("copy qmp:{bad} {}", qmp(&destination)), "the guest: not touched"),
        ] {
            assert_safe(&fixture.run(&line), &[texts, &[guest]].concat());
        }
    };
    let missing = fixture.name("missing.qmp");
    both(&missing, &["no QMP socket at ", &missing, "check the path, or start QEMU with -qmp unix:"]);
    std::fs::write(fixture.path("file"), "a file").unwrap();
    both(&fixture.name("file"), &[&fixture.name("file")]);
    // A human monitor (HMP).
    let people =
        counting(guest().args(["-monitor", &format!("unix:{},server=on,wait=off", fixture.name("human"))]));
    both(&fixture.name("human"), &[&fixture.name("human"), "is not a QMP socket", "human monitor"]);
    drop(people);
    // A monitor that another client holds: towline cannot tell that from a QEMU that hangs, and reports both.
    let _holder = Qmp::connect(&destination.qmp_path(), WITHIN).unwrap();
    let finished = fixture.run(&format!("copy {} {}", qmp(&source), qmp(&destination)));
    let held = destination.qmp_path().display().to_string();
    assert_safe(&finished, &["no QMP greeting on ", &held, "another client holds this monitor"]);
    assert_runs(&source);
    assert_waits(&destination);
    std::fs::remove_file(fixture.path("human")).ok();
    fixture.assert_holds(&["file"]);
}

#[test]
fn a_qemu_in_the_wrong_state_is_refused() {
    if !require_lab("a_qemu_in_the_wrong_state_is_refused") {
        return;
    }
    let fixture = Fixture::new();
    let (source, other, destination) = (counting(guest()), counting(guest()), waiting(&guest()));
    let image = fixture.name("guest.img");
    save(&fixture, guest(), "guest.img");
    for from in [qmp(&source), image.clone()] {
        let finished = fixture.run(&format!("copy --stream {from} {}", qmp(&other)));
        assert_safe(
            &finished,
            &["does not wait for a guest (its status is `running`): start it with `-incoming defer`"],
        );
    }
    let finished = fixture.run(&format!("copy {} {}", qmp(&destination), fixture.name("new.img")));
    assert_safe(&finished, &["has no guest to copy: its status is `inmigrate`; is this the destination?"]);
    assert_runs(&other);
    assert_waits(&destination);
    // Another client's migration is under way.
    let socket = fixture.path("other.sock");
    let sink = UnixListener::bind(&socket).unwrap();
    migrate(&source, &format!("unix:{}", socket.display()));
    let (_peer, _) = sink.accept().unwrap();
    let finished = fixture.run(&format!("copy {} {}", qmp(&source), fixture.name("new.img")));
    assert_safe(
        &finished,
        &["is migrating already (status ", "wait for it, or cancel it (`migrate_cancel`)"],
    );
    let status = source.qmp().execute("query-migrate", Value::Null).unwrap();
    assert!(["setup", "active"].contains(&status["status"].as_str().unwrap()), "left alone: {status}");
    drop(_peer);
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert_runs(&source);
    std::fs::remove_file(socket).unwrap();
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

/// A destination that listens at the address on its command line.
#[test]
fn a_destination_that_listens_elsewhere_is_refused() {
    if !require_lab("a_destination_that_listens_elsewhere_is_refused") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let uri = format!("unix:{}", fixture.name("incoming.sock"));
    let destination = guest().incoming(&uri).start().unwrap();
    let finished = fixture.run(&format!("copy {} {}", qmp(&source), qmp(&destination)));
    assert_safe(&finished, &["already waits for a guest at the address on its command line"]);
    assert_waits(&destination);
    assert_runs(&source);
}

#[test]
fn a_guest_that_cannot_be_migrated_is_refused_with_qemus_reason() {
    if !require_lab("a_guest_that_cannot_be_migrated_is_refused_with_qemus_reason") {
        return;
    }
    let (fixture, destination) = (Fixture::new(), waiting(&guest()));
    // One device blocks migration from the start, the other only when a migration is started.
    let shared =
        ["-object", "memory-backend-ram,id=shm,size=1M,share=on", "-device", "ivshmem-plain,memdev=shm"];
    let disk = ["-device", "nvme,serial=1"];
    for (device, name) in [(&shared[..], "ivshmem"), (&disk[..], "nvme")] {
        let source: Qemu = counting(guest().args(device.iter().copied()));
        let finished = fixture.run(&format!("copy {} {}", qmp(&source), fixture.name("guest.img")));
        println!("{}", finished.stderr);
        assert_safe(&finished, &["QEMU on ", name]);
        assert_runs(&source);
        fixture.assert_holds(&[]);
    }
    assert_waits(&destination);
}

#[test]
fn an_image_that_exists_or_is_being_written_is_not_replaced() {
    if !require_lab("an_image_that_exists_or_is_being_written_is_not_replaced") {
        return;
    }
    let fixture = Fixture::new();
    let (source, other) = (counting(guest()), counting(guest()));
    let image = fixture.name("guest.img");
    let mut first = fixture.towline(&format!("copy --json --max-bandwidth 1M {} {image}", qmp(&source)));
    wait_transferred(&mut first, 1 << 20);
    for options in ["", "--overwrite "] {
        let finished = fixture.run(&format!("copy {options}{} {image}", qmp(&other)));
        assert_safe(
            &finished,
            &[&image, "another process is writing this file", "wait for it, or choose another name"],
        );
        assert_runs(&other);
    }
    assert!(first.runs().unwrap(), "the first continues: {}", first.stderr());
    signal(first.pid(), Signal::INT);
    assert_safe(&first.wait(WITHIN).unwrap(), &["cancelled"]);
    fixture.assert_holds(&[]);
    assert_ended(&fixture.run(&format!("copy --resume {} {image}", qmp(&source))), 0, &[]);
    let old = std::fs::read(&image).unwrap();
    let text = "exists already; choose another name, remove it, or pass --overwrite";
    assert_safe(&fixture.run(&format!("copy {} {image}", qmp(&other))), &[&image, text]);
    assert_runs(&other);
    // A failed overwrite leaves the old image, a successful one replaces it together with its manifest.
    let mut failing = fixture.towline(&format!("copy --json --overwrite {SLOW} {} {image}", qmp(&other)));
    wait_transferred(&mut failing, 1 << 20);
    signal(failing.pid(), Signal::TERM);
    assert_safe(&failing.wait(WITHIN).unwrap(), &["cancelled"]);
    assert!(std::fs::read(&image).unwrap() == old, "the old image");
    assert_ended(&fixture.run(&format!("inspect --verify {image}")), 0, &[]);
    assert_ended(&fixture.run(&format!("copy --overwrite {} {image}", qmp(&other))), 0, &[]);
    assert!(std::fs::read(&image).unwrap() != old, "the new image");
    assert_ended(&fixture.run(&format!("inspect --verify {image}")), 0, &[]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

/// QEMU connects to a socket below TMPDIR, from another working directory.
#[test]
fn a_relative_directory_for_temporary_files_is_found_by_qemu() {
    if !require_lab("a_relative_directory_for_temporary_files_is_found_by_qemu") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let work = fixture.path("");
    let line = format!("copy --resume {} {}", qmp(&source), fixture.name("guest.img"));
    let by = ["env", "-C", work.to_str().unwrap(), "TMPDIR=../tmp"];
    assert_ended(&fixture.start(&by, &line).wait(WITHIN).unwrap(), 0, &[]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    assert_runs(&source);
}
