//! The rules: one file each, with its id, its subject, and its findings in a pair.
//!
//! To add one: a file with a `RULE`, a line in [`RULES`], a row in `docs/check.md`, its own test, and a real
//! pair in `lab/tests/pairs`.

mod accelerator;
mod blocked;
mod capabilities;
mod cpu_count;
mod cpu_features;
mod cpu_model;
mod device_extra;
mod device_kind;
mod device_missing;
mod device_properties;
mod drives;
mod image_sections;
mod kinds;
mod machine_properties;
mod machine_type;
mod net_header;
mod netdev_link;
mod netdev_user;
mod page_size;
mod parameters;
pub mod postcopy;
mod prealloc;
mod qemu_version;
mod ram_blocks;
mod rule;
mod state_versions;
mod towline_device;
mod uuid;
mod virtio_features;
mod virtqueue_sizes;
mod waiting;

use crate::report::{Findings, Report};
pub use rule::{Pair, Rule};

/// Every rule, in the order in which findings are reported.
pub const RULES: &[Rule] = &[
    kinds::RULE,
    waiting::RULE,
    blocked::RULE,
    machine_type::RULE,
    ram_blocks::RULE,
    page_size::RULE,
    postcopy::RULE,
    uuid::RULE,
    cpu_count::RULE,
    cpu_features::RULE,
    cpu_model::RULE,
    accelerator::RULE,
    device_missing::RULE,
    device_kind::RULE,
    device_properties::RULE,
    virtio_features::RULE,
    virtqueue_sizes::RULE,
    net_header::RULE,
    netdev_user::RULE,
    netdev_link::RULE,
    device_extra::RULE,
    machine_properties::RULE,
    image_sections::RULE,
    state_versions::RULE,
    towline_device::RULE,
    capabilities::RULE,
    parameters::RULE,
    drives::RULE,
    qemu_version::RULE,
    prealloc::RULE,
];

/// Applies every rule.
pub fn evaluate(pair: &Pair<'_>) -> Report {
    let mut report = Report::default();
    for rule in RULES {
        (rule.run)(pair, &mut Findings { rule: rule.id, report: &mut report });
    }
    report
}

#[cfg(test)]
mod testing {
    //! Pairs for the rules' own tests.

    use crate::facts::{Facts, IncomingState, QemuDevice, QemuFacts, Subject};
    use crate::report::{Finding, Findings, Report};

    use super::{Pair, Rule};

    /// A rule's findings in two QEMUs that differ only in what `change` does.
    pub(crate) fn between(rule: &Rule, change: impl FnOnce(&mut QemuFacts, &mut QemuFacts)) -> Vec<Finding> {
        let mut source = QemuFacts {
            version: "10.0.2".into(),
            machine: "pc-q35-10.0".into(),
            status: "running".into(),
            ..QemuFacts::default()
        };
        let mut destination =
            QemuFacts { status: "inmigrate".into(), incoming: IncomingState::Deferred, ..source.clone() };
        change(&mut source, &mut destination);
        of(rule, Subject::Qemu(Box::new(source)), Subject::Qemu(Box::new(destination)))
    }

    /// Findings of a rule in any pair.
    pub(crate) fn of(rule: &Rule, source: Subject, destination: Subject) -> Vec<Finding> {
        found(rule, [source, destination], false)
    }

    /// Findings of a rule in a pair that will switch to postcopy.
    pub(crate) fn of_postcopy(rule: &Rule, source: Subject, destination: Subject) -> Vec<Finding> {
        found(rule, [source, destination], true)
    }

    fn found(rule: &Rule, subjects: [Subject; 2], is_postcopy: bool) -> Vec<Finding> {
        let [source, destination] = subjects.map(Facts::from);
        let pair = Pair {
            source: &source,
            destination: &destination,
            lanes: Some(4),
            is_postcopy,
            is_live: true,
            is_one_host: true,
            copies_disks: false,
        };
        let mut report = Report::default();
        (rule.run)(&pair, &mut Findings { rule: rule.id, report: &mut report });
        report.findings().to_vec()
    }

    pub(crate) fn device(kind: &str, place: &str, properties: &[(&str, &str)]) -> QemuDevice {
        let properties = properties.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        QemuDevice {
            kind: kind.into(),
            place: place.into(),
            properties: properties.collect(),
            ..QemuDevice::default()
        }
    }

    #[test]
    fn every_rule_has_an_id_of_its_own() {
        let mut ids: Vec<_> = super::RULES.iter().map(|rule| rule.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), super::RULES.len());
    }

    #[test]
    fn two_alike_are_fine() {
        for rule in super::RULES {
            let found = between(rule, |source, destination| {
                for qemu in [source, destination] {
                    (qemu.devices, qemu.cpus) = (Some(Vec::new()), Some(Vec::new()));
                    (qemu.netdevs, qemu.cpu_features) = (Some(Vec::new()), Some(Vec::new()));
                }
            });
            assert_eq!(found, [], "{}", rule.id);
        }
    }
}
