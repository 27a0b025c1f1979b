//! Migration capabilities, which QEMU does not negotiate. towline sets them alike; with `migrate` by hand the
//! user must.

use super::Pair;
use crate::facts::QemuFacts;
use crate::report::{ConfiguredBy, Findings, Severity};

/// Must be the same.
const BOTH: &[(&str, &str)] = &[
    ("multifd", "the destination waits for channels that are never opened, or gets unexpected ones"),
    ("postcopy-preempt", "one side waits for a channel of the other"),
    ("mapped-ram", "QEMU compares it when the stream begins"),
    ("x-ignore-shared", "QEMU compares it when the stream begins"),
    ("compress", "the destination has no threads that decompress"),
];
/// Must be on there if it is on here.
const IF_ON: &[(&str, &str)] = &[
    ("postcopy-ram", "QEMU refuses a stream that announces postcopy"),
    ("switchover-ack", "the source waits for an acknowledgement that never comes"),
];

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let is_on = |qemu: &QemuFacts, name: &str| qemu.capabilities.get(name) == Some(&true);
    let word = |on| if on { "on" } else { "off" };
    for (table, both) in [(BOTH, true), (IF_ON, false)] {
        for (name, why) in table {
            let (mine, theirs) = (is_on(source, name), is_on(destination, name));
            if mine != theirs && (both || mine) {
                let text = format!(
                    "the capability {name} is {} at the source and {} at the destination: {why}",
                    word(mine),
                    word(theirs)
                );
                let remedy = "migrate-set-capabilities at both, or let towline do it";
                findings.add(Severity::No, Some(ConfiguredBy::ByHand), text, remedy.into());
            }
        }
    }
    if let Some(needed) = pair.lanes.filter(|lanes| *lanes > 0) {
        for (side, qemu) in [("source", source), ("destination", destination)] {
            if !qemu.capabilities.is_empty() && !qemu.capabilities.contains_key("multifd") {
                let text = format!("QEMU {} at the {side} has no multifd", qemu.version);
                let remedy = format!("--multifd-channels 0 instead of {needed}");
                findings.add(Severity::No, Some(ConfiguredBy::Towline), text, remedy);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;

    fn found(name: &str, mine: bool, theirs: bool) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            for qemu in [&mut *source, &mut *destination] {
                qemu.capabilities.insert("multifd".into(), false);
            }
            source.capabilities.insert(name.into(), mine);
            destination.capabilities.insert(name.into(), theirs);
        })
    }

    #[test]
    fn only_by_hand_they_must_be_alike() {
        for (name, mine, theirs, count) in [
            ("multifd", true, false, 1),
            ("multifd", false, true, 1),
            ("multifd", true, true, 0),
            ("postcopy-ram", true, false, 1),
            ("postcopy-ram", false, true, 0),
            ("events", true, false, 0),
        ] {
            let found = found(name, mine, theirs);
            assert_eq!(found.len(), count, "{name} {mine} {theirs}: {found:?}");
            assert!(found.iter().all(|found| found.configured_by == Some(ConfiguredBy::ByHand)));
        }
    }

    #[test]
    fn lanes_need_a_qemu_that_has_them() {
        let found = between(run, |source, destination| {
            source.capabilities.insert("multifd".into(), false);
            destination.capabilities.insert("xbzrle".into(), false);
        });
        assert_eq!(found[0].text, "QEMU 10.0.2 at the destination has no multifd");
        assert_eq!(found[0].configured_by, Some(ConfiguredBy::Towline));
    }
}
