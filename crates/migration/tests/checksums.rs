//! Checksums of packets between two towlines: damage is found and named, and nothing else is taken for it.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::sync::Arc;

use common::*;
use towline_migration::outgoing::Options;
use towline_migration::{ChannelId, Compression, Error, Memory};
use towline_protocol::multifd::{HEADER_BYTES, INIT_BYTES};
use towline_protocol::{Error as ProtocolError, InvalidMessage};

const BLOCKS: [(&str, u64); 2] = [("pc.bios", 3), ("pc.ram", 1200)];
const METHODS: [Compression; 3] =
    [Compression::None, Compression::Zlib { level: 1 }, Compression::Zstd { level: 1 }];

/// A guest all of whose pages have content.
fn full() -> Arc<Memory> {
    let guest = Arc::new(Memory::new(configuration(MACHINES[0]), &blocks(&BLOCKS)).unwrap());
    let mut rng = fastrand::Rng::with_seed(1);
    for (index, (_, pages)) in BLOCKS.iter().enumerate() {
        for page in 0..*pages {
            let content: Vec<_> = (0..PAGE).map(|_| rng.u8(..)).collect();
            guest.write(at(index, page * PAGE as u64), &content);
        }
    }
    guest.set_device_state(device_state(1));
    guest
}

/// Over a relay, whose buffers are not changed; byte `at` of the last hop's only lane is changed. Returns the error.
fn flipped(at: u64, compression: Compression) -> InvalidMessage {
    let (guest, sink) = (full(), empty(MACHINES[0], &BLOCKS));
    let flip = Fault { side: Side::Destination, stream: ChannelId::Lane(0), layer: Layer::FlipReceived(at) };
    let links = vec![link(Kind::Unix, 1), link_with(Kind::Unix, 1, &[flip])];
    let options = Options { compression, ..options() };
    let outcome = migrate_over(links, &guest, &sink, options, &Arc::default());
    assert!(outcome.source.result.is_err() && !sink.is_committed(), "byte {at}");
    let Err(Error::Lane { lane: 0, source }) = outcome.destination.result else { panic!("byte {at}") };
    match *source {
        Error::Protocol { source: ProtocolError::Invalid(message), .. } => message,
        other => panic!("byte {at}: {other:?}"),
    }
}

#[test]
fn one_changed_byte_names_its_page() {
    // The first packet behind the SYNC of the setup has the three pages of `pc.bios`.
    let contents = (INIT_BYTES + 2 * HEADER_BYTES) as u64;
    for (page, byte) in [(0, 0), (1, 4095), (2, 77)] {
        let message = flipped(contents + page * PAGE as u64 + byte, Compression::None);
        let what = format!("the page at {:#x} of block \"pc.bios\"", page * PAGE as u64);
        assert_eq!(message, InvalidMessage::Checksum { what });
    }
    // The one behind it has 128 of `pc.ram`.
    let next = contents + (3 * PAGE + HEADER_BYTES) as u64;
    let message = flipped(next + 100 * PAGE as u64, Compression::None);
    let what = "the page at 0x64000 of block \"pc.ram\"".to_owned();
    assert_eq!(message, InvalidMessage::Checksum { what });
    let text = message.to_string();
    assert!(text.contains("differs from what was sent") && text.contains("TLS"), "{text}");
}

#[test]
fn a_changed_header_is_found_before_it_is_used() {
    let header = (INIT_BYTES + HEADER_BYTES) as u64;
    let what = || InvalidMessage::Checksum { what: "the header of a packet".into() };
    // Magic, flags, counts, size, name, offsets, and the checksum's own word.
    for byte in [0, 11, 19, 23, 31, 35, 39, 47, 66, 322, 327, 1343] {
        assert_eq!(flipped(header + byte, Compression::None), what(), "byte {byte}");
    }
    assert_eq!(flipped(header + 41, Compression::None), InvalidMessage::ChecksumMissing);
    // The sums: nothing else was changed, which they cannot know.
    assert!(matches!(flipped(header + 50, Compression::None), InvalidMessage::Checksum { .. }));
}

#[test]
fn compressed_contents_are_compared_as_received() {
    let contents = (INIT_BYTES + 2 * HEADER_BYTES) as u64;
    for compression in &METHODS[1..] {
        let message = flipped(contents + 500, *compression);
        let what = "one or more pages of those from 0x0 to 0x2000 of block \"pc.bios\"".to_owned();
        assert_eq!(message, InvalidMessage::Checksum { what }, "{compression:?}");
    }
}

#[test]
fn every_packet_of_a_relay_is_compared_and_all_are_well() {
    for compression in METHODS {
        for machine in MACHINES {
            let (guest, writer) = Writer::guest(machine, &BLOCKS, 5);
            let sink = empty(machine, &BLOCKS);
            writer.run(&guest, 9, &writer);
            let links = vec![link(Kind::Unix, 4), link(Kind::Tcp, 4)];
            let options = Options { compression, ..options() };
            let outcome = migrate_over(links, &guest, &sink, options, &Arc::default());
            outcome.expect_success();
            assert_eq!(difference(&guest, &sink), None);
            let (relay, destination) = (&outcome.relays[0].statistics, &outcome.destination.statistics);
            assert!(destination.checksums_verified > 0, "{compression:?}, {machine}");
            // Of the first hop: all but those with pages that the running guest may write. Compressed, they are copies.
            let written = outcome.source.statistics.checksums_written;
            match compression {
                Compression::None => assert!((1..=written).contains(&relay.checksums_verified)),
                _ => assert_eq!(relay.checksums_verified, written),
            }
        }
    }
}

#[test]
fn a_guest_that_writes_while_it_is_sent_is_no_damage() {
    for seed in 0..20 {
        let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, seed);
        let sink = empty(MACHINES[0], &BLOCKS);
        writer.run(&guest, seed, &writer);
        let outcome = migrate(link(Kind::Unix, 4), &guest, &sink);
        outcome.expect_success();
        assert_eq!(difference(&guest, &sink), None);
        assert!(writer.writes.load(std::sync::atomic::Ordering::Relaxed) > 0);
    }
}

#[test]
fn without_lanes_no_checksums_are_requested() {
    let (guest, sink) = (full(), empty(MACHINES[0], &BLOCKS));
    let outcome = migrate(link(Kind::Unix, 0), &guest, &sink);
    outcome.expect_success();
    assert_eq!(outcome.source.statistics.checksums_written, 0);
}

#[test]
fn lanes_with_tls_have_no_checksums_of_their_own() {
    for (hops, verified) in [([Kind::Tls, Kind::Tls], false), ([Kind::Tls, Kind::Unix], true)] {
        let (guest, sink) = (full(), empty(MACHINES[0], &BLOCKS));
        let links = hops.map(|kind| link(kind, 2)).into();
        let outcome = migrate_over(links, &guest, &sink, options(), &Arc::default());
        outcome.expect_success();
        assert_eq!(difference(&guest, &sink), None);
        assert_eq!(outcome.source.statistics.checksums_written, 0, "{hops:?}");
        // The hop without TLS has them, also behind one with it.
        assert_eq!(outcome.destination.statistics.checksums_verified > 0, verified, "{hops:?}");
    }
}
