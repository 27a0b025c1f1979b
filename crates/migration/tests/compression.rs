//! Compressed lanes from end to end: every page arrives, fewer bytes travel, and ends that disagree report
//! it.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::*;
use towline_migration::{ChannelId, Compression, Error, Guest, Memory, outgoing};
use towline_protocol::PeerMisbehaved;

const METHODS: [Compression; 2] = [Compression::Zlib { level: 1 }, Compression::Zstd { level: 1 }];
const LANES: [usize; 2] = [1, 4];
const BLOCKS: [(&str, u64); 3] = [("vga.rom", 1), ("vga.vram", 37), ("pc.ram", 1537)];

fn compressed(compression: Compression) -> outgoing::Options {
    outgoing::Options { compression, ..options() }
}

/// Invariants of a migration over compressed lanes.
fn check(outcome: &Outcome, guest: &Memory, sink: &Memory) {
    outcome.expect_success();
    assert_eq!(difference(guest, sink), None);
    assert_eq!(sink.take_device_state().unwrap().bytes(), Guest::device_state(guest).unwrap());
    let (source, destination) = (&outcome.source.statistics, &outcome.destination.statistics);
    assert_eq!((source.normal, source.duplicate), (destination.normal, destination.duplicate));
    assert_eq!(source.normal_bytes, source.normal * PAGE as u64);
    // A half of the pages that are not zero is noise.
    assert!(source.multifd_bytes < source.normal_bytes * 3 / 4, "{source:?}");
    assert!(source.multifd_bytes > source.normal_bytes / 4, "{source:?}");
    assert!(source.transferred >= source.multifd_bytes);
    if outcome.relays.is_empty() {
        assert_eq!(source.transferred, destination.transferred, "{source:?} {destination:?}");
        assert_eq!(source.multifd_bytes, destination.multifd_bytes);
    }
}

#[test]
fn every_machine_type_method_and_number_of_lanes() {
    for (seed, machine) in MACHINES.iter().enumerate() {
        for compression in METHODS {
            for lanes in LANES {
                let (guest, _) = Writer::guest(machine, &BLOCKS, seed as u64);
                let sink = empty(machine, &BLOCKS);
                let links = vec![link(Kind::Unix, lanes)];
                let outcome = migrate_over(links, &guest, &sink, compressed(compression), &Arc::default());
                check(&outcome, &guest, &sink);
            }
        }
    }
}

#[test]
fn a_guest_that_writes_while_its_pages_are_compressed_arrives_as_it_was_when_it_stopped() {
    for compression in METHODS {
        for lanes in LANES {
            let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, 7);
            let sink = empty(MACHINES[0], &BLOCKS);
            writer.run(&guest, 7, &writer);
            let links = vec![link(Kind::Memory(64 << 10), lanes)];
            let outcome = migrate_over(links, &guest, &sink, compressed(compression), &Arc::default());
            outcome.expect_success();
            assert_eq!(difference(&guest, &sink), None);
            assert!(writer.writes.load(Ordering::Relaxed) > 0);
        }
    }
}

#[test]
fn through_relays_that_decompress_and_compress_again() {
    for compression in METHODS {
        for machine in MACHINES {
            let (guest, _) = Writer::guest(machine, &BLOCKS, 3);
            let sink = empty(machine, &BLOCKS);
            let links = vec![link(Kind::Unix, 4), link(Kind::Tcp, 4), link(Kind::Unix, 4)];
            let outcome = migrate_over(links, &guest, &sink, compressed(compression), &Arc::default());
            check(&outcome, &guest, &sink);
        }
    }
}

#[test]
fn through_channels_with_short_transfers() {
    for compression in METHODS {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 4);
        let sink = empty(MACHINES[0], &BLOCKS);
        let fault = |side, seed| Fault { side, stream: ChannelId::Lane(0), layer: Layer::Short(700, seed) };
        let faults = [fault(Side::Source, 1), fault(Side::Destination, 2)];
        let links = vec![link_with(Kind::Unix, 2, &faults)];
        let outcome = migrate_over(links, &guest, &sink, compressed(compression), &Arc::default());
        check(&outcome, &guest, &sink);
    }
}

#[test]
fn ends_that_disagree_name_both_methods() {
    let every = [Compression::None, METHODS[0], METHODS[1]];
    for theirs in every {
        for ours in every.into_iter().filter(|ours| ours.method() != theirs.method()) {
            let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, 5);
            let sink = empty(MACHINES[0], &BLOCKS);
            let links = vec![link(Kind::Unix, 1)];
            let outcome = migrate_into(links, &guest, &sink, compressed(theirs), ours, &Arc::default());
            let Err(Error::Lane { lane: 0, source }) = &outcome.destination.result else {
                panic!("{outcome:?}");
            };
            let Error::Protocol { source, .. } = &**source else { panic!("{source:?}") };
            let (found, expected) = (theirs.method().name(), ours.method().name());
            assert_eq!(*source, PeerMisbehaved::Compression { found, expected }.into());
            assert!(outcome.source.result.is_err() && !sink.is_committed());
            let (stops, starts) = writer.counts();
            assert_eq!(stops, starts);
        }
    }
}
