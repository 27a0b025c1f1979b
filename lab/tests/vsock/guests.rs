//! Several guests: connections between them, isolation from each other, and one that is moved.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use towline_lab::expect::{assert_ended, qmp};
use towline_lab::{
    Builder, Finished, LinuxGuest, Qemu, Qmp, Towline, Version, require_lab, towline, towline_binary,
    wait_until,
};

use crate::support::{
    WITHIN, connect, device_arguments, install_perl, linux, perl, shell, start_device, wait_output,
};

fn echoes(uds: &Path) {
    let mut stream = connect(uds, 5001);
    stream.write_all(b"are you there").unwrap();
    let mut received = [0; 13];
    stream.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"are you there");
}

#[test]
fn guests_of_one_process_reach_each_other_and_survive_each_other() {
    if !require_lab("guests_of_one_process_reach_each_other_and_survive_each_other") {
        return;
    }
    let scratch = TempDir::with_prefix("towline-lab-").unwrap();
    let path = |name: &str| scratch.path().join(name);
    let guest = |cid: u64| {
        let (socket, uds) = (path(&format!("d{cid}")), path(&format!("v{cid}")));
        format!("cid={cid},socket={},uds={},group=lab", socket.display(), uds.display())
    };
    let arguments = ["--guest", &guest(33), "--guest", &guest(34)].map(str::to_owned);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut device = start_device(&arguments, &path("d34"));
    let qemus: Vec<Qemu> = [33, 34]
        .map(|cid| linux(Version::V10_0).args(device_arguments(&path(&format!("d{cid}")))).start().unwrap())
        .into();
    let mut guests: Vec<LinuxGuest> = qemus.iter().map(|qemu| qemu.linux(WITHIN).unwrap()).collect();
    guests.iter_mut().for_each(install_perl);
    perl(&mut guests[1], "answer", "listen stream 5002 answer");
    perl(&mut guests[1], "echo", "listen stream 5001 echo");
    shell(&mut guests[0], "CID=34 perl /tmp/v.pl connect stream 5002 ask hello you > /tmp/ask 2>&1 & echo");
    wait_output(&mut guests[0], "ask", "answered received 8");
    // A CID without a common group, or of no guest.
    shell(&mut guests[0], "CID=35 perl /tmp/v.pl connect stream 5002 ask x > /tmp/reset 2>&1 & echo");
    assert!(wait_output(&mut guests[0], "reset", "refused").contains("reset"));
    drop(guests.remove(0));
    let mut qemus = qemus.into_iter();
    drop(qemus.next());
    echoes(&path("v34"));
    assert!(device.runs().unwrap());
}

const ROOT_PORT: &str = "pcie-root-port,id=plug,chassis=1,slot=1";

/// A device, the builder of a QEMU whose guest can have it in a port, and the path of the host's socket.
fn plugged(scratch: &TempDir, name: &str) -> (Towline, Builder, PathBuf) {
    let path = |end: &str| scratch.path().join(format!("{name}.{end}"));
    let (socket, uds) = (path("d"), path("v"));
    let arguments = ["--socket", socket.to_str().unwrap(), "--cid", "33", "--uds", uds.to_str().unwrap()];
    let device = start_device(&arguments, &socket);
    let chardev = format!("socket,id=vsock,path={}", socket.display());
    let qemu = linux(Version::V10_0).cpu("Nehalem");
    (device, qemu.args(["-device", ROOT_PORT, "-chardev", &chardev].map(str::to_owned)), uds)
}

