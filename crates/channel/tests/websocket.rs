//! WebSocket frames of other implementations: fragments, pings, and invalid ones. Whole streams are in the
//! conformance suite, the test against Python in the lab.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, recv_exact, recv_to_end, send_all, soon, spawn_asleep};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use towline_channel::{Address, Channel, Error, Listener};

/// A server of this crate, and a raw client.
fn raw_client() -> (Box<dyn Channel>, TcpStream) {
    let listener = Listener::bind(&"ws://127.0.0.1:0/vm".parse().unwrap()).unwrap();
    let Address::WebSocket { port, .. } = listener.local_address() else { panic!() };
    let mut raw = TcpStream::connect(("127.0.0.1", *port)).unwrap();
    let head = "GET /vm HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
    // A frame right after the request must not be lost.
    raw.write_all(&[head.as_bytes(), &frame(0x82, b"first")].concat()).unwrap();
    let channel = listener.accept(soon(), &cancel()).unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        raw.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{answer}");
    assert_eq!(recv_exact(channel.as_ref(), 5).unwrap(), b"first");
    (channel, raw)
}

/// A client's frame of at most 125 bytes.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mask = [1, 2, 3, 4];
    let masked = payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask);
    [first, 0x80 | payload.len() as u8].into_iter().chain(mask).chain(masked).collect()
}

#[test]
fn fragments_and_pings_between_them_are_one_stream() {
    let (channel, mut raw) = raw_client();
    let parts = [frame(0x02, b"abc"), frame(0x89, b"are you there"), frame(0x00, b""), frame(0x80, b"def")];
    raw.write_all(&parts.concat()).unwrap();
    assert_eq!(recv_exact(channel.as_ref(), 6).unwrap(), b"abcdef");
    send_all(channel.as_ref(), b"x").unwrap();
    let mut answer = [0; 18];
    raw.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"\x8a\x0dare you there\x82\x01x");
    raw.write_all(&frame(0x88, &1000_u16.to_be_bytes())).unwrap();
    assert_eq!(recv_to_end(channel.as_ref()).unwrap(), b"");
    channel.shutdown(Shutdown::Write).unwrap();
    let mut answer = [0; 4];
    raw.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [0x88, 2, 3, 0xe8]);
}

/// A ping is answered while a thread waits for data and none sends.
#[test]
fn a_ping_is_answered_by_the_waiting_thread() {
    let (channel, mut raw) = raw_client();
    std::thread::scope(|scope| {
        let waiting = spawn_asleep(scope, || recv_exact(channel.as_ref(), 1));
        raw.write_all(&frame(0x89, b"!")).unwrap();
        let mut answer = [0; 3];
        raw.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"\x8a\x01!");
        raw.write_all(&frame(0x82, b"y")).unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"y");
    });
}

#[test]
fn protocol_errors_are_named() {
    let unmasked = [0x82, 1, b'x'];
    let long = [&[0x82, 0xff][..], &(u64::MAX >> 1).to_be_bytes(), &[0; 4]].concat();
    for (bytes, text) in [
        (frame(0x81, b"text"), "it sent text, expected binary messages"),
        (frame(0xc2, b"x"), "it sent a frame of an extension, and none was agreed on"),
        (frame(0x80, b"x"), "it sent the fragments of a message out of order"),
        (
            frame(0x83, b"x"),
            "it sent an invalid frame: WebSocket protocol error: Encountered invalid opcode: 3",
        ),
        (frame(0x09, b"x"), "it sent a control frame of 1 bytes or in fragments, the limit is 125"),
        (unmasked.to_vec(), "it sent a frame without a mask, which only servers send"),
        (long, "it sent a frame of 9223372036854775807 bytes, the limit is 1073741824"),
        (frame(0x82, b"").repeat(65), "it sent more than 64 packets without data in a second"),
    ] {
        let (channel, mut raw) = raw_client();
        raw.write_all(&bytes).unwrap();
        for _ in 0..2 {
            let error = recv_exact(channel.as_ref(), 1).unwrap_err();
            assert!(matches!(&error, Error::WebSocket { why, .. } if why == text), "{error}");
        }
    }
    let (channel, raw) = raw_client();
    drop(raw);
    assert!(matches!(recv_exact(channel.as_ref(), 1).unwrap_err(), Error::Cut { .. }));
}
