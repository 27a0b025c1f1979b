//! A device of the guest that is missing: its state cannot be loaded.

use std::collections::BTreeMap;

use super::Pair;
use crate::facts::QemuDevice;
use crate::report::Findings;

/// Devices without a state in the stream.
const STATELESS: [&str; 6] =
    ["edu", "isa-debugcon", "isa-debug-exit", "pc-testdev", "pci-testdev", "pvpanic"];

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.devices, &destination.devices) else {
        findings.unknown("the devices of one side are not known", "");
        return;
    };
    let places: BTreeMap<&str, &QemuDevice> =
        there.iter().map(|device| (device.place.as_str(), device)).collect();
    let missing: Vec<_> = guest.iter().filter(|device| !places.contains_key(device.place.as_str())).collect();
    for device in &missing {
        // A device and its parts are named once.
        if device.is_part_of_any(&missing) {
            continue;
        }
        // Where the guest has none of that kind, it may have moved.
        let moved = there
            .iter()
            .find(|other| other.kind == device.kind && guest.iter().all(|own| own.place != other.place));
        let text = format!("the destination has no device {}", device.shown());
        if STATELESS.contains(&device.kind.as_str()) {
            findings.note(text, "it has no state; the guest will not find it");
        } else if let Some(other) = moved {
            findings.no(text, format!("one is at {}: give it the same addr= and bus=", other.place));
        } else {
            findings.no(text, format!("start it with the same -device {}", device.kind));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device};
    use super::*;
    use crate::report::Severity;

    fn found(guest: Vec<QemuDevice>, there: Vec<QemuDevice>) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            (source.devices, destination.devices) = (Some(guest), Some(there));
        })
    }

    #[test]
    fn one_that_is_not_there_is_named_once() {
        let guest = vec![device("e1000", "pci/02.0", &[]), device("part", "pci/02.0/x", &[])];
        let found = found(guest, Vec::new());
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].to_string(),
            "the destination has no device e1000 at pci/02.0 (start it with the same -device e1000)"
        );
    }

    #[test]
    fn one_in_another_slot_says_where() {
        let found = found(vec![device("e1000", "pci/02.0", &[])], vec![device("e1000", "pci/03.0", &[])]);
        assert_eq!(found[0].remedy, "one is at pci/03.0: give it the same addr= and bus=");
    }

    #[test]
    fn one_without_a_state_is_a_note() {
        let found = found(vec![device("isa-debug-exit", "pci/1f.0/isa-debug-exit", &[])], Vec::new());
        assert_eq!(found[0].severity, Severity::Note);
    }

    #[test]
    fn unknown_devices_are_reported() {
        let found = between(run, |source, _| source.devices = Some(Vec::new()));
        assert_eq!(found[0].severity, Severity::Unknown);
    }
}
