//! Migrations that fail in every phase: both ends end soon, the source keeps its guest, and the error names
//! the fault.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use fastrand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towline_channel::fault::Direction;
use towline_migration::{ChannelId, Error, Memory, Outgoing, Session, Statistics, outgoing};
use towline_protocol::multifd::INIT_BYTES;

const BLOCKS: [(&str, u64); 2] = [("vga.vram", 9), ("pc.ram", 150)];
/// The time within which both ends know of a failure; they need milliseconds, a busy machine more.
const SOON: Duration = Duration::from_secs(20);

/// Invariants of any failure. Returns true if it succeeded.
fn check(outcome: &Outcome, faults: &[Fault], guest: &Memory, sink: &Memory, writer: &Writer) -> bool {
    assert!(outcome.slowest() < SOON, "{faults:?}: {outcome:?}");
    let (stops, starts) = writer.counts();
    match &outcome.source.result {
        Ok(()) => {
            assert_eq!((stops, starts), (1, 0), "{faults:?}: {outcome:?}");
            assert!(sink.is_committed(), "{faults:?}: the source was acknowledged wrongly: {outcome:?}");
            assert_eq!(difference(guest, sink), None, "{faults:?}");
            true
        }
        Err(_) => {
            assert_eq!(stops, starts, "{faults:?}: {outcome:?}");
            let is_main = faults.iter().any(|fault| fault.stream == ChannelId::Main);
            // The last word may be lost on its way, on the main channel only.
            assert!(is_main || outcome.destination.result.is_err(), "{faults:?}: {outcome:?}");
            false
        }
    }
}

/// Set in the process that has no room for another thread once its guest was stopped.
const NO_THREADS: &str = "TOWLINE_TEST_NO_THREADS";

#[test]
fn a_guest_that_was_stopped_arrives_although_no_thread_can_be_started() {
    const NAME: &str = "a_guest_that_was_stopped_arrives_although_no_thread_can_be_started";
    if std::env::var_os(NO_THREADS).is_none() {
        let mut command = Command::new("timeout");
        command.arg("100").arg(std::env::current_exe().unwrap()).args(["--exact", NAME, "--nocapture"]);
        let output = command.env(NO_THREADS, "1").output().unwrap();
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        return assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
    }
    let stop = || {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
        // Less than a stack.
        let current = Some(pages * rustix::param::page_size() as u64 + (1 << 20));
        setrlimit(Resource::As, Rlimit { current, ..getrlimit(Resource::As) }).unwrap();
        // Threads that have ended have left their stacks to the next ones.
        while thread::Builder::new().spawn(thread::park).is_ok() {}
        Ok(())
    };
    let guest = Memory::new(configuration(MACHINES[0]), &blocks(&BLOCKS)).unwrap();
    let guest = Arc::new(guest.with_hooks(stop, || panic!("it arrives")));
    fill(&guest, &mut Rng::with_seed(1));
    guest.set_device_state(device_state(1));
    let sink = empty(MACHINES[0], &BLOCKS);
    migrate(link(Kind::Unix, 3), &guest, &sink).expect_success();
    assert_eq!(difference(&guest, &sink), None);
}

fn lane_of(result: &Result<(), Error>) -> Option<usize> {
    match result {
        Err(Error::Lane { lane, .. }) => Some(*lane),
        _ => None,
    }
}

/// Bytes of each stream and direction of a migration in which nothing fails.
fn sizes(machine: &str, lanes: usize) -> (u64, u64) {
    let (guest, _) = Writer::guest(machine, &BLOCKS, 1);
    let sink = empty(machine, &BLOCKS);
    let outcome = migrate(link(Kind::Unix, lanes), &guest, &sink);
    outcome.expect_success();
    let statistics = outcome.source.statistics;
    (statistics.transferred - statistics.multifd_bytes, statistics.multifd_bytes)
}

/// The first bytes one by one where the streams' heads are, then in steps, and the last ones one by one.
fn places(size: u64, steps: u64) -> Vec<u64> {
    let step = (size / steps).max(1);
    let last = size.saturating_sub(6)..size + 2;
    (0..40).chain((40..size).step_by(step as usize)).chain(last).collect()
}

