//! The other endpoints: `unix:`, `exec:`, `fd:`, and streams with features that a user's QEMU may enable.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::{UnixListener, UnixStream};

use serde_json::{Value, json};
use towline_lab::{BootSector, Qemu, Towline, require_lab, towline_binary, wait_until};

use crate::support::{
    Row, Scratch, WITHIN, boot, completed, copy, listening_on, migrate, migrate_as_set, prove_equal, qmp,
    refused, set_capability, set_lanes, start_copy, wait_migrated, waiting,
};

const ROWS: [Row; 2] = [Row::Qemu10_0, Row::Qemu7_2];

/// Restores a stored guest beside its original, and compares.
fn prove_stored(row: Row, source: &Qemu, image: &str) {
    let destination = waiting(row.builder());
    copy(&["--stream", "--verify", "--paused", image, &qmp(&destination)]);
    prove_equal(source, &destination);
}

#[test]
fn between_unix_sockets() {
    if !require_lab("between_unix_sockets") {
        return;
    }
    for (row, lanes) in [(Row::Qemu10_0, 0), (Row::Qemu10_0, 4), (Row::Qemu7_2, 0), (Row::Qemu7_2, 4)] {
        let scratch = Scratch::new();
        let there = format!("unix:{}", scratch.text("there"));
        let source = row.boot();
        let destination = waiting(row.builder().paused());
        set_lanes(&destination, lanes);
        destination.qmp().execute("migrate-incoming", json!({ "uri": there })).unwrap();
        let (count, here) = (lanes.to_string(), format!("unix:{}", scratch.text("here")));
        let mut towline = start_copy(&["--json", "--multifd-channels", &count, &here, &there]);
        assert_eq!(listening_on(&mut towline), here);
        migrate(&source, &here, lanes);
        towline.wait_done(WITHIN).unwrap();
        wait_migrated(&source);
        destination.qmp().wait_migration("completed", WITHIN).unwrap();
        prove_equal(&source, &destination);
        assert!(!scratch.path("here").exists(), "the name of a socket goes with its listener");
    }
}

#[test]
#[ignore = "nightly"]
fn from_a_socket_to_qmp_and_to_an_image() {
    if !require_lab("from_a_socket_to_qmp_and_to_an_image") {
        return;
    }
    for row in ROWS {
        let scratch = Scratch::new();
        let image = scratch.text("guest.img");
        let source = row.boot();
        let destination = waiting(row.builder());
        let waits = qmp(&destination);
        let to = [&["--multifd-channels", "4", "--paused"][..], &["--multifd-channels", "0", "--paused"]];
        for (lanes, to) in
            [(4, [to[0], &["tcp:127.0.0.1:0", &image]]), (0, [to[1], &["tcp:127.0.0.1:0", &waits]])]
        {
            let mut towline = start_copy(&[&["--json"], &to.concat()[..]].concat());
            migrate(&source, &listening_on(&mut towline), lanes);
            towline.wait_done(WITHIN).unwrap();
            wait_migrated(&source);
            if lanes > 0 {
                prove_stored(row, &source, &image);
                source.qmp().execute("cont", Value::Null).unwrap();
                source.wait_counting(WITHIN).unwrap();
            }
        }
        prove_equal(&source, &destination);
    }
}

#[test]
fn from_an_image_to_a_socket() {
    if !require_lab("from_an_image_to_a_socket") {
        return;
    }
    for (row, lanes) in [(Row::Qemu10_0, 4), (Row::Qemu7_2, 0)] {
        let scratch = Scratch::new();
        let image = scratch.text("guest.img");
        let source = row.boot();
        copy(&[&qmp(&source), &image]);
        let destination = waiting(row.builder().paused());
        let there = crate::support::listen(&destination, lanes);
        let done = completed(&["--multifd-channels", &lanes.to_string(), &image, &there]);
        assert_eq!(done["destination-state"], "loaded", "{done}");
        destination.qmp().wait_migration("completed", WITHIN).unwrap();
        prove_equal(&source, &destination);
    }
}

#[test]
fn through_a_command_that_keeps_the_stream() {
    if !require_lab("through_a_command_that_keeps_the_stream") {
        return;
    }
    for row in ROWS {
        let scratch = Scratch::new();
        let (image, again) = (scratch.text("guest.img"), scratch.text("again.img"));
        let (write, read) = (
            format!("exec:cat > {}", scratch.text("stream")),
            format!("exec:cat {}", scratch.text("stream")),
        );
        let source = row.boot();
        // A running guest would be ended though its arrival is unconfirmed.
        let output = refused(2, &["--return-path", "off", &qmp(&source), &write]);
        assert!(output.starts_with("towline: --return-path off with a running guest:"), "{output}");
        assert_ne!(source.qmp().status().unwrap(), "postmigrate");
        copy(&[&qmp(&source), &image]);
        copy(&["--return-path", "off", &image, &write]);
        copy(&["--return-path", "off", &read, &again]);
        prove_stored(row, &source, &again);
    }
}

#[test]
fn from_the_file_of_a_stock_migration() {
    if !require_lab("from_the_file_of_a_stock_migration") {
        return;
    }
    for row in ROWS {
        let scratch = Scratch::new();
        let (stream, image) = (scratch.text("stream"), scratch.text("guest.img"));
        let source = row.boot();
        migrate_as_set(&source, &format!("exec:cat > {stream}"));
        wait_migrated(&source);
        // The command may still be writing when QEMU is done; the stream itself contains its end.
        let read = format!("exec:cat {stream}");
        wait_until("whole stream", WITHIN, || {
            let finished = start_copy(&["--return-path", "off", &read, &image]).wait(WITHIN)?;
            Ok(finished.status.success().then_some(()))
        })
        .unwrap();
        prove_stored(row, &source, &image);
    }
}

