//! A guest whose driver uses the features that its device offers: a Linux with a virtio NIC.

use serde_json::{Value, json};
use towline_lab::{Builder, Finished, Qemu, Version, require_lab, require_qemu, towline};

use crate::run::{WITHIN, check, endpoint, migrate};

/// Every virtio driver of Linux uses it if it is offered.
const FEATURE: &str = "VIRTIO_RING_F_EVENT_IDX";

fn guest(options: &str) -> Builder {
    let nic = format!("virtio-net-pci,romfile=,addr=5{options}");
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().args(["-device", &nic])
}

fn move_it(source: &Qemu, destination: &Qemu) -> Finished {
    towline(["move", &endpoint(source), &endpoint(destination)]).unwrap().wait(WITHIN).unwrap()
}

#[test]
fn a_negotiated_feature_must_be_offered_at_the_destination() {
    if !require_lab("a_negotiated_feature_must_be_offered_at_the_destination") {
        return;
    }
    let (source, mut agent) = guest("").boot(WITHIN).unwrap();
    let lacking = guest(",event_idx=off").incoming_defer().start().unwrap();

    let report = check(&source, &lacking);
    assert_eq!((&report["verdict"], &report["by-hand"]), (&json!("no"), &json!("no")), "{report}");
    let named = report["findings"].as_array().unwrap().iter().any(|finding| {
        finding["rule"] == "virtio-features" && finding["text"].as_str().unwrap().contains(FEATURE)
    });
    assert!(named, "{report}");
    let refused = move_it(&source, &lacking);
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains(FEATURE), "{}", refused.stderr);
    agent.wait_ticking(WITHIN).unwrap();

    // The migration that the check prevents: QEMU sends everything, and the destination exits.
    let died = migrate(&source, &lacking, |_| Ok(true)).unwrap_err();
    assert!(died.contains("dead") && died.contains("eatures"), "{died}");
    source.qmp().execute("cont", Value::Null).unwrap();
    agent.wait_ticking(WITHIN).unwrap();

    // With ACPI in use, QEMU sends a list of all possible processors.
    let more = guest("").processors(2).incoming_defer().start().unwrap();
    let report = check(&source, &more);
    assert_eq!((&report["verdict"], &report["by-hand"]), (&json!("no"), &json!("no")), "{report}");
    assert_eq!(move_it(&source, &more).status.code(), Some(1));
    let died = migrate(&source, &more, |_| Ok(true)).unwrap_err();
    assert!(died.contains("dead") && died.contains("ICH9LPC"), "{died}");
    source.qmp().execute("cont", Value::Null).unwrap();
    agent.wait_ticking(WITHIN).unwrap();

    let alike = guest("").incoming_defer().start().unwrap();
    let report = check(&source, &alike);
    assert!(report["verdict"].as_str().unwrap().starts_with("yes"), "{report}");
    let moved = move_it(&source, &alike);
    assert_eq!(moved.status.code(), Some(0), "{}", moved.stderr);
    drop(agent);
    alike.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap();
}

#[test]
#[ignore = "nightly"]
fn virtqueues_of_a_driver_must_not_be_larger_than_at_the_destination() {
    let name = "virtqueues_of_a_driver_must_not_be_larger_than_at_the_destination";
    if !require_qemu(name, &[Version::Stable, Version::Newest]) {
        return;
    }
    let guest = |version| {
        let builder = Qemu::builder(version).machine("pc-q35-10.0").cpu("Nehalem").linux();
        builder.args(["-device", "virtio-rng-pci", "-device", "virtio-net-pci,romfile="])
    };
    let waiting = |version| guest(version).incoming_defer().start().unwrap();
    if Version::Stable.enlarges_virtqueues().unwrap() {
        let (source, newest) = (guest(Version::Stable).start().unwrap(), waiting(Version::Newest));
        let mut agent = source.linux(WITHIN).unwrap();
        let report = check(&source, &newest);
        assert_eq!((&report["verdict"], &report["by-hand"]), (&json!("no"), &json!("no")), "{report}");
        let refused = move_it(&source, &newest);
        assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
        for (kind, size_max) in [("rng", 8), ("net", 256)] {
            let expected = format!("has 1024 entries, there at most {size_max}");
            assert!(refused.stderr.contains(&expected), "virtio-{kind}: {}", refused.stderr);
        }
        agent.wait_ticking(WITHIN).unwrap();
        let died = migrate(&source, &newest, |_| Ok(true)).unwrap_err();
        assert!(died.contains("dead") && died.contains("exceeds allocated max"), "{died}");
        source.qmp().execute("cont", Value::Null).unwrap();
        agent.wait_ticking(WITHIN).unwrap();
    }
    // The driver of a guest that was started in the newest keeps its sizes elsewhere.
    let mut source = guest(Version::Newest).start().unwrap();
    let mut tick = source.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap();
    for version in [Version::Stable, Version::Newest] {
        let there = waiting(version);
        let report = check(&source, &there);
        assert_eq!(report["verdict"], "could-not-tell", "{report}");
        let moved = move_it(&source, &there);
        assert_eq!(moved.status.code(), Some(0), "{}", moved.stderr);
        let now = there.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap();
        assert!(now > tick, "the counter is {now}, before it was {tick}");
        (source, tick) = (there, now);
    }
}
