//! The rules: one file each, with its subject and its findings in a pair; here their ids.
//!
//! To add one: a file with a `run`, a line in [`RULES`], a row in `docs/check.md`, its own test, and a real
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
    Rule { id: "kinds", run: kinds::run },
    Rule { id: "waiting", run: waiting::run },
    Rule { id: "blocked", run: blocked::run },
    Rule { id: "machine-type", run: machine_type::run },
    Rule { id: "ram-blocks", run: ram_blocks::run },
    Rule { id: "page-size", run: page_size::run },
    Rule { id: "postcopy", run: postcopy::run },
    Rule { id: "uuid", run: uuid::run },
    Rule { id: "cpu-count", run: cpu_count::run },
    Rule { id: "cpu-features", run: cpu_features::run },
    Rule { id: "cpu-model", run: cpu_model::run },
    Rule { id: "accelerator", run: accelerator::run },
    Rule { id: "device-missing", run: device_missing::run },
    Rule { id: "device-kind", run: device_kind::run },
    Rule { id: "device-properties", run: device_properties::run },
    Rule { id: "virtio-features", run: virtio_features::run },
    Rule { id: "virtqueue-sizes", run: virtqueue_sizes::run },
    Rule { id: "net-header", run: net_header::run },
    Rule { id: "netdev-user", run: netdev_user::run },
    Rule { id: "netdev-link", run: netdev_link::run },
    Rule { id: "device-extra", run: device_extra::run },
    Rule { id: "machine-properties", run: machine_properties::run },
    Rule { id: "image-sections", run: image_sections::run },
    Rule { id: "state-versions", run: state_versions::run },
    Rule { id: "towline-device", run: towline_device::run },
    Rule { id: "capabilities", run: capabilities::run },
    Rule { id: "parameters", run: parameters::run },
    Rule { id: "drives", run: drives::run },
    Rule { id: "qemu-version", run: qemu_version::run },
    Rule { id: "prealloc", run: prealloc::run },
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

    use super::Pair;

    type Run = fn(&Pair<'_>, &mut Findings<'_>);

    /// A rule's findings in two QEMUs that differ only in what `change` does.
    pub(crate) fn between(run: Run, change: impl FnOnce(&mut QemuFacts, &mut QemuFacts)) -> Vec<Finding> {
        let mut source = QemuFacts {
            version: "10.0.2".into(),
            machine: "pc-q35-10.0".into(),
            status: "running".into(),
            ..QemuFacts::default()
        };
        let mut destination =
            QemuFacts { status: "inmigrate".into(), incoming: IncomingState::Deferred, ..source.clone() };
        change(&mut source, &mut destination);
        of(run, Subject::Qemu(Box::new(source)), Subject::Qemu(Box::new(destination)))
    }

    /// Findings of a rule in any pair.
    pub(crate) fn of(run: Run, source: Subject, destination: Subject) -> Vec<Finding> {
        found(run, [source, destination], false)
    }

    /// Findings of a rule in a pair that will switch to postcopy.
    pub(crate) fn of_postcopy(run: Run, source: Subject, destination: Subject) -> Vec<Finding> {
        found(run, [source, destination], true)
    }

    fn found(run: Run, subjects: [Subject; 2], is_postcopy: bool) -> Vec<Finding> {
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
        run(&pair, &mut Findings { rule: "tested", report: &mut report });
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
            let found = between(rule.run, |source, destination| {
                for qemu in [source, destination] {
                    (qemu.devices, qemu.cpus) = (Some(Vec::new()), Some(Vec::new()));
                    (qemu.netdevs, qemu.cpu_features) = (Some(Vec::new()), Some(Vec::new()));
                }
            });
            assert_eq!(found, [], "{}", rule.id);
        }
    }
}
