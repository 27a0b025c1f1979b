//! Known defects of other backends, one after the other on one guest.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use crate::support::{Fixture, expect_ok, patient, read_all};

/// Needs an echo on port 5001.
pub(crate) fn other_backends_defects(fixture: &mut Fixture) {
    connections_that_end_at_once(fixture);
    data_right_after_connect(fixture);
    connect_in_pieces(fixture);
    malformed_connect_lines(fixture);
    a_port_without_a_listener(fixture);
    assert!(fixture.device.runs().unwrap());
    let stderr = fixture.device.stderr();
    assert!(stderr.is_empty(), "{:?}: {stderr}", fixture.version);
}

/// Clients that connect, send, and disconnect before the guest has answered: once by the exit of the whole
/// process.
fn connections_that_end_at_once(fixture: &Fixture) {
    for _ in 0..100 {
        let mut stream = UnixStream::connect(fixture.uds()).unwrap();
        stream.write_all(b"CONNECT 5001\n").unwrap();
    }
    let mut stream = fixture.connect(5001);
    stream.write_all(b"still there").unwrap();
    let mut received = [0; 11];
    stream.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"still there");
}

fn data_right_after_connect(fixture: &Fixture) {
    for _ in 0..20 {
        let mut stream = patient(UnixStream::connect(fixture.uds()).unwrap());
        stream.write_all(b"CONNECT 5001\nand data").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        expect_ok(&mut stream);
        assert_eq!(read_all(&mut stream), b"and data");
    }
}

fn connect_in_pieces(fixture: &Fixture) {
    for cut in 1..12 {
        let mut stream = patient(UnixStream::connect(fixture.uds()).unwrap());
        let (first, rest) = b"CONNECT 5001\n".split_at(cut);
        stream.write_all(first).unwrap();
        // Other connections in between, so the pieces are read separately.
        drop(fixture.connect(5001));
        stream.write_all(rest).unwrap();
        expect_ok(&mut stream);
    }
}

fn malformed_connect_lines(fixture: &Fixture) {
    for line in [&b"HELLO\n"[..], b"CONNECT\n", b"CONNECT -1\n", &[b'C'; 100], b"CONNECT 9999\n"] {
        let mut stream = patient(UnixStream::connect(fixture.uds()).unwrap());
        stream.write_all(line).unwrap();
        // Closed, with or without an error for unread bytes: never a reply.
        let mut received = Vec::new();
        let _ = stream.read_to_end(&mut received);
        assert!(received.is_empty(), "{line:?} got a reply: {received:?}");
    }
}

/// A refused connection is closed at once, not after a timeout.
fn a_port_without_a_listener(fixture: &mut Fixture) {
    fixture.perl("refused", "connect stream 6999 ask");
    let output = fixture.wait_output("refused", "refused");
    assert!(output.contains("Connection reset by peer"), "{output}");
}
