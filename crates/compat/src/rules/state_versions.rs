//! Versions of devices' states: the version written, and the oldest that is accepted.

use super::Pair;
use crate::facts::{BinaryFacts, Field, ImageFacts, StateFormat, Subject};
use crate::limits;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    match (&pair.source.subject, &pair.destination.subject) {
        (Subject::Image(image), Subject::Binary(binary)) => stored(image, binary, findings),
        (Subject::Binary(source), Subject::Binary(destination)) => binaries(source, destination, findings),
        _ => {}
    }
}

fn stored(image: &ImageFacts, binary: &BinaryFacts, findings: &mut Findings<'_>) {
    for section in &image.sections {
        // Not every state is a device's; the others (timer, cpu_common) have no description in a dump. Of
        // several devices whose states have one name, any may be the guest's.
        let all = || binary.states.values().filter(|state| state.name == section.state());
        let is_read = |state: &StateFormat| (state.version_min..=state.version).contains(&section.version);
        if let Some(there) = all().next().filter(|_| !all().any(is_read)) {
            version(&format!("{:?}", section.name), section.version, there, findings);
        }
    }
}

fn binaries(source: &BinaryFacts, destination: &BinaryFacts, findings: &mut Findings<'_>) {
    for (kind, state) in &source.states {
        match destination.states.get(kind) {
            None => findings.no(
                format!("the destination has no device {kind}, or it has no state there"),
                "a guest with one cannot be moved there",
            ),
            Some(there) => {
                version(kind, state.version, there, findings);
                fields(kind, state, there, 0, findings);
            }
        }
    }
}

fn version(name: &str, written: u32, there: &StateFormat, findings: &mut Findings<'_>) {
    if written > there.version {
        findings.no(
            format!("the state of {name} has version {written}, there at most {} is read", there.version),
            "use a QEMU there that is not older",
        );
    } else if written < there.version_min {
        findings.no(
            format!(
                "the state of {name} has version {written}, there at least {} is read",
                there.version_min
            ),
            "go by a QEMU in between",
        );
    }
}

/// Compares the fields that are always in a stream and that both have in the same version.
fn fields(name: &str, a: &StateFormat, b: &StateFormat, depth: usize, findings: &mut Findings<'_>) {
    if depth > limits::DEPTH_MAX {
        return;
    }
    let always = |state: &StateFormat, version: u32| {
        let field = |field: &&Field| !field.conditional && field.version <= version;
        state.fields.iter().filter(field).cloned().collect::<Vec<_>>()
    };
    let (mine, theirs) = (always(a, a.version), always(b, a.version));
    if mine.len() != theirs.len() {
        findings.unknown(
            format!("the state of {name} has {} fields, there {} are read", mine.len(), theirs.len()),
            "",
        );
        return;
    }
    for (mine, theirs) in mine.iter().zip(&theirs) {
        match (&mine.structure, &theirs.structure) {
            (Some(a), Some(b)) => fields(&format!("{name}/{}", mine.name), a, b, depth + 1, findings),
            (None, None) if mine.size != theirs.size => findings.unknown(
                format!(
                    "the field {} of {name} has {} bytes, there {} has {}",
                    mine.name, mine.size, theirs.name, theirs.size
                ),
                "",
            ),
            _ => {}
        }
    }
    for part in &a.subsections {
        match b.subsections.iter().find(|there| there.name == part.name) {
            None => findings.note(
                format!("the state of {name} may have a part {} that is not known there", part.name),
                "a guest that needs it would be refused",
            ),
            Some(there) => version(&part.name, part.version, there, findings),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::of;
    use super::*;
    use crate::facts::Section;
    use crate::report::Severity;

    fn state(version: u32, version_min: u32, sizes: &[u64]) -> StateFormat {
        let field = |size: &u64| Field { name: "f".into(), size: *size, ..Field::default() };
        StateFormat {
            name: "e1000".into(),
            version,
            version_min,
            fields: sizes.iter().map(field).collect(),
            subsections: Vec::new(),
        }
    }

    fn binary(state: StateFormat) -> Subject {
        Subject::Binary(BinaryFacts { machine: "m".into(), states: [("e1000".to_owned(), state)].into() })
    }

    #[test]
    fn an_images_state_must_be_within_what_is_read() {
        let severity = |version| {
            let section = Section { name: "0000:00:02.0/e1000".into(), instance: 0, version };
            let image = ImageFacts { sections: vec![section], ..ImageFacts::default() };
            let found = of(run, Subject::Image(image), binary(state(3, 2, &[])));
            found.first().map(|found| found.severity)
        };
        assert_eq!([1, 2, 3, 4].map(severity), [Some(Severity::No), None, None, Some(Severity::No)]);
    }

    #[test]
    fn two_binaries_are_compared_field_by_field() {
        let found = |a, b| of(run, binary(a), binary(b));
        assert_eq!(found(state(3, 1, &[4, 8]), state(3, 1, &[4, 8])), []);
        assert_eq!(found(state(3, 1, &[]), state(2, 1, &[]))[0].severity, Severity::No);
        let sized = found(state(3, 1, &[4, 8]), state(3, 1, &[4, 2]));
        assert_eq!(sized[0].text, "the field f of e1000 has 8 bytes, there f has 2");
        assert_eq!(found(state(3, 1, &[4]), state(3, 1, &[4, 8]))[0].severity, Severity::Unknown);
        let none = Subject::Binary(BinaryFacts { machine: "m".into(), ..BinaryFacts::default() });
        assert_eq!(of(run, binary(state(1, 1, &[])), none)[0].severity, Severity::No);
    }
}
