//! Two queue pairs, which share one registration of guest memory.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use towline_lab::{Kernel, require_kernel, wait_until};

use super::{Bench, DELAYED, Setup, driver};
use crate::support::{WITHIN, network};

/// Mode of a pair whose frames are sent from the driver's memory.
pub(super) const ZERO_COPY: &str = "af-xdp-zero-copy";

/// Time limit of attempts that a busy host spoils.
pub(super) const ATTEMPTS_WITHIN: Duration = Duration::from_secs(300);

/// The first pair, with which the memory is registered, is closed with frames in flight, while the other one
/// sends.
#[test]
#[ignore = "nightly"]
fn a_pair_closes_its_socket_while_another_one_sends() {
    let name = "a_pair_closes_its_socket_while_another_one_sends";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let Some(network) = network(name) else { return };
    let setup = Setup { card: DELAYED, network: Some(&network), ..Setup::default() };
    let mut bench = Bench::start(&format!("zero_copy::pairs::{name}"), setup);
    send(&mut bench, 0);
    send(&mut bench, 1);
    for (closed, other) in [(0, 1), (1, 0), (0, 1)] {
        let held = close(&mut bench, closed);
        send(&mut bench, other);
        bench.command(&format!("pair {closed}"));
        bench.command("start");
        send(&mut bench, closed);
        send(&mut bench, other);
        assert!(held.into_iter().all(|sequence| bench.wire.count(sequence) <= 1));
    }
}

/// Stops the ring of a pair with frames in flight, which closes its socket: the time limit of a stop is less
/// than the card's delay. On a busy host the delay may end first, so this is repeated until the socket is
/// closed. Returns the frames of the last stop.
fn close(bench: &mut Bench, pair: usize) -> Range<u32> {
    let before = closings(bench);
    bench.command(&format!("pair {pair}"));
    wait_until("a stop with frames in flight", ATTEMPTS_WITHIN, || {
        let held = bench.delay_frames();
        assert_eq!(bench.command("stop"), 0, "the reply returns all chains");
        if closings(bench) == before {
            bench.command("start");
            return Ok(None);
        }
        Ok(Some(held))
    })
    .unwrap()
}

/// Number of sockets that were closed with frames in flight.
pub(super) fn closings(bench: &mut Bench) -> usize {
    let errors = bench.card_errors();
    errors
        .lines()
        .filter(|line| line.contains("with frames in flight") || line.contains("no completions"))
        .count()
}

/// Sends frames by a pair, without a copy.
pub(super) fn send(bench: &mut Bench, pair: usize) {
    bench.command(&format!("pair {pair}"));
    // Until the pair's socket is bound, which is tried with each kick, frames go by the tap.
    wait_until("a socket in zero-copy mode", WITHIN, || {
        let bound = mode(bench, pair) == ZERO_COPY;
        if !bound {
            bench.frames("send", 1);
        }
        Ok(bound.then_some(()))
    })
    .unwrap();
    let sent = bench.frames("send", 200);
    bench.wire.wait_for(sent.clone());
    assert!(sent.into_iter().all(|sequence| bench.wire.count(sequence) == 1));
    assert_eq!(mode(bench, pair), ZERO_COPY, "{}", bench.card_errors());
}

pub(super) fn mode(bench: &mut Bench, pair: usize) -> Value {
    bench.statistics()["pairs"][pair]["tx"]["mode"].take()
}
