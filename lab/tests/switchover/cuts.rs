//! The link between two towlines is cut after the destination's acknowledgement, at each message that
//! follows.

use serde_json::Value;
use towline_lab::{Action, Flow, Proxy, Qemu, Trigger, Version, require_lab};

use crate::support::{
    OUTCOME, PLACED, SHUT, WITHIN, assert_ended, assert_runs_nowhere, assert_runs_only_in, counting, end,
    listens_at, qmp, small, start, waiting,
};

/// Position of the cut, and the expected reports and run states.
struct Cut {
    trigger: Trigger,
    /// Exit status and message of the source's towline.
    here: (i32, &'static str),
    /// Exit status and message of the destination's towline.
    there: (i32, &'static str),
    /// Expected run states of both QEMUs.
    states: (&'static str, &'static str),
}

fn cut(flow: Flow, bytes: &[u8], forwards: bool) -> Trigger {
    Trigger { flow, bytes: bytes.to_vec(), forwards, action: Action::Cut }
}

fn play(cut: Cut) -> (Qemu, Qemu) {
    let builder = small(Version::V10_0);
    let (source, destination) = (counting(&builder), waiting(&builder));
    let mut there = start(&format!("copy tcp:127.0.0.1:0 {}", qmp(&destination)));
    let proxy = Proxy::start(listens_at(&mut there)).unwrap();
    proxy.set_trigger(cut.trigger);
    let here = start(&format!("move {} tcp:{}", qmp(&source), proxy.address()));
    assert_ended(&end(here), cut.here.0, &[cut.here.1]);
    assert_ended(&end(there), cut.there.0, &[cut.there.1]);
    assert!(proxy.has_fired());
    source.qmp().wait_status(cut.states.0, WITHIN).unwrap();
    destination.qmp().wait_status(cut.states.1, WITHIN).unwrap();
    (source, destination)
}

const HELD_THERE: (i32, &str) =
    (3, "it is not known whether its source still has it; whole at its destination");

#[test]
fn a_cut_before_the_acknowledgement_lets_the_source_run_on() {
    if !require_lab("a_cut_before_the_acknowledgement_lets_the_source_run_on") {
        return;
    }
    let (source, destination) = play(Cut {
        trigger: cut(Flow::ToSource, SHUT, false),
        here: (1, "the guest: safe at its source"),
        there: HELD_THERE,
        states: ("running", "paused"),
    });
    assert_runs_only_in(&source, &destination);
}

#[test]
fn a_cut_after_the_acknowledgement_leaves_both_paused() {
    if !require_lab("a_cut_after_the_acknowledgement_leaves_both_paused") {
        return;
    }
    for trigger in [cut(Flow::ToSource, SHUT, true), cut(Flow::ToDestination, OUTCOME, false)] {
        let (source, destination) =
            play(Cut { trigger, here: (3, "paused"), there: HELD_THERE, states: ("postmigrate", "paused") });
        assert_runs_nowhere(&source, &destination);
        destination.qmp().execute("cont", Value::Null).unwrap();
        assert_runs_only_in(&destination, &source);
    }
}

#[test]
fn a_cut_after_the_outcome_lets_the_destination_run() {
    if !require_lab("a_cut_after_the_outcome_lets_the_destination_run") {
        return;
    }
    let (source, destination) = play(Cut {
        trigger: cut(Flow::ToSource, PLACED, false),
        here: (3, "it is not known whether it runs at its destination: look there"),
        there: (0, ""),
        states: ("postmigrate", "running"),
    });
    assert_runs_only_in(&destination, &source);
}
