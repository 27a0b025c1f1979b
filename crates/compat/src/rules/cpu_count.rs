//! Virtual processors, whose state is identified by number and local APIC id; and their maximum number, which
//! is the length of a list in the state of ACPI's CPU hot-plug. If the destination has one more, the source
//! reports `completed` while the destination fails on that list.

use std::collections::BTreeSet;

use super::Pair;
use crate::facts::QemuFacts;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.cpus, &destination.cpus) else {
        findings.unknown("the virtual processors of one side are not known", "");
        return;
    };
    if guest.len() != there.len() {
        findings.no(
            format!(
                "the number of virtual processors is {} in the guest and {} there",
                guest.len(),
                there.len()
            ),
            format!("start it with -smp {}", guest.len()),
        );
        return;
    }
    let ids = |cpus: &[crate::facts::Cpu]| cpus.iter().filter_map(|cpu| cpu.apic_id).collect::<BTreeSet<_>>();
    let (guest_ids, there_ids) = (ids(guest), ids(there));
    let remedy = "give -smp the same sockets, dies, cores and threads";
    if guest_ids != there_ids && !guest_ids.is_empty() && !there_ids.is_empty() {
        findings.no(
            format!("the guest's processors have the APIC ids {guest_ids:?}, there {there_ids:?}"),
            remedy,
        );
    } else if let (Some(most), Some(most_there)) = (at_most(source), at_most(destination))
        && most != most_there
    {
        findings.no(
            format!("the guest may have up to {most} virtual processors, there up to {most_there}"),
            format!("start it with -smp maxcpus={most}"),
        );
    } else if let Some((a, b)) = guest.iter().zip(there).find(|(a, b)| a.topology != b.topology) {
        findings.note(
            format!("processor {} is {:?} in the guest and {:?} there", a.index, a.topology, b.topology),
            remedy,
        );
    }
}

/// `maxcpus` of -smp.
fn at_most(qemu: &QemuFacts) -> Option<u64> {
    qemu.machine_properties.as_ref()?.get("smp")?.get("maxcpus")?.as_u64()
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::facts::Cpu;
    use crate::report::Severity;

    fn cpus(apic_ids: &[u64], threads: u64) -> Option<Vec<Cpu>> {
        let cpu = |(index, &apic_id): (usize, &u64)| Cpu {
            index: index as u64,
            model: "Nehalem".into(),
            apic_id: Some(apic_id),
            topology: [("thread-id".to_owned(), threads)].into(),
        };
        Some(apic_ids.iter().enumerate().map(cpu).collect())
    }

    #[test]
    fn one_more_or_less_is_a_no() {
        for (guest, there) in [([0, 1].as_slice(), [0].as_slice()), (&[0], &[0, 1])] {
            let found = between(run, |source, destination| {
                (source.cpus, destination.cpus) = (cpus(guest, 0), cpus(there, 0));
            });
            assert_eq!(found[0].severity, Severity::No);
            assert!(found[0].remedy.ends_with(&guest.len().to_string()), "{found:?}");
        }
    }

    #[test]
    fn the_maximum_number_must_match_too() {
        let found = between(run, |source, destination| {
            for (qemu, most) in [(source, 1), (destination, 2)] {
                let smp = serde_json::json!({ "cpus": 1, "maxcpus": most });
                (qemu.cpus, qemu.machine_properties) =
                    (cpus(&[0], 0), Some([("smp".to_owned(), smp)].into()));
            }
        });
        assert_eq!(found[0].remedy, "start it with -smp maxcpus=1");
    }

    #[test]
    fn other_apic_ids_are_a_no_and_another_topology_with_the_same_ids_a_note() {
        let severity = |ids: &[u64], threads| {
            let found = between(run, |source, destination| {
                (source.cpus, destination.cpus) = (cpus(&[0, 1, 2], 0), cpus(ids, threads));
            });
            found.first().map(|found| found.severity)
        };
        assert_eq!(severity(&[0, 1, 2], 0), None);
        assert_eq!(severity(&[0, 1, 4], 0), Some(Severity::No));
        assert_eq!(severity(&[0, 1, 2], 1), Some(Severity::Note));
    }

    #[test]
    fn unqueried_processors_are_unknown() {
        let found = between(run, |source, _| source.cpus = cpus(&[0], 0));
        assert_eq!(found[0].severity, Severity::Unknown);
    }
}
