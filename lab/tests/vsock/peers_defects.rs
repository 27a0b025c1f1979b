//! Known defects of other backends, one after the other on one guest.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use crate::support::{Scene, hear_all, hear_ok, patient};

/// Needs an echo on port 5001.
pub(crate) fn what_others_do_wrong(scene: &mut Scene) {
    connections_that_end_at_once(scene);
    data_right_behind_connect(scene);
    connect_in_pieces(scene);
    lines_that_are_none(scene);
    nobody_listens(scene);
    assert!(scene.device.runs().unwrap());
    let stderr = scene.device.stderr();
    assert!(stderr.is_empty(), "{:?}: {stderr}", scene.version);
}

/// Clients that connect, send, and disconnect before the guest has answered: once by the exit of the whole process.
fn connections_that_end_at_once(scene: &Scene) {
    for _ in 0..100 {
        let mut stream = UnixStream::connect(scene.uds()).unwrap();
        stream.write_all(b"CONNECT 5001\n").unwrap();
    }
    let mut stream = scene.connect(5001);
    stream.write_all(b"still there").unwrap();
    let mut heard = [0; 11];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"still there");
}

fn data_right_behind_connect(scene: &Scene) {
    for _ in 0..20 {
        let mut stream = patient(UnixStream::connect(scene.uds()).unwrap());
        stream.write_all(b"CONNECT 5001\nand data").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        hear_ok(&mut stream);
        assert_eq!(hear_all(&mut stream), b"and data");
    }
}

fn connect_in_pieces(scene: &Scene) {
    for cut in 1..12 {
        let mut stream = patient(UnixStream::connect(scene.uds()).unwrap());
        let (first, rest) = b"CONNECT 5001\n".split_at(cut);
        stream.write_all(first).unwrap();
        // Other connections in between, so that the pieces are read separately.
        drop(scene.connect(5001));
        stream.write_all(rest).unwrap();
        hear_ok(&mut stream);
    }
}

fn lines_that_are_none(scene: &Scene) {
    for line in [&b"HELLO\n"[..], b"CONNECT\n", b"CONNECT -1\n", &[b'C'; 100], b"CONNECT 9999\n"] {
        let mut stream = patient(UnixStream::connect(scene.uds()).unwrap());
        stream.write_all(line).unwrap();
        // Closed, with or without an error for unread bytes: never a reply.
        let mut heard = Vec::new();
        let _ = stream.read_to_end(&mut heard);
        assert!(heard.is_empty(), "{line:?} was answered: {heard:?}");
    }
}

/// A refused connection is closed at once, not after a timeout.
fn nobody_listens(scene: &mut Scene) {
    scene.perl("refused", "connect stream 6999 ask");
    let said = scene.wait_said("refused", "refused");
    assert!(said.contains("Connection reset by peer"), "{said}");
}
