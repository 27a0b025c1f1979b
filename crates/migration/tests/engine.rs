//! Guests that go from memory to memory over real channels, alone and through relays.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::*;
use fastrand::Rng;
use towline_migration::memory::{BlockBacking, MemoryBlock};
use towline_migration::{Error, Guest, Memory, MemoryError, Sink, outgoing};
use towline_protocol::PageRef;

const LANES: [usize; 4] = [0, 1, 4, 16];
const KINDS: [Kind; 3] = [Kind::Memory(64 << 10), Kind::Unix, Kind::Tcp];
/// Of odd sizes: one page, less than a unit, one more page than a unit, several units.
const BLOCKS: [(&str, u64); 4] = [("vga.rom", 1), ("vga.vram", 37), ("pc.bios", 513), ("pc.ram", 1537)];

fn check(outcome: &Outcome, guest: &Memory, sink: &Memory) {
    outcome.expect_success();
    assert_eq!(difference(guest, sink), None);
    assert_eq!(sink.take_device_state().unwrap().bytes(), Guest::device_state(guest).unwrap());
    assert!(sink.is_committed());
}

/// Invariants of the counters of both ends.
fn check_statistics(outcome: &Outcome, guest: &Memory, lanes: usize) {
    let (source, destination) = (&outcome.source.statistics, &outcome.destination.statistics);
    let pages: u64 = guest.blocks().iter().map(|block| block.pages()).sum();
    assert!(source.normal + source.duplicate >= pages, "{source:?}");
    assert_eq!((source.normal, source.duplicate), (destination.normal, destination.duplicate));
    assert_eq!(source.normal_bytes, source.normal * PAGE as u64);
    assert_eq!(source.normal_bytes, destination.normal_bytes);
    assert_eq!(source.total, pages * PAGE as u64);
    assert_eq!(source.total, destination.total);
    if outcome.relays.is_empty() {
        // A relay splits packets that hold both zero pages and others.
        assert_eq!(source.transferred, destination.transferred, "{source:?} {destination:?}");
        assert_eq!(source.multifd_bytes, destination.multifd_bytes);
    }
    assert!(source.transferred >= source.normal_bytes + Guest::device_state(guest).unwrap().len() as u64);
    assert_eq!(source.multifd_bytes > 0, lanes > 0);
    assert!(source.multifd_bytes <= source.transferred);
    let calls = source.vectored_calls + source.plain_calls;
    // Towards a relay, which may have little room, a packet may take several calls.
    let calls_max = if outcome.relays.is_empty() { source.normal } else { source.normal + source.duplicate };
    assert!(calls > 0 && calls <= calls_max, "{source:?}");
}

#[test]
fn every_machine_type_number_of_lanes_and_kind_of_channel() {
    for (seed, machine) in MACHINES.iter().enumerate() {
        for lanes in LANES {
            for kind in KINDS {
                let (guest, writer) = Writer::guest(machine, &BLOCKS, seed as u64);
                let sink = empty(machine, &BLOCKS);
                let outcome = migrate(link(kind, lanes), &guest, &sink);
                check(&outcome, &guest, &sink);
                check_statistics(&outcome, &guest, lanes);
                assert_eq!(writer.counts(), (1, 0));
            }
        }
    }
}

#[test]
fn a_guest_that_writes_all_the_time_arrives_as_it_was_when_it_stopped() {
    for (seed, machine) in MACHINES.iter().enumerate() {
        for lanes in LANES {
            for kind in KINDS {
                let (guest, writer) = Writer::guest(machine, &BLOCKS, seed as u64);
                let sink = empty(machine, &BLOCKS);
                writer.run(&guest, seed as u64, &writer);
                let outcome = migrate(link(kind, lanes), &guest, &sink);
                check(&outcome, &guest, &sink);
                check_statistics(&outcome, &guest, lanes);
                assert!(writer.writes.load(Ordering::Relaxed) > 0);
                assert!(outcome.source.statistics.dirty_sync_count > 1);
            }
        }
    }
}

#[test]
fn zero_pages_go_where_the_machine_type_has_them() {
    for (machine, on_lanes) in [("pc-q35-10.0", true), ("pc-q35-8.2", false), ("pc-q35-7.2", false)] {
        let (guest, sink) = (empty(machine, &[("pc.ram", 4096)]), empty(machine, &[("pc.ram", 4096)]));
        guest.set_device_state(device_state(1));
        // Pages that were there and became zero: the sink has them too, with other content.
        let old = vec![1; 4096 * PAGE];
        sink.write(at(0, 0), &old);
        let outcome = migrate(link(Kind::Unix, 2), &guest, &sink);
        check(&outcome, &guest, &sink);
        let statistics = outcome.source.statistics;
        assert_eq!((statistics.normal, statistics.duplicate), (0, 4096));
        let main_bytes = statistics.transferred - statistics.multifd_bytes;
        assert_eq!(main_bytes < 4096 * 9, on_lanes, "{statistics:?}");
    }
}

