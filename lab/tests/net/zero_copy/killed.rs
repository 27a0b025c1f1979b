//! The card's process is killed with frames in flight. Frames may be lost, but none is sent twice, or after
//! its buffer was reused.

use std::path::Path;

use towline_lab::{Kernel, require_kernel};

use super::{Bench, DELAYED, Setup, driver};
use crate::support::{number, sum};

/// Keeps the record of descriptors in flight.
const RECORD: &str = "--zero-copy-send on --state /tmp/card.state";
/// Number of frames that are queued when the process is killed.
const FRAMES: u32 = 300;

#[test]
#[ignore = "nightly"]
fn no_frame_is_sent_twice_after_a_kill() {
    let name = "no_frame_is_sent_twice_after_a_kill";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let setup = Setup { arguments: RECORD, ..Setup::default() };
    let mut bench = Bench::start(&format!("zero_copy::killed::{name}"), setup);
    let mut lost = Vec::new();
    for round in 0..number("TOWLINE_SOAK_NET_KILLS", 5) {
        let warm = bench.frames("send", 50);
        bench.wire.wait_for(warm);
        bench.assert_zero_copy();
        // From at once to almost at the end.
        let used = u64::from(FRAMES - 1) * (round % 5) / 4;
        lost.push(kill_while_sending(&mut bench, used));
    }
    println!("{} rounds, frames lost of {FRAMES}: {lost:?}", lost.len());
    assert_eq!(sum(&bench.statistics(), "tx", "pending"), 0);
}

/// Kills the process when this number of frames is used. Returns the number of lost frames.
fn kill_while_sending(bench: &mut Bench, used: u64) -> usize {
    let pid = bench.card_pid();
    bench.command(&format!("kill {FRAMES} {used} {pid}"));
    let sent = bench.frames..bench.frames + FRAMES;
    bench.frames = sent.end;
    restart(bench);
    let counts: Vec<u32> = sent.clone().map(|sequence| bench.wire.count(sequence)).collect();
    let twice: Vec<u32> =
        sent.zip(&counts).filter(|(_, count)| **count > 1).map(|(frame, _)| frame).collect();
    assert!(twice.is_empty(), "with {used} used at the kill, sent more than once: {twice:?}");
    counts.iter().filter(|count| **count == 0).count()
}

/// Starts the card again when its killed process is gone. Afterwards frames leave without a copy again.
fn restart(bench: &mut Bench) {
    let killed = bench.card_pid();
    bench.wait_for_exit(killed);
    bench.start_card();
    bench.command("connect");
    assert_eq!(bench.command("finish"), 0);
    let sent = bench.frames("send", 200);
    bench.wire.wait_for(sent.clone());
    assert!(sent.into_iter().all(|sequence| bench.wire.count(sequence) == 1));
    bench.assert_zero_copy();
}

/// The process is suspended, so it cannot know that its frames were sent.
#[test]
#[ignore = "nightly"]
fn frames_that_were_sent_before_a_kill_are_not_sent_again() {
    let name = "frames_that_were_sent_before_a_kill_are_not_sent_again";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let setup = Setup { card: DELAYED, arguments: RECORD, ..Setup::default() };
    let mut bench = Bench::start(&format!("zero_copy::killed::{name}"), setup);
    let sent = bench.frames("send", 100);
    bench.wire.wait_for(sent);
    bench.assert_zero_copy();
    let held = bench.delay_frames();
    bench.shell("kill -STOP $(cat /tmp/card.pid)");
    bench.wire.wait_for(held.clone());
    let in_flight = bench.command("look");
    assert!(in_flight > 0, "the process has completed all frames before it was suspended");
    bench.shell("kill -KILL $(cat /tmp/card.pid)");
    restart(&mut bench);
    let twice: Vec<u32> = held.filter(|sequence| bench.wire.count(*sequence) > 1).collect();
    assert!(twice.is_empty(), "{in_flight} in flight at the kill, sent more than once: {twice:?}");
}
