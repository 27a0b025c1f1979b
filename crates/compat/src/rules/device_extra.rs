//! A device of the destination that the guest does not have: QEMU does not require its state, and the guest
//! does not probe for it.

use std::collections::BTreeSet;

use super::Pair;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.devices, &destination.devices) else { return };
    let places: BTreeSet<&str> = guest.iter().map(|device| device.place.as_str()).collect();
    let extra: Vec<_> = there.iter().filter(|device| !places.contains(device.place.as_str())).collect();
    for device in &extra {
        // A QEMU of another version may consist of other parts.
        let is_inner = !device.place.starts_with("pci/") && source.version != destination.version;
        if !device.is_part_of_any(&extra) && !is_inner {
            findings.note(
                format!("there is a device {} that the guest does not have", device.shown()),
                "the guest finds it when it probes again",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device};
    use super::*;
    use crate::report::Severity;

    #[test]
    fn one_more_there_is_a_note() {
        let found = between(run, |source, destination| {
            source.devices = Some(Vec::new());
            destination.devices =
                Some(vec![device("e1000", "pci/02.0", &[]), device("part", "pci/02.0/x", &[])]);
        });
        assert_eq!((found.len(), found[0].severity), (1, Severity::Note));
    }
}