/// Head of libvirt's file, before QEMU's stream: 92 bytes, and the domain's description.
fn libvirt_head() -> Vec<u8> {
    let description = b"<domain type='qemu'><name>a</name></domain>\0";
    let mut head = b"LibvirtQemudSave".to_vec();
    // Version, length of the description, the guest was running, uncompressed, offset of the cookie.
    for number in [2, description.len() as u32, 1, 0, 0] {
        head.extend(number.to_ne_bytes());
    }
    head.resize(92, 0);
    [&head, &description[..]].concat()
}

/// As `virsh save` does it: the guest is paused, and QEMU appends its stream to libvirt's file.
#[test]
fn from_a_file_of_virsh_save_a_guest_counts_on() {
    if !require_lab("from_a_file_of_virsh_save_a_guest_counts_on") {
        return;
    }
    for row in ROWS {
        let scratch = Scratch::new();
        let (save, image) = (scratch.text("vm.save"), scratch.text("guest.img"));
        std::fs::write(&save, libvirt_head()).unwrap();
        let source = row.boot();
        source.qmp().execute("stop", Value::Null).unwrap();
        let count = source.counter().unwrap();
        migrate_as_set(&source, &format!("exec:cat >> {save}"));
        wait_migrated(&source);
        wait_until("whole stream", WITHIN, || {
            let finished = start_copy(&["--overwrite", &save, &image]).wait(WITHIN)?;
            Ok(finished.status.success().then_some(()))
        })
        .unwrap();
        prove_stored(row, &source, &image);
        let destination = waiting(row.builder());
        let direct = refused(2, &["--run", &save, &qmp(&destination)]);
        assert!(direct.contains("goes by way of an image: `towline copy "), "{direct}");
        copy(&["--run", "--verify", &image, &qmp(&destination)]);
        let counted = || Ok((destination.counter()? > count).then_some(()));
        wait_until("a guest that counts on", WITHIN, counted).unwrap();
    }
}

#[test]
fn a_command_cannot_have_lanes() {
    let output = refused(2, &["--multifd-channels", "4", "exec:cat", "null:"]);
    let wanted = "towline: --multifd-channels 4 with exec:cat: only tcp:, unix:, ws:// and wss:// have several connections; leave the option out\n";
    assert_eq!(output, wanted);
}

#[test]
fn through_descriptors_that_were_inherited() {
    if !require_lab("through_descriptors_that_were_inherited") {
        return;
    }
    for row in ROWS {
        let scratch = Scratch::new();
        let image = scratch.text("guest.img");
        let listener = UnixListener::bind(scratch.path("here")).unwrap();
        let source = row.boot();
        migrate(&source, &format!("unix:{}", scratch.text("here")), 0);
        let (from, _) = listener.accept().unwrap();
        inheriting(from, &|endpoint| vec![endpoint, image.clone()]);
        wait_migrated(&source);

        let there = scratch.path("there");
        let incoming = format!("unix:{}", there.display());
        let destination = row.builder().incoming(&incoming).paused().start().unwrap();
        inheriting(UnixStream::connect(&there).unwrap(), &|endpoint| vec![image.clone(), endpoint]);
        destination.qmp().wait_migration("completed", WITHIN).unwrap();
        prove_equal(&source, &destination);
    }
}

/// Runs `towline copy` with one of our connections as `fd:N`; our own end of it is closed.
fn inheriting(connection: UnixStream, endpoints: &dyn Fn(String) -> Vec<String>) {
    let mut arguments = vec!["copy".to_owned()];
    arguments.extend(endpoints(format!("fd:{}", connection.as_raw_fd())));
    let towline =
        Towline::start_with(&towline_binary().unwrap(), arguments, None, &[connection.as_fd()]).unwrap();
    drop(connection);
    towline.wait_done(WITHIN).unwrap();
}

/// A guest that does not converge until `downtime-limit` is raised: two pages may be left at most, and each
/// synchronisation of the dirty log finds more.
#[test]
fn xbzrle_is_decoded() {
    if !require_lab("xbzrle_is_decoded") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let writing = || {
        let boot_sector =
            BootSector { fill_mib: 8, sweep_pages: 1024, steps_per_tick: 0, ..BootSector::default() };
        Row::Qemu10_0.builder().boot_sector(boot_sector)
    };
    let source = boot(writing());
    let mut towline = start_copy(&["--json", "tcp:127.0.0.1:0", &image]);
    let here = listening_on(&mut towline);
    set_capability(&source, "xbzrle", true);
    set_capability(&source, "return-path", true);
    let endless = json!({ "downtime-limit": 1, "max-bandwidth": 8 << 20, "xbzrle-cache-size": 64 << 20 });
    source.qmp().execute("migrate-set-parameters", endless).unwrap();
    source.qmp().execute("migrate", json!({ "uri": here })).unwrap();
    wait_until("pages sent as differences", WITHIN, || {
        let migration = source.qmp().execute("query-migrate", Value::Null)?;
        assert_ne!(migration["status"], "completed", "{migration}");
        Ok((migration["xbzrle-cache"]["pages"].as_u64() > Some(100)).then_some(()))
    })
    .unwrap();
    source.qmp().execute("migrate-set-parameters", json!({ "downtime-limit": 10_000 })).unwrap();
    towline.wait_done(WITHIN).unwrap();
    wait_migrated(&source);
    let destination = waiting(writing());
    copy(&["--stream", "--verify", "--paused", &image, &qmp(&destination)]);
    prove_equal(&source, &destination);
}