#[test]
fn relays_forward_everything() {
    for (seed, machine) in MACHINES.iter().enumerate() {
        for lanes in [0, 1, 4] {
            for (kind, hops) in [(Kind::Memory(10_000), 2), (Kind::Unix, 2), (Kind::Tcp, 3)] {
                let (guest, writer) = Writer::guest(machine, &BLOCKS, seed as u64);
                let sink = Arc::new(Memory::adopting(16 << 20));
                writer.run(&guest, seed as u64, &writer);
                let links = (0..hops).map(|_| link(kind, lanes)).collect();
                let outcome = migrate_over(links, &guest, &sink, options(), &Arc::default());
                check(&outcome, &guest, &sink);
                assert_eq!(Guest::configuration(&*sink), Guest::configuration(&*guest));
                check_statistics(&outcome, &guest, lanes);
            }
        }
    }
}

#[test]
fn relays_splice_lanes_between_sockets_without_tls_only() {
    for hops in [[Kind::Unix, Kind::Unix], [Kind::Tls, Kind::Unix], [Kind::Tls, Kind::Tls]] {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 1);
        let sink = empty(MACHINES[0], &BLOCKS);
        let links = hops.map(|kind| link(kind, 2)).into();
        let outcome = migrate_over(links, &guest, &sink, options(), &Arc::default());
        check(&outcome, &guest, &sink);
        let is_spliced = outcome.relays[0].statistics.spliced_calls > 0;
        assert_eq!(is_spliced, !hops.contains(&Kind::Tls), "{hops:?}");
    }
}

#[test]
fn a_received_guest_can_be_sent_again() {
    let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 3);
    let (second, third) = (Arc::new(Memory::adopting(16 << 20)), empty(MACHINES[0], &BLOCKS));
    migrate(link(Kind::Unix, 2), &guest, &second).expect_success();
    migrate(link(Kind::Unix, 1), &second, &third).expect_success();
    assert_eq!(difference(&guest, &third), None);
    assert_eq!(third.take_device_state().unwrap().bytes(), Guest::device_state(&*guest).unwrap());
}

#[test]
fn memory_over_a_descriptor_is_shared_with_other_mappings() {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 50 * PAGE as u64).unwrap();
    let shared = |offset| BlockBacking::Shared { file: file.as_fd(), offset };
    let block =
        |pages, offset| MemoryBlock { name: "pc.ram", length: pages * PAGE as u64, backing: shared(offset) };
    let memory = |block| Memory::new(configuration(MACHINES[0]), &[block]).map(Arc::new);
    let error = memory(block(40, 11 * PAGE as u64)).unwrap_err();
    assert!(matches!(error, MemoryError::FileTooShort { found: 204_800, expected: 208_896, .. }), "{error}");
    // One mapping of the file receives, another (as the guest's process would have) reads and continues.
    let (guest, _) = Writer::guest(MACHINES[0], &[("pc.ram", 40)], 5);
    let (sink, seen) =
        (memory(block(40, 10 * PAGE as u64)).unwrap(), memory(block(40, 10 * PAGE as u64)).unwrap());
    seen.write(at(0, 0), &[7; 40 * PAGE]);
    migrate(link(Kind::Unix, 2), &guest, &sink).expect_success();
    assert_eq!(difference(&guest, &seen), None);
    seen.set_device_state(device_state(5));
    let third = empty(MACHINES[0], &[("pc.ram", 40)]);
    migrate(link(Kind::Unix, 0), &seen, &third).expect_success();
    assert_eq!(difference(&guest, &third), None);
}

#[test]
fn memory_can_be_populated_ahead() {
    let memory = empty(MACHINES[0], &[("pc.rom", 3), ("pc.ram", 24 << 10)]);
    memory.write(at(1, 5), b"kept");
    let populated = memory.populate(NonZeroUsize::new(2).unwrap()).unwrap();
    assert_eq!(populated.bytes, (3 + (24 << 10)) * PAGE as u64);
    let mut kept = [0; 4];
    memory.read(at(1, 5), &mut kept);
    assert_eq!(&kept, b"kept");
    println!("populated: {populated:?}");
}

