//! A towline device and its counterpart.

use super::Pair;
use crate::facts::{DeviceFacts, Subject};
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let (Subject::Device(guest), Subject::Device(there)) = (&pair.source.subject, &pair.destination.subject)
    else {
        return;
    };
    if guest.device_type != there.device_type {
        // Nothing else can be compared between two types.
        return findings.no(
            format!("the guest's device is a {:?}, there it is a {:?}", guest.device_type, there.device_type),
            "start the same command there",
        );
    }
    for (side, device) in [("the guest's device", guest), ("the device there", there)] {
        if let Some(why) = &device.unmigratable {
            findings.no(format!("{side} cannot be migrated: {why}"), "");
        }
    }
    negotiated(guest, there, findings);
    numbers(guest, there, findings);
}

fn negotiated(guest: &DeviceFacts, there: &DeviceFacts, findings: &mut Findings<'_>) {
    let lost: Vec<_> = guest.negotiated.difference(&there.features).map(String::as_str).collect();
    if !lost.is_empty() {
        findings.no(
            format!("the guest's driver uses {}, which is not offered there", lost.join(", ")),
            "start it there with the same options, on a host that can do as much",
        );
    }
}

fn numbers(guest: &DeviceFacts, there: &DeviceFacts, findings: &mut Findings<'_>) {
    if guest.queues > there.queues {
        findings.no(
            format!(
                "the number of queues is {} in the guest's device and {} there",
                guest.queues, there.queues
            ),
            format!("start it there with --queues {}", guest.queues),
        );
    }
    if guest.ring_size > there.ring_size_max {
        findings.no(
            format!(
                "a ring of the guest has {} entries, there at most {} are taken",
                guest.ring_size, there.ring_size_max
            ),
            "",
        );
    }
    if ![0, guest.mtu].contains(&there.mtu) && guest.mtu != 0 {
        findings.note(format!("the MTU is {} in the guest and {} there", guest.mtu, there.mtu), "");
    }
    if guest.state_version > there.state_version || guest.state_version < there.state_version_min {
        findings.no(
            format!(
                "the device's state has version {}, there {} to {} are read",
                guest.state_version, there.state_version_min, there.state_version
            ),
            "use a towline there that reads it",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::of;
    use super::*;
    use crate::report::Severity;

    fn net() -> DeviceFacts {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        DeviceFacts {
            device_type: "net".into(),
            features: set(&["A", "B"]),
            negotiated: set(&["A"]),
            queues: 2,
            ring_size_max: 1024,
            ring_size: 256,
            mtu: 1500,
            state_version: 2,
            state_version_min: 1,
            migration_version: None,
            unmigratable: None,
        }
    }

    fn worst(change: impl FnOnce(&mut DeviceFacts, &mut DeviceFacts)) -> Option<Severity> {
        let (mut guest, mut there) = (net(), net());
        change(&mut guest, &mut there);
        let found = of(run, Subject::Device(guest), Subject::Device(there));
        found.iter().map(|found| found.severity).max()
    }

    #[test]
    fn a_single_queue_is_no_plural() {
        let there = DeviceFacts { queues: 1, ..net() };
        let found = of(run, Subject::Device(net()), Subject::Device(there));
        assert_eq!(found[0].text, "the number of queues is 2 in the guest's device and 1 there");
    }

    #[test]
    fn each_number_and_feature_counts() {
        assert_eq!(worst(|_, _| {}), None);
        let no = Some(Severity::No);
        assert_eq!(worst(|_, there| there.device_type = "vsock".into()), no);
        assert_eq!(worst(|guest, _| guest.unmigratable = Some("why".into())), no);
        assert_eq!(worst(|_, there| there.features.clear()), no);
        assert_eq!(worst(|_, there| there.queues = 1), no);
        assert_eq!(worst(|_, there| there.queues = 4), None);
        assert_eq!(worst(|_, there| there.ring_size_max = 128), no);
        assert_eq!(worst(|_, there| there.mtu = 9000), Some(Severity::Note));
        assert_eq!(worst(|guest, _| guest.state_version = 3), no);
        assert_eq!(worst(|guest, _| guest.state_version = 0), no);
        assert_eq!(worst(|guest, _| guest.state_version = 1), None);
    }
}
