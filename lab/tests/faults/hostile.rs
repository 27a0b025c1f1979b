//! Malicious streams: towline ends with an error, in bounded memory, and never panics.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use towline_lab::{Finished, Qemu, require_lab};

use crate::support::{Fixture, SAFE, WITHIN, assert_safe, counting, listens_at, migrate, small_guest};

/// Number of mutated streams; the fuzzers run more.
const STREAMS: u64 = 40;
/// Limit of the address space of a towline that receives 16 MiB, in KiB: its program, stacks and buffers.
const ADDRESS_SPACE_KIB: &str = "1500000";

/// Captures the stream of a source without a return path.
fn capture(fixture: &Fixture, source: &Qemu) -> Vec<u8> {
    let listener = UnixListener::bind(fixture.path("capture.sock")).unwrap();
    source.qmp().execute("stop", Value::Null).unwrap();
    migrate(source, &format!("unix:{}", fixture.name("capture.sock")));
    let (mut stream, mut bytes) = (listener.accept().unwrap().0, Vec::new());
    stream.read_to_end(&mut bytes).unwrap();
    std::fs::remove_file(fixture.path("capture.sock")).unwrap();
    bytes
}

/// Sends `bytes` to a towline that would store them in an image.
fn feed(fixture: &Fixture, bytes: &[u8]) -> Finished {
    let socket = fixture.name("hostile.sock");
    let limited = ["sh", "-c", r#"ulimit -v "$0" && exec "$@""#, ADDRESS_SPACE_KIB];
    let line = format!("copy --return-path off unix:{socket} {}", fixture.name("guest.img"));
    let mut towline = fixture.start(&limited, &line);
    listens_at(&mut towline);
    let mut stream = UnixStream::connect(Path::new(&socket)).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    // Towline closes the connection at the first error.
    let _ = stream.write_all(bytes);
    drop(stream);
    towline.wait(WITHIN).unwrap()
}

fn find(bytes: &[u8], wanted: &[u8]) -> usize {
    bytes.windows(wanted.len()).position(|window| window == wanted).unwrap()
}

#[test]
fn mutated_streams_are_errors() {
    if !require_lab("mutated_streams_are_errors") {
        return;
    }
    let fixture = Fixture::new();
    let stream = capture(&fixture, &counting(small_guest()));
    let finished = feed(&fixture, &stream);
    assert_eq!(finished.status.code(), Some(0), "as it was captured: {}", finished.stderr);
    std::fs::remove_file(fixture.path("guest.img")).unwrap();
    std::fs::remove_file(fixture.path("guest.img.manifest.json")).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for round in 0..STREAMS {
        let mut bytes = stream.clone();
        // The block list, then anywhere, then the end of the stream.
        let region = match round % 3 {
            0 => 0..400,
            1 => 0..bytes.len(),
            _ => bytes.len() - 20_000..bytes.len(),
        };
        for _ in 0..=random(4) {
            let at = region.start + random(region.len());
            bytes[at] = random(256) as u8;
        }
        if round % 5 == 0 {
            bytes.truncate(random(stream.len()));
        }
        let finished = feed(&fixture, &bytes);
        let Finished { status, stderr, .. } = &finished;
        println!("{round}: {status}: {}", stderr.lines().nth(1).unwrap_or_default());
        assert!(!stderr.contains("panicked") && !stderr.contains("allocation"), "{stderr}");
        match status.code() {
            // A page's content, or a device's: the stream itself has no redundancy that would show it.
            Some(0) => {
                std::fs::remove_file(fixture.path("guest.img")).unwrap();
                std::fs::remove_file(fixture.path("guest.img.manifest.json")).unwrap();
            }
            code => assert_eq!(code, Some(SAFE), "{status}: {stderr}"),
        }
        fixture.assert_holds(&[]);
    }
}

/// Numbers in a stream that could determine an allocation.
#[test]
fn forged_sizes_allocate_no_memory() {
    if !require_lab("forged_sizes_allocate_no_memory") {
        return;
    }
    let fixture = Fixture::new();
    let stream = capture(&fixture, &counting(small_guest()));
    let name = find(&stream, b"\x06pc.ram");
    let (total, length) = (name - 8, name + 7);
    let flags = 4; // RAM_SAVE_FLAG_MEM_SIZE, in the total's low bits.
    let number = |at: usize| u64::from_be_bytes(stream[at..at + 8].try_into().unwrap());
    let others = (number(total) & !0xfff) - number(length);
    for (claimed, text) in [
        (1_u64 << 45, "the stream announces 35184372088832 bytes of guest memory, at most 17592186044416"),
        (1 << 51, "the stream announces 2251799813685248 bytes of guest memory"),
        (!0xfff, "the block list announces 18446744073709547520 bytes of RAM"),
    ] {
        let mut bytes = stream.clone();
        bytes[total..total + 8].copy_from_slice(&(claimed | flags).to_be_bytes());
        bytes[length..length + 8].copy_from_slice(&(claimed - others).to_be_bytes());
        assert_safe(&feed(&fixture, &bytes), &[text]);
        fixture.assert_holds(&[]);
    }
    // A stream that is not refused at once: in any case it must keep within the memory limit.
    let mut bytes = stream.clone();
    bytes[total..total + 8].copy_from_slice(&((8 << 40) | flags).to_be_bytes());
    bytes[length..length + 8].copy_from_slice(&((8 << 40) - others).to_be_bytes());
    bytes.truncate(bytes.len() - 1000);
    assert_safe(&feed(&fixture, &bytes), &[]);
    fixture.assert_holds(&[]);
    // The total alone: a list that never ends.
    let mut bytes = stream.clone();
    bytes[total..total + 8].copy_from_slice(&((1_u64 << 50) | flags).to_be_bytes());
    assert_safe(&feed(&fixture, &bytes), &[]);
    fixture.assert_holds(&[]);
}
