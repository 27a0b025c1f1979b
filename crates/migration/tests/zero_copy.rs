//! Lanes that send without a copy, over the loopback, where the kernel copies in the end and reports it.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::*;
use towline_channel::Channel;
use towline_migration::{
    ChannelId, Compression, Error, LaneSends, Outgoing, SendMethod, SendReason, Statistics, ZeroCopySend,
    outgoing,
};

const BLOCKS: [(&str, u64); 3] = [("vga.rom", 1), ("vga.vram", 513), ("pc.ram", 1537)];

fn sending(zero_copy_send: ZeroCopySend) -> outgoing::Options {
    outgoing::Options { zero_copy_send, ..options() }
}

#[test]
fn every_machine_type_and_number_of_lanes() {
    for (seed, machine) in MACHINES.iter().enumerate() {
        for lanes in [1, 4] {
            for asked in [ZeroCopySend::On, ZeroCopySend::Auto, ZeroCopySend::Off] {
                let (guest, writer) = Writer::guest(machine, &BLOCKS, seed as u64);
                let sink = empty(machine, &BLOCKS);
                writer.run(&guest, seed as u64, &writer);
                let links = vec![link(Kind::TcpZeroCopy, lanes)];
                let outcome = migrate_over(links, &guest, &sink, sending(asked), &Arc::default());
                outcome.expect_success();
                assert_eq!(difference(&guest, &sink), None);
                let statistics = outcome.source.statistics;
                let passes = statistics.dirty_sync_count;
                let missed = statistics.dirty_sync_missed_zero_copy;
                match asked {
                    ZeroCopySend::On => assert!((1..=passes * lanes as u64).contains(&missed), "{outcome:?}"),
                    _ => assert_eq!(missed, 0),
                }
            }
        }
    }
}

/// Send method of each lane with a guest large enough to decide.
fn lanes_of(asked: ZeroCopySend, kind: Kind) -> Vec<LaneSends> {
    let pages = [("pc.ram", 16 << 10)];
    let (guest, _) = Writer::guest(MACHINES[0], &pages, 1);
    let sink = empty(MACHINES[0], &pages);
    let Link { source, destination } = link(kind, 2);
    let statistics = Arc::<Statistics>::default();
    std::thread::scope(|scope| {
        scope.spawn(|| receive(destination, &*sink, &Arc::default(), Compression::None).0.unwrap());
        let engine = Outgoing::new(Arc::default(), Arc::clone(&statistics), sending(asked));
        engine.run(&source, &*guest).unwrap();
    });
    assert_eq!(difference(&guest, &sink), None);
    statistics.lane_sends()
}

#[test]
fn each_lane_detects_that_the_kernel_copies() {
    for lane in lanes_of(ZeroCopySend::Auto, Kind::TcpZeroCopy) {
        assert_eq!((lane.method, lane.reason), (SendMethod::Plain, SendReason::Copied), "{lane:?}");
        assert_eq!((lane.zero_copy.packets, lane.zero_copied, lane.switches), (1, 0, 0), "{lane:?}");
        assert!(lane.copied > 0 && lane.plain.packets > 20 && lane.plain.measured_cpu_ns > 0, "{lane:?}");
    }
    for lane in lanes_of(ZeroCopySend::On, Kind::TcpZeroCopy) {
        assert_eq!((lane.method, lane.reason), (SendMethod::ZeroCopy, SendReason::Asked));
        assert!(lane.copied >= lane.zero_copy.packets && lane.zero_copied == 0, "{lane:?}");
        assert_eq!(lane.plain.packets, 0);
    }
    for lane in lanes_of(ZeroCopySend::Auto, Kind::Tcp) {
        assert_eq!((lane.method, lane.reason), (SendMethod::Plain, SendReason::Unsupported));
    }
}

/// The relay receives the next packet while the last one is still read from its buffer.
#[test]
fn a_relay_does_not_refill_what_is_still_read() {
    for (asked, machine) in [ZeroCopySend::On, ZeroCopySend::Auto].into_iter().zip(MACHINES) {
        let pages = [("pc.ram", 4 << 10)];
        let (guest, writer) = Writer::guest(machine, &pages, 3);
        let sink = empty(machine, &pages);
        writer.run(&guest, 3, &writer);
        let slow = |lane| Fault {
            side: Side::Destination,
            stream: ChannelId::Lane(lane),
            layer: Layer::Throttle(40 << 20),
        };
        let links = vec![link(Kind::TcpZeroCopy, 2), link_with(Kind::TcpZeroCopy, 2, &[slow(0), slow(1)])];
        let outcome = migrate_over(links, &guest, &sink, sending(asked), &Arc::default());
        outcome.expect_success();
        assert_eq!(difference(&guest, &sink), None, "{asked}");
        assert!(writer.writes.load(Ordering::Relaxed) > 0);
    }
}

#[test]
fn required_zero_copy_that_is_unavailable_is_refused_before_a_byte_is_sent() {
    for (kind, lanes, why) in [
        (Kind::Unix, 2, "the connection to"),
        (Kind::Tcp, 1, "the connection to tcp:127.0.0.1:"),
        (Kind::TcpZeroCopy, 0, "there are no lanes"),
    ] {
        let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, 1);
        let Link { source, destination } = link(kind, lanes);
        let engine = Outgoing::new(Arc::default(), Arc::default(), sending(ZeroCopySend::On));
        let error = engine.run(&source, &*guest).unwrap_err();
        assert!(matches!(&error, Error::NoZeroCopy { why: text } if text.starts_with(why)), "{error}");
        assert_eq!(writer.counts(), (0, 0));
        drop(source);
        let mut room = [0];
        let received =
            destination.main.recv(&mut [towline_channel::IoBufMut::from(&mut room)], Default::default());
        assert_eq!(received.unwrap(), 0);
    }
}

/// A lane whose peer reads nothing holds the guest's memory; after the migration has failed, the kernel does
/// not.
#[test]
fn after_a_failure_the_kernel_reads_nothing_any_more() {
    let pages = [("pc.ram", 16 << 10)];
    let (guest, _) = Writer::guest(MACHINES[0], &pages, 1);
    let Link { source, destination } = link(Kind::TcpZeroCopy, 3);
    let DestinationEnd { main, mut lanes } = destination;
    let held: Vec<Arc<dyn Channel>> = source.lanes.clone();
    let session = Arc::default();
    let result = std::thread::scope(|scope| {
        let engine = Outgoing::new(Arc::clone(&session), Arc::default(), sending(ZeroCopySend::On));
        let (guest, source) = (&*guest, &source);
        let run = scope.spawn(move || engine.run(source, guest));
        answer_ping(&*main);
        wait_until("lanes whose memory is read", || {
            held.iter().all(|lane| !lane.zero_copy_ticket().is_done().unwrap())
        });
        drop(lanes.remove(1));
        run.join().unwrap()
    });
    assert!(matches!(result, Err(Error::Lane { lane: 1, .. })), "{result:?}");
    for lane in &held {
        assert!(lane.zero_copy_ticket().is_done().unwrap(), "{lane:?}");
    }
    assert_eq!(lanes.len(), 2, "they were there, and not read");
}
