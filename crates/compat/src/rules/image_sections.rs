//! The device state of an image: each section must find its device.

use super::Pair;
use crate::facts::{ImageFacts, QemuFacts, Subject};
use crate::report::Findings;

/// QEMU's prefix of names on the first PCI bus: domain and bus.
const PCI_PREFIX: &str = "0000:00:";
/// The section of each virtual processor.
const CPU: &str = "cpu";
/// The section of `-netdev user`.
const SLIRP: &str = "slirp";

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let (Subject::Image(image), Some(destination)) = (&pair.source.subject, pair.destination_qemu()) else {
        return;
    };
    devices(image, destination, findings);
    let count = |name: &str| image.sections.iter().filter(|section| section.name == name).count();
    if let Some(cpus) = destination.cpus.as_ref().map(Vec::len)
        && ![0, cpus].contains(&count(CPU))
    {
        findings.no(
            format!("the number of virtual processors is {} in the guest and {cpus} there", count(CPU)),
            format!("start it with -smp {}", count(CPU)),
        );
    }
    if let Some(netdevs) = &destination.netdevs {
        let users = netdevs.iter().filter(|netdev| netdev.kind == "user").count();
        if count(SLIRP) > users {
            findings.no(
                format!("the guest has {} `-netdev user` backends, there are {users}", count(SLIRP)),
                "their state (slirp) cannot be loaded",
            );
        }
    }
}

fn devices(image: &ImageFacts, destination: &QemuFacts, findings: &mut Findings<'_>) {
    if destination.devices.is_none() && !image.sections.is_empty() {
        return findings.unknown("the devices of the destination are not known", "");
    }
    let mut told = Vec::new();
    for section in &image.sections {
        let Some(place) = place(&section.name) else { continue };
        if destination.device_at(&place).is_none() && !told.contains(&place) {
            findings.no(
                format!("the destination has no device with the state {:?} at {place}", section.name),
                "start it with the same -device at the same address",
            );
            told.push(place);
        }
    }
}

/// `0000:00:1c.0:00.0/virtio-net` is at `pci/1c.0/00.0`; `None` for what is on no PCI bus.
fn place(name: &str) -> Option<String> {
    let (path, _) = name.strip_prefix(PCI_PREFIX)?.split_once('/')?;
    Some(format!("pci/{}", path.replace(':', "/")))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, of};
    use super::*;
    use crate::facts::{Cpu, Netdev, Section};

    fn found(names: &[&str], there: QemuFacts) -> Vec<crate::Finding> {
        let section = |name: &&str| Section { name: (*name).into(), ..Section::default() };
        let image = ImageFacts { sections: names.iter().map(section).collect(), ..ImageFacts::default() };
        of(run, Subject::Image(image), Subject::Qemu(Box::new(there)))
    }

    #[test]
    fn a_section_without_its_device_is_a_no() {
        let there =
            || QemuFacts { devices: Some(vec![device("nic", "pci/02.0", &[])]), ..QemuFacts::default() };
        assert_eq!(found(&["timer", "0000:00:02.0/virtio-net"], there()), []);
        let found = found(&["0000:00:1c.0:00.0/virtio-net", "0000:00:1c.0:00.0/more"], there());
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].text,
            "the destination has no device with the state \"0000:00:1c.0:00.0/virtio-net\" at pci/1c.0/00.0"
        );
    }

    #[test]
    fn processors_and_user_backends_are_counted() {
        let there = || QemuFacts {
            devices: Some(Vec::new()),
            cpus: Some(vec![Cpu::default()]),
            netdevs: Some(vec![Netdev::default()]),
            ..QemuFacts::default()
        };
        assert_eq!(found(&[CPU], there()), []);
        assert_eq!(found(&[CPU, CPU], there())[0].remedy, "start it with -smp 2");
        assert!(found(&[SLIRP], there())[0].text.contains("1 `-netdev user` backends, there are 0"));
    }
}
