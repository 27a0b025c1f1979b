//! The guest's uuid, which each multifd channel carries, and the stream where `validate-uuid` is on.

use super::Pair;
use crate::report::{ConfiguredBy, Findings, Severity};

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.uuid, &destination.uuid) else { return };
    if guest == there {
        return;
    }
    let text = format!("the guest's uuid is {guest}, there it is {there}");
    let same = format!("start it with -uuid {guest}");
    // A lane through towline gets the destination's, and only the QEMUs of a postcopy are connected directly.
    let lanes = pair.is_postcopy && pair.lanes.is_none_or(|lanes| lanes > 0);
    let is_on = |name: &str| source.capabilities.get(name) == Some(&true);
    let by_hand = is_on("multifd") || is_on("validate-uuid");
    for (way, compared) in [(ConfiguredBy::Towline, lanes), (ConfiguredBy::ByHand, by_hand)] {
        let severity = if compared { Severity::No } else { Severity::Note };
        let remedy = match (way, compared) {
            (_, false) => same.clone(),
            (ConfiguredBy::Towline, true) => {
                format!("{same}, or do without lanes: --multifd-channels 0")
            }
            (ConfiguredBy::ByHand, true) => {
                format!("{same}, or turn the capabilities multifd and validate-uuid off at both ends")
            }
        };
        findings.add(severity, Some(way), text.clone(), remedy);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, of, of_postcopy};
    use super::*;
    use crate::facts::{QemuFacts, Subject};

    #[test]
    fn lanes_between_two_qemus_carry_it() {
        let qemu = |uuid: &str| {
            let facts = QemuFacts { uuid: Some(uuid.into()), ..QemuFacts::default() };
            Subject::Qemu(Box::new(facts))
        };
        let ways = |found: &[crate::Finding]| {
            found.iter().map(|f| (f.configured_by, f.severity)).collect::<Vec<_>>()
        };
        let (towline, by_hand) = (Some(ConfiguredBy::Towline), Some(ConfiguredBy::ByHand));
        let notes = [(towline, Severity::Note), (by_hand, Severity::Note)];
        assert_eq!(ways(&of(run, qemu("1"), qemu("2"))), notes);
        let postcopy = of_postcopy(run, qemu("1"), qemu("2"));
        assert_eq!(ways(&postcopy), [(towline, Severity::No), (by_hand, Severity::Note)]);
        assert_eq!(
            postcopy[0].to_string(),
            "the guest's uuid is 1, there it is 2 (start it with -uuid 1, or do without lanes: --multifd-channels 0)"
        );
        let multifd = between(run, |source, destination| {
            source.capabilities.insert("multifd".into(), true);
            (source.uuid, destination.uuid) = (Some("1".into()), Some("2".into()));
        });
        assert_eq!(ways(&multifd), [(towline, Severity::Note), (by_hand, Severity::No)]);
    }
}
