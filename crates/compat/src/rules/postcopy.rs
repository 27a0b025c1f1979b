//! Versions and accelerators that send a guest by postcopy.

use super::Pair;
use crate::facts::version_numbers;
use crate::report::{ConfiguredBy, Findings, Severity};

/// The first version that reads the dirty log twice before it sends anything: what an emulated guest writes between is lost.
pub const READS_DIRTY_LOG_TWICE_SINCE: (u32, u32) = (10, 1);
/// The first version with lanes in a migration that may become postcopy.
pub const HAS_LANES_SINCE: (u32, u32) = (10, 1);
/// The first source that runs its guest again after a cancellation before the switch.
pub const CANCELS_SINCE: (u32, u32) = (9, 0);
/// The first destination that can be connected again whatever happens meanwhile.
pub const RECOVERS_SINCE: (u32, u32) = (8, 2);

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus().filter(|_| pair.is_postcopy) else { return };
    let is_older = |version: &str, first: (u32, u32)| match version_numbers(version)[..] {
        [] => false,
        [major] => (major, 0) < first,
        [major, minor, ..] => (major, minor) < first,
    };
    let mut add = |severity, text: String, remedy: &str| {
        findings.add(severity, Some(ConfiguredBy::Towline), text, remedy.to_owned());
    };
    let (here, there) = (source.version.as_str(), destination.version.as_str());
    let is_emulated = source.kvm == Some(false) && source.status == "running";
    if is_emulated && !is_older(here, READS_DIRTY_LOG_TWICE_SINCE) {
        let text = format!("QEMU {here} loses writes of an emulated guest (TCG) in a postcopy");
        add(Severity::No, text, "leave --postcopy out, or pause the guest first");
    }
    let has_lanes = pair.lanes.is_some_and(|lanes| lanes > 0);
    for (side, version) in [("source", here), ("destination", there)] {
        if has_lanes && is_older(version, HAS_LANES_SINCE) {
            let text =
                format!("QEMU {version} at the {side} has no lanes in a migration that may become postcopy");
            add(Severity::No, text, "--multifd-channels 0");
        }
    }
    if pair.is_one_host {
        return;
    }
    if is_older(here, CANCELS_SINCE) {
        let text = format!(
            "QEMU {here} at the source leaves its guest stopped if a switch to postcopy is cancelled"
        );
        add(Severity::No, text, "leave --postcopy out");
    }
    if is_older(there, RECOVERS_SINCE) {
        let text = format!(
            "QEMU {there} at the destination is not connected again if the hosts lose each other after the switch"
        );
        add(Severity::Note, text, "");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{of, of_postcopy};
    use super::*;
    use crate::facts::{QemuFacts, Subject};

    fn qemu(version: &str, kvm: bool) -> Subject {
        let facts = QemuFacts {
            version: version.into(),
            kvm: Some(kvm),
            status: "running".into(),
            ..QemuFacts::default()
        };
        Subject::Qemu(Box::new(facts))
    }

    #[test]
    fn lanes_and_emulated_guests_have_versions() {
        for (here, is_kvm, there, count) in [
            ("10.0.13", false, "10.1.0", 1),
            ("10.1.0", true, "10.1.0", 0),
            ("11.1.0", false, "11.1.0", 1),
            ("10.0.2", true, "10.0.2", 2),
        ] {
            let found = of_postcopy(run, qemu(here, is_kvm), qemu(there, is_kvm));
            assert_eq!(found.len(), count, "{here} {there}: {found:?}");
            assert_eq!(of(run, qemu(here, is_kvm), qemu(there, is_kvm)), []);
        }
    }
}