fn sweep(machine: &str, lanes: usize, kind: Kind, steps: u64) -> (u32, u32, u32) {
    let (main, on_lanes) = sizes(machine, lanes);
    let (mut runs, mut successes, mut named) = (0, 0, 0);
    let streams = std::iter::once(ChannelId::Main).chain((0..lanes).map(ChannelId::Lane));
    for stream in streams {
        for side in [Side::Source, Side::Destination] {
            for direction in [Direction::Send, Direction::Recv] {
                let forward = (side == Side::Source) == (direction == Direction::Send);
                let size = match (forward, stream) {
                    (true, ChannelId::Main) => main,
                    (true, ChannelId::Lane(_)) => on_lanes / lanes as u64,
                    // PONG and SHUT are 8 bytes each; nothing comes back on a lane.
                    (false, ChannelId::Main) => 16,
                    (false, ChannelId::Lane(_)) => 0,
                };
                for after in places(size, steps) {
                    let faults = [Fault { side, stream, layer: Layer::Cut(after, direction) }];
                    let (guest, writer) = Writer::guest(machine, &BLOCKS, 1);
                    let sink = empty(machine, &BLOCKS);
                    let outcome = migrate(link_with(kind, lanes, &faults), &guest, &sink);
                    successes += u32::from(check(&outcome, &faults, &guest, &sink, &writer));
                    if let ChannelId::Lane(lane) = stream {
                        let (source, destination) = (&outcome.source.result, &outcome.destination.result);
                        let blamed = [lane_of(source), lane_of(destination)];
                        named += u32::from(blamed.contains(&Some(lane)));
                        // The other end may see the consequence on another lane first, but not both. (Before
                        // its init packet a lane has no number at the destination.)
                        let is_known = after >= INIT_BYTES as u64 && blamed.iter().all(Option::is_some);
                        assert!(!is_known || blamed.contains(&Some(lane)), "{faults:?}: {outcome:?}");
                    }
                    runs += 1;
                }
            }
        }
    }
    (runs, successes, named)
}

#[test]
fn a_cut_anywhere_ends_both_sides_and_keeps_the_guest() {
    let begun = Instant::now();
    for (machine, lanes, kind) in [
        (MACHINES[0], 0, Kind::Unix),
        (MACHINES[0], 2, Kind::Unix),
        (MACHINES[1], 2, Kind::Tcp),
        (MACHINES[2], 1, Kind::Memory(4096)),
        (MACHINES[1], 0, Kind::Memory(1000)),
    ] {
        let (runs, successes, named) = sweep(machine, lanes, kind, 12);
        println!(
            "{machine}, {lanes} lanes, {kind:?}: {runs} cuts, {successes} after the end, {named} name the lane"
        );
        assert!(lanes == 0 || named > 0);
    }
    println!("in {:?}", begun.elapsed());
}

#[test]
fn a_cut_in_a_chain_ends_all_of_it() {
    let (main, _) = sizes(MACHINES[0], 2);
    for hop in 0..3 {
        for (stream, size) in [(ChannelId::Main, main), (ChannelId::Lane(1), 100_000)] {
            for after in places(size, 12) {
                let faults =
                    [Fault { side: Side::Source, stream, layer: Layer::Cut(after, Direction::Send) }];
                let links =
                    (0..3).map(|number| link_with(Kind::Unix, 2, if number == hop { &faults } else { &[] }));
                let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, 1);
                let sink = empty(MACHINES[0], &BLOCKS);
                let outcome = migrate_over(links.collect(), &guest, &sink, options(), &Arc::default());
                check(&outcome, &faults, &guest, &sink, &writer);
            }
        }
    }
}

#[test]
fn short_transfers_and_delays_change_nothing() {
    for seed in 0..60 {
        let machine = MACHINES[seed as usize % 3];
        let lanes = [0, 1, 3][seed as usize / 3 % 3];
        let fault = |side, stream, number| {
            let layer = match (seed + number) % 3 {
                0 => Layer::Short(1 + (seed as usize * 37) % 3000, seed + number),
                1 => Layer::Short(100_000, seed + number),
                _ => Layer::Delay(Duration::from_micros(500), seed + number),
            };
            Fault { side, stream, layer }
        };
        let mut faults = Vec::new();
        for (number, side) in [Side::Source, Side::Destination].into_iter().enumerate() {
            faults.push(fault(side, ChannelId::Main, number as u64));
            faults.extend((0..lanes).map(|lane| fault(side, ChannelId::Lane(lane), (number + lane) as u64)));
        }
        let (guest, writer) = Writer::guest(machine, &BLOCKS, seed);
        let sink = empty(machine, &BLOCKS);
        writer.run(&guest, seed, &writer);
        let outcome = migrate(link_with(Kind::Unix, lanes, &faults), &guest, &sink);
        outcome.expect_success();
        assert_eq!(difference(&guest, &sink), None, "{faults:?}");
    }
}

