//! Estimate of the cost of a protection, which changes nothing.

use serde_json::{Value, json};
use towline_lab::Towline;
use towline_lab::expect::{assert_ended, events, qmp, wait_event};

use crate::support::{Hosts, Side, WITHIN};

/// Exit status of a check without a verdict.
const COULD_NOT_TELL: i32 = 4;
/// Estimates are right up to this factor: the guest's writes are sampled for a short time.
const FACTOR: f64 = 6.0;

/// Waits for a check that ends with this status. Returns its verdict.
fn verdict(check: Towline, exit: i32) -> Value {
    let checked = check.wait(WITHIN).unwrap();
    assert_ended(&checked, exit, &[]);
    let last = events(&checked.stdout).pop().unwrap();
    assert_eq!(last["event"], "checked", "{last}");
    last
}

#[test]
fn the_cost_of_protection_is_estimated_before() {
    let Some(mut hosts) = Hosts::new("the_cost_of_protection_is_estimated_before") else { return };
    let source = qmp(&hosts.source);
    hosts.source.qmp().execute("stop", Value::Null).unwrap();
    let refused = verdict(hosts.run_here(&["check", "--protect", "--json", &source]), 1);
    let findings = refused["findings"].as_array().unwrap();
    let of_rule =
        |rule| findings.iter().find(|finding| finding["rule"] == rule).unwrap()["text"].as_str().unwrap();
    assert!(of_rule("protect").contains("only a running guest"), "{refused}");
    assert_eq!((of_rule("other-host"), &refused["costs"]), ("no other host was asked", &json!([])));

    hosts.source.qmp().execute("cont", Value::Null).unwrap();
    // QEMU 11.1 is not queried for the features of a virtio driver, as by `check`.
    let checked = verdict(hosts.start(&["check", "--protect", "--json"]), COULD_NOT_TELL);
    let findings = checked["findings"].as_array().unwrap();
    let expected = [json!("virtio-features"), json!("drives")];
    assert!(findings.iter().all(|finding| expected.contains(&finding["rule"])), "{checked}");
    let costs = checked["costs"].as_array().unwrap();
    let epochs: Vec<_> = costs.iter().map(|cost| cost["epoch-us"].as_u64().unwrap()).collect();
    assert_eq!(epochs, [25_000, 50_000, 100_000]);
    // No generation was claimed, and the other host has no guest.
    assert_eq!((hosts.held(Side::Here)["holding"].clone(), hosts.generations()), (true.into(), vec![]));
    hosts.wait_none_there();
    assert!(hosts.guest.as_mut().unwrap().wait_ticking(WITHIN).is_ok());

    let mut protecting = hosts.protected();
    let taken = wait_event(&mut protecting, "checkpoints", WITHIN, |event| event["event"] == "checkpoints");
    let each = taken["bytes"].as_f64().unwrap() / taken["count"].as_f64().unwrap();
    println!("estimated: {}; taken: {each:.0} bytes each, {taken}", costs[1]);
    let factor = costs[1]["bytes"].as_f64().unwrap() / each;
    assert!((1.0 / FACTOR..FACTOR).contains(&factor), "{factor}: {checked}, {taken}");
}
