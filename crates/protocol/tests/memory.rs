//! Memory that a peer can make the decoders allocate: never more than the limits and the bytes received.
//! Alone in its process, because it counts the process's bytes.
#![allow(clippy::unwrap_used, reason = "a test, with its helpers")]

use peak_alloc::PeakAlloc;
use towline_protocol::destination::StreamDecoder;
use towline_protocol::device_state::Collector;
use towline_protocol::multifd::{HEADER_BYTES, PACKET_PAGES, Packet};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::{RamBlock, Reader, limits};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Maximum number of bytes that were allocated at a time during `work`, beyond those before it.
fn peak(work: impl FnOnce()) -> usize {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    work();
    ALLOCATOR.peak_usage() - before
}

/// Feeds a main channel in one piece, without keeping events.
fn feed(stream: &[u8]) -> usize {
    peak(|| {
        let (mut machine, mut input) = (StreamDecoder::default(), Reader::new(stream));
        while let Ok((next, Some(_))) = machine.handle(&mut input) {
            machine = next;
        }
    })
}

fn head(rest: &[u8]) -> Vec<u8> {
    [b"QEVM\0\0\0\x03\x07\0\0\0\x01x", rest].concat()
}

/// Device sections whose description lists more than a guest can have, in one of the maximum size.
fn largest_description(entry: &[u8]) -> Vec<u8> {
    let text_bytes = limits::DEVICE_STATE_BYTES_MAX - 6;
    let (before, after) = (&br#"{"devices":["#[..], &b"0]}"[..]);
    let mut text = before.to_vec();
    while text.len() + entry.len() + after.len() <= text_bytes {
        text.extend_from_slice(entry);
    }
    text.resize(text_bytes - after.len(), b' ');
    text.extend_from_slice(after);
    [&[0, 6], &u32::try_from(text.len()).unwrap().to_be_bytes()[..], &text].concat()
}

#[test]
fn a_peer_cannot_make_the_decoders_allocate_more_than_the_limits() {
    // Lengths that promise what never comes.
    assert!(feed(b"QEVM\0\0\0\x03\x07\xff\xff\xff\xff") < 4096);
    assert!(feed(&head(b"\x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x40\xff")) < 16 << 10);
    assert!(feed(&head(b"\x08\0\x07\xff\xff")) < 4096);
    assert!(feed(&head(b"\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04\0\x0f\xff\xff\xff\xff\xf0\x04\xff")) < 4096);

    // As many blocks as may be, with the longest names: each is kept twice, by number and by name.
    let mut blocks = head(b"\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04\0\x0f\xff\xff\xff\xff\xf0\x04");
    for number in 0..=limits::BLOCKS_MAX {
        blocks.push(255);
        blocks.extend_from_slice(format!("{number:0255}").as_bytes());
        blocks.extend_from_slice(&4096_u64.to_be_bytes());
    }
    assert!(feed(&blocks) < 4 << 20);

    // A packet's offsets, and nothing for the size that it announces.
    let packet_blocks = [RamBlock { name: "b".into(), length: 1 << 40, mapped: None }];
    let mut header = [0; HEADER_BYTES];
    let block = Some(towline_protocol::BlockIndex(0));
    let zero = vec![0; PACKET_PAGES];
    Packet { block, zero, ..Packet::default() }.encode(&packet_blocks, &mut header);
    assert!(peak(|| drop(Packet::decode(&header, &packet_blocks))) < 4096);

    assert!(peak(|| drop(ReturnPathMessage::decode(&mut Reader::new(&[0, 9, 0xff, 0xff])))) < 4096);

    // The device state is kept once; a vector that grows has up to three times that while it moves. The
    // description is not kept: a value for each of its numbers was gigabytes.
    let entries: [&[u8]; 3] = [b"0,", br#"{"name":"a","instance_id":0},"#, b"[],"];
    for entry in entries {
        let tail = largest_description(entry);
        let used = peak(|| {
            let mut collector = Collector::default();
            for piece in tail.chunks(1 << 20) {
                collector.push(piece).unwrap();
            }
            assert_eq!(collector.complete(), Ok(None));
        });
        assert!(used <= 3 * limits::DEVICE_STATE_BYTES_MAX + (16 << 20), "{used} bytes");
    }
    let starts = [0, 6, 0, 0xff, 0xff, 0xff, b'{'].repeat(limits::DEVICE_STATE_BYTES_MAX / 7);
    let used = peak(|| Collector::default().push(&starts).unwrap());
    assert!(used <= 3 * limits::DEVICE_STATE_BYTES_MAX, "{used} bytes");
}
