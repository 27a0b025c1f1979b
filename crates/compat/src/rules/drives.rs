//! Drives: each may be shared, copied, a different file, missing or locked.

use super::Pair;
use crate::facts::{Drive, Lock};
use crate::report::Findings;
use crate::size::size_text;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some(destination) = pair.destination_qemu() else { return };
    let there = destination.drives.as_deref().unwrap_or_default();
    let guest = pair.source.qemu().and_then(|source| source.drives.as_deref()).unwrap_or_default();
    for drive in guest {
        match there.iter().find(|other| other.device == drive.device) {
            None => findings.note(
                format!("drive {} ({}, {}) is missing there", drive.device, drive.file, drive.format),
                "disks are not moved: give it a medium if the guest uses it",
            ),
            Some(other) if is_same(drive, other, pair.is_one_host) => findings
                .note(format!("drive {} ({}, {}) is shared", drive.device, drive.file, drive.format), ""),
            Some(other) if pair.copies_disks && !drive.read_only => {
                findings
                    .note(format!("drive {} ({}) is copied to {}", drive.device, drive.file, other.file), "");
            }
            Some(other) => another(drive, other, findings),
        }
    }
    if !pair.is_live {
        return;
    }
    for drive in there {
        let is_the_guests = guest.iter().any(|own| is_same(own, drive, pair.is_one_host));
        let is_locked = match drive.lock {
            Lock::Held => true,
            Lock::HeldByReaders => !drive.read_only,
            Lock::Free | Lock::Unknown => false,
        };
        if is_locked && !is_the_guests {
            findings.no(
                format!(
                    "drive {} ({}) there is locked: another guest runs with it",
                    drive.device, drive.file
                ),
                "end that guest first, or give this one its own disk",
            );
        }
    }
}

fn another(drive: &Drive, other: &Drive, findings: &mut Findings<'_>) {
    findings.note(
        format!("drive {} is {} in the guest and {} there", drive.device, drive.file, other.file),
        "disks are not moved: see that it has the same content",
    );
    if drive.virtual_bytes != other.virtual_bytes {
        findings.note(
            format!(
                "drive {} has {} in the guest and {} there",
                drive.device,
                size_text(drive.virtual_bytes),
                size_text(other.virtual_bytes)
            ),
            "the guest goes by the size that it knows",
        );
    }
}

/// The same file: by identity on this host, or by name where the facts may be from two.
fn is_same(a: &Drive, b: &Drive, one_host: bool) -> bool {
    match (&a.identity, &b.identity) {
        (Some(a), Some(b)) if one_host => a == b,
        _ => a.file == b.file,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, of};
    use super::*;
    use crate::facts::{Facts, ImageFacts, QemuFacts, Subject};
    use crate::report::Severity;

    fn drive(file: &str, lock: Lock) -> Drive {
        Drive { device: "disk0".into(), file: file.into(), lock, ..Drive::default() }
    }

    fn found(guest: Vec<Drive>, there: Vec<Drive>) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            (source.drives, destination.drives) = (Some(guest), Some(there));
        })
    }

    #[test]
    fn one_that_both_have_may_be_locked_by_the_guest_itself() {
        let found = found(vec![drive("a", Lock::Held)], vec![drive("a", Lock::Held)]);
        assert_eq!((found.len(), found[0].severity), (1, Severity::Note));
        assert!(found[0].text.ends_with("is shared"));
    }

    #[test]
    fn two_names_of_one_file_are_one() {
        let named = |file: &str| Drive { identity: Some("1:2".into()), ..drive(file, Lock::Held) };
        assert!(found(vec![named("a")], vec![named("b")])[0].text.ends_with("is shared"));
    }

    #[test]
    fn a_missing_one_and_another_file_are_notes() {
        assert!(found(vec![drive("a", Lock::Free)], Vec::new())[0].text.ends_with("is missing there"));
        let found = found(vec![drive("a", Lock::Free)], vec![drive("b", Lock::Free)]);
        assert!(found.iter().all(|found| found.severity == Severity::Note), "{found:?}");
    }

    #[test]
    fn one_that_is_copied_needs_no_thought() {
        let facts = |file| QemuFacts { drives: Some(vec![drive(file, Lock::Free)]), ..QemuFacts::default() };
        let [source, destination] = ["a", "b"].map(|file| Facts::from(Subject::Qemu(Box::new(facts(file)))));
        let pair = Pair {
            source: &source,
            destination: &destination,
            lanes: None,
            is_postcopy: false,
            is_live: true,
            is_one_host: false,
            copies_disks: true,
        };
        let report = crate::evaluate(&pair);
        let found: Vec<_> = report.findings().iter().filter(|found| found.rule == "drives").collect();
        assert!(found.len() == 1 && found[0].text.ends_with("is copied to b"), "{found:?}");
    }

    #[test]
    fn a_drive_locked_by_another_process_is_a_no() {
        let locked = |lock, read_only| {
            let drive = Drive { read_only, ..drive("a", lock) };
            let there = QemuFacts { drives: Some(vec![drive]), ..QemuFacts::default() };
            let found = of(run, Subject::Image(ImageFacts::default()), Subject::Qemu(Box::new(there)));
            found.first().map(|found| found.severity)
        };
        assert_eq!(locked(Lock::Held, false), Some(Severity::No));
        assert_eq!(locked(Lock::Held, true), Some(Severity::No));
        assert_eq!(locked(Lock::HeldByReaders, true), None);
        assert_eq!(locked(Lock::HeldByReaders, false), Some(Severity::No));
        assert_eq!(locked(Lock::Unknown, false), None);
    }
}
