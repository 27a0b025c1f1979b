//! A device of another type at the address of the guest's device.

use super::Pair;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    for guest in source.devices.iter().flatten() {
        if let Some(there) = destination.device_at(&guest.place)
            && there.kind != guest.kind
            && !guest.place.ends_with("/virtio")
        {
            findings.no(
                format!("the guest has a device {}, there it is {}", guest.shown(), there.shown()),
                format!("start it with -device {} at this address", guest.kind),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device};
    use super::*;

    #[test]
    fn another_type_is_a_no() {
        let found = between(run, |source, destination| {
            source.devices = Some(vec![device("e1000", "pci/02.0", &[])]);
            destination.devices = Some(vec![device("rtl8139", "pci/02.0", &[])]);
        });
        assert_eq!(
            found[0].text,
            "the guest has a device e1000 at pci/02.0, there it is rtl8139 at pci/02.0"
        );
    }
}
