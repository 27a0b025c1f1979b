//! Features that a driver accepted. QEMU compares them with those of the device there, after everything was
//! sent.

use std::collections::BTreeSet;

use super::Pair;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    for guest in source.devices.iter().flatten().filter(|device| device.place.ends_with("/virtio")) {
        let Some(there) = destination.device_at(&guest.place).filter(|there| there.kind == guest.kind) else {
            continue;
        };
        let (Some(mine), Some(theirs)) = (&guest.virtio, &there.virtio) else {
            findings.unknown(
                format!("the features negotiated by the driver of {} are unknown", guest.shown()),
                "QEMU 7.2 to 10.0 report them (x-query-virtio-status); later ones are not queried, since 11.1 aborts",
            );
            continue;
        };
        let lost: Vec<_> = mine.negotiated.difference(&theirs.offered).map(String::as_str).collect();
        if !lost.is_empty() {
            findings.no(
                format!(
                    "the guest's driver of {} uses {}, which is not offered there",
                    guest.shown(),
                    lost.join(", ")
                ),
                "give the device the same properties, and a backend that can do as much",
            );
        }
        let fewer: BTreeSet<_> = mine.offered.difference(&theirs.offered).collect();
        if lost.is_empty() && !fewer.is_empty() {
            let names: Vec<_> = fewer.iter().map(|name| name.as_str()).collect();
            findings.note(
                format!(
                    "{} does not offer {} there, which the guest's driver does not use so far",
                    guest.shown(),
                    names.join(", ")
                ),
                "",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device};
    use super::*;
    use crate::facts::{QemuDevice, Virtio};
    use crate::report::Severity;

    fn disk(offered: &[&str], negotiated: &[&str]) -> QemuDevice {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let virtio = Some(Virtio { offered: set(offered), negotiated: set(negotiated) });
        QemuDevice { virtio, ..device("virtio-blk-device", "pci/02.0/virtio", &[]) }
    }

    fn found(guest: QemuDevice, there: QemuDevice) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            (source.devices, destination.devices) = (Some(vec![guest]), Some(vec![there]));
        })
    }

    #[test]
    fn one_that_the_driver_took_must_be_there() {
        let found = found(disk(&["A", "B"], &["A", "B"]), disk(&["A"], &[]));
        assert_eq!(found[0].severity, Severity::No);
        assert!(found[0].text.contains("uses B, which is not offered there"), "{found:?}");
    }

    #[test]
    fn one_that_it_did_not_take_is_a_note() {
        assert_eq!(found(disk(&["A", "B"], &["A"]), disk(&["A"], &[]))[0].severity, Severity::Note);
        assert_eq!(found(disk(&["A"], &["A"]), disk(&["A", "B"], &[])), []);
    }

    #[test]
    fn unreported_features_are_unknown() {
        let guest = QemuDevice { virtio: None, ..disk(&[], &[]) };
        assert_eq!(found(guest, disk(&[], &[]))[0].severity, Severity::Unknown);
    }
}
