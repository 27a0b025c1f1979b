//! Each failure names its true cause, once, and what to do.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::expect::{Scratch, assert_ended, events, qmp};
use towline_lab::{BootSector, Finished, Qemu, Version, require_lab, signal, towline, wait_until};

const WITHIN: Duration = Duration::from_secs(60);

fn run(arguments: &str) -> Finished {
    towline(arguments.split(' ')).unwrap().wait(WITHIN).unwrap()
}

/// Runs these arguments and asserts the exit status, and that the text has these parts and each line of it
/// once.
#[track_caller]
fn assert_cause(arguments: &str, code: i32, parts: &[&str]) {
    let finished = run(arguments);
    assert_ended(&finished, code, parts);
    let causes = finished.stderr.matches("No such file or directory").count();
    assert!(causes <= 1, "the cause is named {causes} times: {}", finished.stderr);
    assert!(!finished.stderr.contains("          "), "{}", finished.stderr);
}

#[test]
fn a_failure_names_its_true_cause() {
    let scratch = Scratch::new();
    let file = scratch.text("file");
    std::fs::write(&file, "not a socket").unwrap();
    let nowhere = scratch.text("nowhere/a.sock");
    let directory = format!("{} is not a directory; create it", scratch.text("nowhere"));
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port();
    let image = scratch.text("a.img");
    for (arguments, code, parts) in [
        ("net --tap averyverylongtapname0 --socket /tmp/a".into(), 2, &["at most 15 bytes"][..]),
        (format!("net --socket {nowhere} --tap tlnowhere"), 1, &[&*directory]),
        (format!("vsock --socket {nowhere} --cid 9"), 1, &[&*directory]),
        (
            format!("vsock --socket {} --cid 9 --uds {nowhere}", scratch.text("v.sock")),
            1,
            &["create its directory"],
        ),
        (format!("inspect qmp:{file}"), 1, &["it is not a socket"]),
        (format!("copy qmp:{file} {image}"), 1, &["it is not a socket", "its QEMU was not reached"]),
        (format!("copy tcp:127.0.0.1:{port} {image}"), 1, &["in use", "its QEMU was not reached"]),
    ] {
        assert_cause(&arguments, code, parts);
    }
}

#[test]
fn a_cancelled_wait_says_that_no_source_was_reached() {
    let scratch = Scratch::new();
    for source in [format!("qmp:{}", scratch.text("missing.qmp")), "tcp:127.0.0.1:0".to_owned()] {
        let mut copy = towline(["copy", source.as_str(), scratch.text("a.img").as_str()]).unwrap();
        wait_until("its notice", WITHIN, || {
            assert!(copy.runs()?);
            let text = copy.stderr();
            Ok((text.contains("waiting for up to") || text.contains("listening on")).then_some(()))
        })
        .unwrap();
        signal(copy.pid(), Signal::INT);
        assert_ended(&copy.wait(WITHIN).unwrap(), 1, &["cancelled", "its QEMU was not reached"]);
    }
}

fn small() -> Qemu {
    let boot_sector = BootSector { fill_mib: 2, sweep_pages: 16, ..BootSector::default() };
    let qemu = Qemu::builder(Version::V10_0).memory_mib(16).boot_sector(boot_sector).start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

#[test]
fn a_copy_of_a_qemu_to_itself_is_refused() {
    if !require_lab("a_copy_of_a_qemu_to_itself_is_refused") {
        return;
    }
    let qemu = small();
    let link = qemu.directory().join("link.qmp");
    std::os::unix::fs::symlink(qemu.qmp_path(), &link).unwrap();
    for destination in [qmp(&qemu), format!("qmp:{}", link.display())] {
        let finished = run(&format!("copy {} {destination}", qmp(&qemu)));
        assert_ended(&finished, 2, &["SOURCE and DEST are the same QEMU"]);
    }
    assert_eq!(qemu.qmp().status().unwrap(), "running");
}

#[test]
fn an_image_that_is_cut_within_its_pages_is_reported_as_such() {
    if !require_lab("an_image_that_is_cut_within_its_pages_is_reported_as_such") {
        return;
    }
    let (qemu, scratch) = (small(), Scratch::new());
    let image = scratch.text("a.img");
    assert_ended(&run(&format!("copy {} {image}", qmp(&qemu))), 0, &[]);
    let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    file.set_len(4 << 20).unwrap();
    assert_cause(&format!("inspect {image}"), 1, &["truncated", "inside the pages"]);
}

#[test]
fn a_refused_run_has_an_identifier() {
    let scratch = Scratch::new();
    let finished = run(&format!("run --json --qemu /nowhere/qemu {}", scratch.text("a.img")));
    let last = events(&finished.stdout).pop().unwrap();
    assert_eq!((last["event"].as_str(), last["exit"].as_u64()), (Some("failed"), Some(1)), "{last}");
    assert_eq!(last["reason"], Value::from("image"));
}

/// A card's socket closes a connection that asks for a port, as a vsock without a listener does.
#[test]
fn a_connection_to_another_device_names_that_possibility() {
    let scratch = Scratch::new();
    let path = scratch.path("net.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let card = std::thread::spawn(move || drop(listener.accept().unwrap()));
    assert_cause(&format!("vsock connect {} 52", path.display()), 1, &["the socket of its vsock device"]);
    card.join().unwrap();
}