#[test]
fn a_guest_that_does_not_fit_is_refused() {
    let reason = |outcome: &Outcome| match &outcome.destination.result {
        Err(Error::Guest(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let cases: [(&[(&str, u64)], &str); 4] = [
        (
            &[("pc.ram", 64), ("vga.vram", 8)],
            "block \"pc.ram\" has 262144 bytes at the source, expected 131072: give both sides the same memory",
        ),
        (&[("pc.ram", 32)], "the source has 1 blocks, expected also \"vga.vram\" of 32768 bytes"),
        (
            &[("pc.ram", 32), ("vga.vram", 8), ("pc.bios", 1)],
            "the source's block number 2 is \"pc.bios\" of 4096 bytes, expected the list's end",
        ),
        (
            &[("pc.ram", 32), ("vga.rom", 8)],
            "the source's block number 1 is \"vga.rom\" of 32768 bytes, expected \"vga.vram\" of 32768 bytes",
        ),
    ];
    for (pages, expected) in cases {
        for lanes in [0, 2] {
            let (guest, writer) = Writer::guest(MACHINES[0], pages, 1);
            let sink = empty(MACHINES[0], &[("pc.ram", 32), ("vga.vram", 8)]);
            let outcome = migrate(link(Kind::Unix, lanes), &guest, &sink);
            assert_eq!(reason(&outcome), expected);
            assert!(outcome.source.result.is_err());
            let (stops, starts) = writer.counts();
            assert_eq!(stops, starts);
        }
    }
    let (guest, _) = Writer::guest(MACHINES[0], &[("pc.ram", 33)], 1);
    let sink = Arc::new(Memory::adopting(32 * PAGE as u64));
    let outcome = migrate(link(Kind::Unix, 1), &guest, &sink);
    assert_eq!(
        reason(&outcome),
        "the guest has 135168 bytes of memory with block \"pc.ram\", at most 131072 are allowed here"
    );
    let sink = empty(MACHINES[1], &[("pc.ram", 33)]);
    let outcome = migrate(link(Kind::Unix, 1), &guest, &sink);
    assert_eq!(
        reason(&outcome),
        "the source's machine type is \"pc-q35-10.0\", expected \"pc-q35-7.2\": start both sides with the same"
    );
}

#[test]
fn a_stream_without_return_path_is_refused() {
    let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, 1);
    let sink = empty(MACHINES[0], &BLOCKS);
    let without = outgoing::Options { return_path: false, ..options() };
    let outcome = migrate_over(vec![link(Kind::Unix, 0)], &guest, &sink, without, &Arc::default());
    let error = outcome.destination.result.unwrap_err().to_string();
    assert!(error.contains("the stream opens no return path"), "{error}");
    assert!(!sink.is_committed());
    let (stops, starts) = writer.counts();
    assert!(outcome.source.result.is_ok() || stops == starts);
}

#[test]
fn a_bandwidth_limit_holds() {
    let (guest, _) = Writer::guest(MACHINES[0], &[("pc.ram", 2048)], 1);
    let sink = empty(MACHINES[0], &[("pc.ram", 2048)]);
    let limited = outgoing::Options { max_bandwidth: Some(40 << 20), ..options() };
    let outcome = migrate_over(vec![link(Kind::Unix, 4)], &guest, &sink, limited, &Arc::default());
    check(&outcome, &guest, &sink);
    // Not a measurement of speed: it cannot be done faster. The first unit of each lane goes at once.
    let least = (outcome.source.statistics.normal_bytes as f64 - (8 << 20) as f64) / (40 << 20) as f64;
    assert!(outcome.source.elapsed >= Duration::from_secs_f64(least.max(0.0)), "{outcome:?}");
}

#[test]
fn every_write_is_in_a_harvest_that_follows_it() {
    let memory = empty(MACHINES[0], &[("pc.ram", 200)]);
    let page_bytes = PAGE as u64;
    let harvest = |seen: &mut BTreeSet<u64>| {
        let mut report = |page: PageRef, length: u64| {
            seen.extend((page.offset..page.offset + length).step_by(PAGE).map(|offset| offset / page_bytes));
        };
        memory.harvest_dirty(&mut report).unwrap();
    };
    let write = |seed| {
        let mut rng = Rng::with_seed(seed);
        let pages: Vec<u64> = (0..20_000).map(|_| rng.u64(0..200)).collect();
        pages.iter().for_each(|page| memory.write(at(0, page * page_bytes + 9), &[1]));
        pages
    };
    let is_over = AtomicBool::new(false);
    let (mut written, mut seen) = (BTreeSet::new(), BTreeSet::new());
    thread::scope(|scope| {
        let writers: Vec<_> = (0..2).map(|seed| scope.spawn(move || write(seed))).collect();
        let harvester = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !is_over.load(Ordering::Acquire) {
                harvest(&mut seen);
            }
            seen
        });
        written.extend(writers.into_iter().flat_map(|writer| writer.join().unwrap()));
        is_over.store(true, Ordering::Release);
        seen.extend(harvester.join().unwrap());
    });
    harvest(&mut seen);
    assert_eq!(seen, written);
}

#[test]
fn a_sink_before_its_block_list_refuses_pages() {
    let memory = Memory::adopting(1 << 20);
    assert!(memory.buffer_for(at(0, 0), 4096).is_none());
    let error = memory.zero(towline_migration::ChannelId::Main, at(0, 0).block, &[0]).unwrap_err();
    assert_eq!(error.to_string(), "there is no memory yet: the block list has not arrived");
}
