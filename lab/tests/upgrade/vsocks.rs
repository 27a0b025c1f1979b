//! A guest with a vhost-user-vsock continues in another QEMU, which gets the device once it runs the guest.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use tempfile::TempDir;
use towline_lab::{Qemu, Version, require_lab};

use crate::support::{Guest, WITHIN, named_file, program};
use crate::vsock::{connect, install_perl, perl, read_all, start_device, wait_output};

const PORT: u32 = 5001;
const BYTES: &[u8] = b"from the host to the guest and back";

fn echo(stream: &mut UnixStream) {
    stream.write_all(BYTES).unwrap();
    let mut found = [0; BYTES.len()];
    stream.read_exact(&mut found).unwrap();
    assert_eq!(found, BYTES);
}

/// Twice, because the new QEMU has the device plugged in, and not on its command line.
#[test]
fn a_vsock_is_plugged_in_again_in_each_new_qemu() {
    if !require_lab("a_vsock_is_plugged_in_again_in_each_new_qemu") {
        return;
    }
    let scratch = TempDir::with_prefix("towline-lab-").unwrap();
    let [socket, uds] = ["d", "v"].map(|name| scratch.path().join(name));
    let device = start_device(
        &["--socket", socket.to_str().unwrap(), "--cid", "33", "--uds", uds.to_str().unwrap()],
        &socket,
    );
    let guest = Guest::boot(|place| {
        let builder = Qemu::builder(Version::V10_0).cpu("Nehalem").linux();
        let builder = builder.guest_programs(["/usr/bin/socat", "/usr/bin/perl"]);
        named_file(builder, Version::V10_0.machine(), place, 256).args([
            "-device".to_owned(),
            "pcie-root-port,id=plug,chassis=1,slot=1".to_owned(),
            "-chardev".to_owned(),
            format!("socket,id=vsock,path={}", socket.display()),
            "-device".to_owned(),
            "vhost-user-vsock-pci,id=vsock0,bus=plug,chardev=vsock".to_owned(),
        ])
    });
    let mut agent = guest.linux();
    install_perl(&mut agent);
    perl(&mut agent, "echo", &format!("listen stream {PORT} echo"));
    drop(agent);
    let mut stream = connect(&uds, PORT);
    echo(&mut stream);
    let new = program(Version::V10_0);
    let refused = guest.upgrade(&["--qemu", &new], &[]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("--detach-vsock"), "{}", refused.stderr);
    echo(&mut stream);
    for _ in 0..2 {
        guest.upgrade_with(Version::V10_0, &["--detach-vsock"]);
        guest.assert_runs_in(Version::V10_0);
        // Its connections have ended, and its listener has not.
        assert_eq!(read_all(&mut stream), b"");
        stream = connect(&uds, PORT);
        echo(&mut stream);
        wait_output(&mut guest.linux(), "echo", "listening");
    }
    drop(stream);
    drop(device);
}
