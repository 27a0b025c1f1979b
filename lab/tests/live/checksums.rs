//! Packets between two towlines carry checksums: a byte that is changed on the way is detected, and its page is
//! named.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use towline_lab::{require_lab, wait_until};

use crate::support::{WITHIN, assert_ended, completed, counting, qmp, small, start, waiting};

/// Index of the changed lane, by the order of its connection; 0 is the main channel.
const LANE: usize = 2;
/// Offset within a page of the lane's first packets: after its init packet, the first SYNC and a header.
const BYTE: usize = 64 + 1344 + 1344 + 5000;
const MULTIFD: [u8; 4] = [0x11, 0x22, 0x33, 0x44];

/// Forwards connections to `there`, and changes a byte of one lane if `flips`. Its threads end with the connections.
fn wire(there: String, flips: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for number in 0..5 {
            let Ok((near, _)) = listener.accept() else { return };
            let far = TcpStream::connect(&there).unwrap();
            let (back, forth) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            thread::spawn(move || pass(near, far, (flips && number == LANE).then_some(BYTE)));
            thread::spawn(move || pass(back, forth, None));
        }
    });
    format!("tcp:{address}")
}

fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<usize>) {
    let (mut bytes, mut passed) = (vec![0; 64 << 10], 0);
    while let Ok(received @ 1..) = from.read(&mut bytes) {
        if passed == 0 && flip.is_some() {
            assert_eq!(bytes[..4], MULTIFD, "it is a lane");
        }
        if let Some(at) = flip.and_then(|at| at.checked_sub(passed)).filter(|&at| at < received) {
            bytes[at] ^= 4;
        }
        passed += received;
        if to.write_all(&bytes[..received]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn a_byte_changed_between_two_towlines_is_found_and_its_page_named() {
    if !require_lab("a_byte_changed_between_two_towlines_is_found_and_its_page_named") {
        return;
    }
    let source = counting();
    for flips in [true, false] {
        let destination = waiting(&small());
        let line = format!("copy --json --multifd-channels 4 tcp:127.0.0.1:0 {}", qmp(&destination));
        let there = start(&line);
        let listening = wait_until("a towline that listens", WITHIN, || {
            let output = there.stdout() + &there.stderr();
            let address = output.split_once("listening on tcp:").map(|(_, rest)| {
                rest.chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect::<String>()
            });
            Ok(address.filter(|_| output.contains('\n')))
        })
        .unwrap();
        let wire = wire(listening, flips);
        let here = start(&format!("copy --json --multifd-channels 4 {} {wire}", qmp(&source)));
        let (here, there) = (here.wait(WITHIN).unwrap(), there.wait(WITHIN).unwrap());
        if flips {
            assert_ended(&there, 1, &["the page at 0x", "of block \"pc.ram\" differs from what was sent"]);
            assert_ne!(here.status.code(), Some(0), "{}", here.stderr);
            source.qmp().wait_status("running", WITHIN).unwrap();
            continue;
        }
        assert_ended(&here, 0, &[]);
        let done = completed(&there);
        let verified = done["ram"]["checksums-verified"].as_u64();
        assert!(verified > Some(0), "{done}");
        println!("{verified:?} packets compared");
        destination.wait_counting(WITHIN).unwrap();
    }
}
