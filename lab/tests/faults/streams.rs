//! Streams that would lose a guest or cannot be read, and peers that are not QEMU.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};
use towline_lab::{BootSector, Qemu, require_lab, wait_until};

use crate::support::{
    Fixture, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, listens_at,
    migrate, qmp, set, wait_stderr, waiting,
};

/// A source with these capabilities migrates to a towline that copies to `destination`, and must be refused.
fn refused(fixture: &Fixture, source: &Qemu, capabilities: &[&str], destination: &str, texts: &[&str]) {
    // A downtime of 1 ms allows two pages: a guest that keeps writing does not converge.
    set(source, capabilities, json!({ "max-bandwidth": 8 << 20, "downtime-limit": 1 }));
    let mut towline = fixture.towline(&format!("copy tcp:127.0.0.1:0 {destination}"));
    migrate(source, &listens_at(&mut towline));
    let finished = towline.wait(WITHIN).unwrap();
    println!("{}", finished.stderr);
    assert_safe(&finished, texts);
    // The source sees only the closed connection, or (without a return path) nothing: its status is not
    // asserted.
    wait_until("end of the migration", WITHIN, || {
        let status = source.qmp().execute("query-migrate", Value::Null)?["status"].take();
        Ok(["failed", "completed", "postcopy-paused"].contains(&status.as_str().unwrap_or("")).then_some(()))
    })
    .unwrap();
    assert_runs(source);
}

#[test]
fn a_stream_without_a_return_path_is_refused() {
    if !require_lab("a_stream_without_a_return_path_is_refused") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let destination = waiting(&guest());
    let text = "the stream opens no return path, so the source would not learn of a failure: set the capability return-path";
    refused(&fixture, &source, &["-return-path"], &fixture.name("guest.img"), &[text]);
    refused(&fixture, &source, &["-return-path"], &qmp(&destination), &[text]);
    assert_waits(&destination);
    fixture.assert_holds(&[]);
}

/// A relay has no memory that XBZRLE differences could be applied to.
#[test]
fn xbzrle_into_a_relay_is_refused() {
    if !require_lab("xbzrle_into_a_relay_is_refused") {
        return;
    }
    // Each synchronisation of the dirty log must find some pages: differences are so short that the passes
    // follow at once.
    let boot_sector =
        BootSector { fill_mib: 8, sweep_pages: 1024, steps_per_tick: 0, ..BootSector::default() };
    let writing = guest().boot_sector(boot_sector);
    let (fixture, source, destination) = (Fixture::new(), counting(writing.clone()), waiting(&writing));
    set(&source, &[], json!({ "xbzrle-cache-size": 64 << 20 }));
    let text = "the source sends XBZRLE, which only a destination with memory can read: set the capability xbzrle off";
    refused(&fixture, &source, &["+return-path", "+xbzrle"], &qmp(&destination), &[text]);
    assert_waits(&destination);
    fixture.assert_holds(&[]);
}

#[test]
fn postcopy_at_a_foreign_source_is_refused() {
    if !require_lab("postcopy_at_a_foreign_source_is_refused") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    refused(
        &fixture,
        &source,
        &["+return-path", "+postcopy-ram"],
        &fixture.name("guest.img"),
        &["postcopy", "switch", "postcopy-ram", "off at the source"],
    );
    fixture.assert_holds(&[]);
}

/// A connection that is not QEMU's does not replace the real source that comes after it; nothing hangs or
/// remains.
#[test]
fn foreign_connections_to_the_port_change_nothing() {
    if !require_lab("foreign_connections_to_the_port_change_nothing") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let image = fixture.name("guest.img");
    for lanes in [0, 2] {
        let line = format!("copy --overwrite --multifd-channels {lanes} tcp:127.0.0.1:0 {image}");
        let mut towline = fixture.towline(&line);
        let uri = listens_at(&mut towline);
        let address = uri.strip_prefix("tcp:").unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        for words in [&request[..], b"\0", b"", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8 garbage"] {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(words).unwrap();
            drop(stranger);
        }
        wait_stderr(&mut towline, "dropped an unrelated connection");
        // A peer that sends nothing and stays connected.
        let mut silent = TcpStream::connect(address).unwrap();
        let multifd = if lanes > 0 { "+multifd" } else { "-multifd" };
        set(&source, &["+return-path", multifd], json!({ "multifd-channels": 2 }));
        migrate(&source, &uri);
        let finished = towline.wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
        assert!(matches!(silent.read(&mut [0]), Ok(0) | Err(_)), "the listener is gone");
        source.qmp().wait_migration("completed", WITHIN).unwrap();
        source.qmp().execute("cont", Value::Null).unwrap();
        assert_runs(&source);
    }
    assert_ended(&fixture.run(&format!("inspect --verify {image}")), 0, &[]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

/// A correct header, and then garbage.
#[test]
fn a_stream_that_turns_into_garbage_is_refused() {
    if !require_lab("a_stream_that_turns_into_garbage_is_refused") {
        return;
    }
    let fixture = Fixture::new();
    for (words, text) in [
        (&b"QEVM\0\0\0\x02 and so on"[..], "stream version 2, expected 3"),
        (b"QEVM\0\0\0\x03\x33 what is this", "section type 0x33 where"),
        (b"QEVM\0\0\0\x03\x07\xff\xff\xff\xff", "is 4294967295 bytes long, the limit is 256"),
        (b"QEVM\0\0\0\x03\x07\0\0\0\x0bpc-q35-10.0", "closed the connection while"),
    ] {
        let mut towline = fixture.towline(&format!("copy tcp:127.0.0.1:0 {}", fixture.name("guest.img")));
        let uri = listens_at(&mut towline);
        let mut peer = TcpStream::connect(uri.strip_prefix("tcp:").unwrap()).unwrap();
        peer.write_all(words).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let finished = towline.wait(WITHIN).unwrap();
        println!("{}", finished.stderr);
        assert_safe(&finished, &[text]);
        fixture.assert_holds(&[]);
    }
}