/// Starts a move that would never end, and waits until memory is sent and the device is unplugged.
fn under_way(orders: &[String], control: &Path) -> Towline {
    let slowly = ["--multifd-channels", "0", "--max-bandwidth", "200", "--qmp", control.to_str().unwrap()];
    // The files of a killed one are removed with the test.
    let directory = format!("TMPDIR={}", control.parent().unwrap().display());
    let binary = towline_binary().unwrap().display().to_string();
    let line = [directory.as_str(), &binary].into_iter().chain(orders.iter().map(String::as_str));
    let mut moving = Towline::start(Path::new("/usr/bin/env"), line.chain(slowly)).unwrap();
    wait_until("a move under way", WITHIN, || {
        assert!(moving.runs()?, "it ended: {}", moving.stderr());
        let answer = Qmp::connect(control, WITHIN).and_then(|qmp| qmp.execute("query-migrate", json!({})));
        Ok(answer.is_ok_and(|answer| answer["status"] == "active").then_some(()))
    })
    .unwrap();
    moving
}

/// Cancels such a move.
fn cancelled(orders: &[String], control: &Path) -> Finished {
    let moving = under_way(orders, control);
    Qmp::connect(control, WITHIN).unwrap().execute("migrate_cancel", json!({})).unwrap();
    moving.wait(WITHIN).unwrap()
}

/// Stock QEMU does not migrate the device: it is unplugged, and plugged at the destination, or at the source
/// again if the move is cancelled. A listener in the guest keeps listening.
#[test]
fn a_guest_is_moved_with_its_device_unplugged_and_replaced() {
    if !require_lab("a_guest_is_moved_with_its_device_unplugged_and_replaced") {
        return;
    }
    let scratch = TempDir::with_prefix("towline-lab-").unwrap();
    let (_device_a, a, uds_a) = plugged(&scratch, "a");
    let a = a.args(["-device", "vhost-user-vsock-pci,id=vsock0,bus=plug,chardev=vsock"].map(str::to_owned));
    let (a, mut guest) = a.boot(WITHIN).unwrap();
    install_perl(&mut guest);
    perl(&mut guest, "echo", "listen stream 5001 echo");
    drop(guest);
    echoes(&uds_a);
    let mut before = connect(&uds_a, 5001);
    let orders = |to: &Qemu| ["move".to_owned(), "--detach-vsock".to_owned(), qmp(&a), qmp(to)];

    // A destination that could not have it: the device is not touched.
    let bare = linux(Version::V10_0).cpu("Nehalem").args(["-device", ROOT_PORT]);
    let bare = bare.incoming_defer().start().unwrap();
    let refused = towline(orders(&bare)).unwrap().wait(WITHIN).unwrap();
    assert_ended(&refused, 1, &["no -chardev with the id \"vsock\""]);
    before.write_all(b"still there").unwrap();
    before.read_exact(&mut [0; 11]).unwrap();

    // A move that is cancelled when the device is unplugged: it is plugged again where it was.
    let (_device_b, b, _) = plugged(&scratch, "b");
    let b = b.incoming_defer().start().unwrap();
    let finished = cancelled(&orders(&b), &scratch.path().join("control"));
    assert_ended(&finished, 1, &["safe at its source"]);
    // The connection ended with the device.
    let mut received = Vec::new();
    let _ = before.read_to_end(&mut received);
    assert!(received.is_empty());
    echoes(&uds_a);

    // A move whose towline is killed then: `repair` plugs it again.
    let (_device_k, k, _) = plugged(&scratch, "k");
    let k = k.incoming_defer().start().unwrap();
    under_way(&orders(&k), &scratch.path().join("control-k")).kill().unwrap();
    let repaired = towline(["repair".to_owned(), qmp(&a)]).unwrap().wait_done(WITHIN).unwrap();
    assert!(repaired.stdout.contains("device vsock0 plugged again"), "{}", repaired.stdout);
    towline(["repair".to_owned(), qmp(&k)]).unwrap().wait_done(WITHIN).unwrap();
    echoes(&uds_a);

    // A destination that can have it.
    let (_device_c, c, uds_c) = plugged(&scratch, "c");
    let c = c.incoming_defer().start().unwrap();
    towline(orders(&c)).unwrap().wait_done(WITHIN).unwrap();
    echoes(&uds_c);
    let mut guest = c.linux(WITHIN).unwrap();
    wait_output(&mut guest, "echo", "listening");
}
