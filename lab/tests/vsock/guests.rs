//! Several guests: with each other, and without each other's harm; and one that is moved.

use std::io::{Read as _, Write as _};

use serde_json::json;
use tempfile::TempDir;
use towline_lab::{LinuxGuest, Qemu, Version, require_lab, towline};

use crate::support::{
    WITHIN, connect, device_arguments, install_perl, linux, perl, shell, start_device, wait_said,
};

fn is_reset(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::ConnectionReset
}

fn echoes(uds: &std::path::Path) {
    let mut stream = connect(uds, 5001);
    stream.write_all(b"are you there").unwrap();
    let mut heard = [0; 13];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"are you there");
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
    shell(
        &mut guests[0],
        "CID=34 /usr/bin/perl /tmp/v.pl connect stream 5002 ask hello you > /tmp/ask 2>&1 & echo",
    );
    wait_said(&mut guests[0], "ask", "answered heard 8");
    // One that has no such group, or that is not there at all.
    shell(
        &mut guests[0],
        "CID=35 /usr/bin/perl /tmp/v.pl connect stream 5002 ask x > /tmp/nobody 2>&1 & echo",
    );
    assert!(wait_said(&mut guests[0], "nobody", "refused").contains("reset"));
    drop(guests.remove(0));
    let mut qemus = qemus.into_iter();
    drop(qemus.next());
    echoes(&path("v34"));
    assert!(device.runs().unwrap());
}

/// Stock QEMU does not migrate the device: it is taken out, and put in again at the other side. Who listens in the guest
/// goes on listening.
#[test]
fn a_guest_is_moved_without_its_device_and_finds_another() {
    if !require_lab("a_guest_is_moved_without_its_device_and_finds_another") {
        return;
    }
    let scratch = TempDir::with_prefix("towline-lab-").unwrap();
    let path = |name: &str| scratch.path().join(name);
    let start = |name: &str| {
        let (socket, uds) = (path(&format!("{name}.d")), path(&format!("{name}.v")));
        let arguments = ["--socket", socket.to_str().unwrap(), "--cid", "33", "--uds", uds.to_str().unwrap()];
        let device = start_device(&arguments, &socket);
        let root = "pcie-root-port,id=plug,chassis=1,slot=1";
        let chardev = format!("socket,id=vsock,path={}", socket.display());
        let qemu = linux(Version::V10_0).cpu("Nehalem");
        let qemu = qemu.args(["-device", root, "-chardev", &chardev].map(str::to_owned));
        (device, qemu, uds)
    };
    let (_device_a, a, uds_a) = start("a");
    let a = a.args(["-device", "vhost-user-vsock-pci,id=vsock0,bus=plug,chardev=vsock"].map(str::to_owned));
    let a = a.start().unwrap();
    let mut guest = a.linux(WITHIN).unwrap();
    install_perl(&mut guest);
    perl(&mut guest, "echo", "listen stream 5001 echo");
    echoes(&uds_a);
    let mut before = connect(&uds_a, 5001);
    let (_device_b, b, uds_b) = start("b");
    let b = b.incoming_defer().start().unwrap();

    a.qmp().execute("device_del", json!({"id": "vsock0"})).unwrap();
    a.qmp().wait_event("DEVICE_DELETED", WITHIN).unwrap();
    drop(guest);
    let qmp = |qemu: &Qemu| format!("qmp:{}", qemu.qmp_path().display());
    towline(["move", "--json", &qmp(&a), &qmp(&b)]).unwrap().wait_done(WITHIN).unwrap();
    // The connection went with the source, whose QEMU had kept its end of the device's socket until then.
    let ended = before.read(&mut [0]);
    assert!(matches!(&ended, Ok(0)) || ended.as_ref().is_err_and(is_reset), "{ended:?}");
    let device = json!({"driver": "vhost-user-vsock-pci", "id": "vsock0", "bus": "plug", "chardev": "vsock"});
    b.qmp().execute("device_add", device).unwrap();
    let mut guest = b.linux(WITHIN).unwrap();
    wait_said(&mut guest, "echo", "listening");
    towline_lab::wait_until("the device in the guest", WITHIN, || {
        let bound = guest.shell("ls /sys/bus/virtio/drivers/vmw_vsock_virtio_transport/", WITHIN)?;
        Ok(bound.contains("virtio").then_some(()))
    })
    .unwrap();
    echoes(&uds_b);
}
