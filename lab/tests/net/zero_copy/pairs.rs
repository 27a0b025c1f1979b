//! Two queue pairs, which share one registration of guest memory.

use std::path::Path;

use serde_json::Value;
use towline_lab::{Kernel, require_kernel, wait_until};

use super::{Bench, DELAYED, Setup, driver};
use crate::support::{WITHIN, network};

/// Mode of a pair whose frames are sent from the driver's memory.
pub(super) const ZERO_COPY: &str = "af-xdp-zero-copy";

/// The first pair, with which the memory is registered, is closed with frames in flight, while the other one
/// sends.
#[test]
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
        bench.command(&format!("pair {closed}"));
        let held = bench.delay_frames();
        // Its time limit is less than the delay, so the socket is closed.
        assert_eq!(bench.command("stop"), 0, "the reply returns all chains");
        send(&mut bench, other);
        bench.command(&format!("pair {closed}"));
        bench.command("start");
        send(&mut bench, closed);
        send(&mut bench, other);
        assert!(held.into_iter().all(|sequence| bench.wire.count(sequence) <= 1));
    }
    let errors = bench.card_errors();
    assert_eq!(errors.matches("closing an AF_XDP socket with frames in flight").count(), 3, "{errors}");
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