/// A destination that reads one lane, ends another and leaves a third full.
#[test]
fn a_lane_that_ends_wakes_those_that_block() {
    for kind in [Kind::Unix, Kind::Tcp, Kind::Memory(10_000)] {
        let (guest, writer) = Writer::guest(MACHINES[0], &[("pc.ram", 16 << 10)], 1);
        let link = link(kind, 3);
        let DestinationEnd { main, mut lanes } = link.destination;
        let (tell, told) = std::sync::mpsc::channel();
        let source = link.source;
        let session = Arc::<Session>::default();
        thread::spawn(move || {
            let options = outgoing::Options { answer_timeout: WATCHDOG, ..options() };
            let result = Outgoing::new(session, Arc::<Statistics>::default(), options).run(&source, &*guest);
            let _ = tell.send(result);
        });
        answer_ping(&*main);
        // Until every lane's socket is full.
        thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        drop(lanes.remove(1));
        let result = told.recv_timeout(WATCHDOG).expect("the source hangs");
        println!("{kind:?}: ended {:?} after its lane", begun.elapsed());
        assert_eq!(lane_of(&result), Some(1), "{result:?}");
        assert_eq!(writer.counts(), (0, 0));
    }
}

#[test]
fn an_acknowledgement_that_comes_too_early_is_refused() {
    use towline_channel::{ChannelExt, IoBuf, SendFlags};
    let (guest, writer) = Writer::guest(MACHINES[0], &[("pc.ram", 16 << 10)], 1);
    let Link { source, destination } = link(Kind::Unix, 0);
    let mut bytes = Vec::new();
    towline_protocol::return_path::ReturnPathMessage::Shut(0).encode(&mut bytes);
    destination.main.send_all(&[IoBuf::from(&bytes[..])], SendFlags::empty()).unwrap();
    let outgoing = Outgoing::new(Arc::default(), Arc::default(), options());
    let error = outgoing.run(&source, &*guest).unwrap_err();
    assert!(
        error.to_string().contains("SHUT before the stream's end came where PONG was expected"),
        "{error}"
    );
    assert_eq!(writer.counts(), (0, 0));
}

#[test]
fn a_silent_destination_is_distinguished_from_a_slow_one() {
    let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 1);
    let Link { source, destination: _kept } = link(Kind::Unix, 2);
    let options = outgoing::Options { answer_timeout: Duration::from_millis(50), ..options() };
    let error = Outgoing::new(Arc::default(), Arc::default(), options).run(&source, &*guest).unwrap_err();
    assert!(matches!(error, Error::NoAnswer { lanes: 2, .. }), "{error}");
}

#[test]
fn a_guest_that_cannot_be_restarted_is_reported() {
    let stopped = Arc::new(AtomicBool::new(false));
    let stopper = Arc::clone(&stopped);
    let blocks = blocks(&BLOCKS);
    let guest = Memory::new(configuration(MACHINES[0]), &blocks).unwrap().with_hooks(
        move || {
            stopper.store(true, Ordering::Relaxed);
            Ok(())
        },
        || Err(Error::guest(std::io::Error::other("the host is on fire"))),
    );
    // It has no device state, which is seen when it is stopped.
    let sink = empty(MACHINES[0], &BLOCKS);
    let outcome = migrate(link(Kind::Unix, 1), &Arc::new(guest), &sink);
    let error = outcome.source.result.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the guest's device state is not there: set it before the migration or when the guest is stopped; it must be \
         started again by hand, since that failed: the host is on fire"
    );
    assert!(stopped.load(Ordering::Relaxed));
    assert!(matches!(outcome.destination.result, Err(Error::Ended { .. })), "{:?}", outcome.destination);
}

#[test]
fn a_cancelled_migration_keeps_the_guest_or_is_done() {
    let mut done = 0;
    for microseconds in (0..40).map(|step| step * 250) {
        let (guest, writer) = Writer::guest(MACHINES[0], &[("pc.ram", 1500)], 1);
        let sink = empty(MACHINES[0], &[("pc.ram", 1500)]);
        let session = Arc::<Session>::default();
        let canceller = Arc::clone(&session);
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_micros(microseconds));
            canceller.fail(Error::Cancelled)
        });
        let outcome = migrate_over(vec![link(Kind::Unix, 2)], &guest, &sink, options(), &session);
        thread.join().unwrap();
        match &outcome.source.result {
            Ok(()) => {
                assert!(outcome.destination.result.is_ok() && difference(&guest, &sink).is_none());
                done += 1;
            }
            Err(error) => {
                assert!(matches!(error, Error::Cancelled), "{error}");
                let (stops, starts) = writer.counts();
                assert_eq!(stops, starts);
            }
        }
    }
    println!("{done} of 40 were done before they could be cancelled");
}
