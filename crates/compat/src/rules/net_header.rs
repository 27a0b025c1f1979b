//! virtio-net's state records whether its backend accepts packets with a vnet header (tap and vhost-user do,
//! user and socket do not), and a device without one refuses a state with one.

use super::Pair;
use crate::facts::QemuDevice;
use crate::report::Findings;

/// Offered if and only if the property is on and the backend has the header.
const FEATURE: &str = "VIRTIO_NET_F_CSUM";
const PROPERTY: &str = "csum";

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    for guest in source.devices.iter().flatten().filter(|device| device.kind == "virtio-net-device") {
        if let Some(there) = destination.device_at(&guest.place)
            && has_header(guest) == Some(true)
            && has_header(there) == Some(false)
        {
            findings.no(
                format!(
                    "the network backend of the guest's NIC at {} takes offloads, the one there does not",
                    guest.place
                ),
                "give it a backend with a vnet header (tap, vhost-user), or move between backends without",
            );
        }
    }
}

/// `None`: unknown from its features.
fn has_header(device: &QemuDevice) -> Option<bool> {
    let offered = &device.virtio.as_ref()?.offered;
    let is_on = device.properties.get(PROPERTY).is_some_and(|value| value == "true");
    is_on.then(|| offered.contains(FEATURE))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device};
    use super::*;
    use crate::facts::Virtio;

    #[test]
    fn a_header_that_is_gone_is_a_no() {
        let nic = |offers: &[&str]| {
            let offered = offers.iter().map(|name| (*name).to_owned()).collect();
            let virtio = Some(Virtio { offered, ..Virtio::default() });
            QemuDevice { virtio, ..device("virtio-net-device", "pci/02.0/virtio", &[(PROPERTY, "true")]) }
        };
        let found = |guest, there| {
            between(run, |source, destination| {
                (source.devices, destination.devices) = (Some(vec![guest]), Some(vec![there]));
            })
        };
        assert_eq!(found(nic(&[FEATURE]), nic(&[])).len(), 1);
        assert_eq!(found(nic(&[]), nic(&[FEATURE])), []);
        assert_eq!(found(nic(&[FEATURE]), nic(&[FEATURE])), []);
    }
}
