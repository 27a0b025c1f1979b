//! Guests that QEMU itself refuses to migrate.

use super::Pair;
use crate::report::Findings;

/// The device that can be unplugged during a move.
const VSOCK: &str = "vhost-user-vsock";

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let of_source = pair.source.qemu().map_or(&[][..], |source| &source.blocked_reasons[..]);
    for reason in of_source {
        let remedy = if reason.contains(VSOCK) {
            "`towline move --detach-vsock` takes it out, and puts it in again there"
        } else {
            "take that device out of the guest, or end what blocks it"
        };
        findings.no(format!("QEMU cannot send this guest: {reason}"), remedy);
    }
    if let Some(destination) = pair.destination_qemu() {
        for reason in destination.blocked_reasons.iter().filter(|reason| !of_source.contains(reason)) {
            findings.note(format!("it could not be moved on from there: {reason}"), "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::report::Severity;

    #[test]
    fn a_blocker_at_the_source_is_a_no_and_one_there_a_note() {
        let reason = "non-migratable device: 0000:00:02.0/nvme".to_owned();
        let found = between(run, |source, _| source.blocked_reasons.push(reason.clone()));
        assert_eq!(found[0].severity, Severity::No);
        assert!(found[0].text.contains(&reason), "{found:?}");
        let vsock = "non-migratable device: 0000:01:00.0/vhost-user-vsock".to_owned();
        let found = between(run, |source, _| source.blocked_reasons.push(vsock.clone()));
        assert!(found[0].remedy.contains("--detach-vsock"), "{found:?}");
        let found = between(run, |_, destination| destination.blocked_reasons.push(reason.clone()));
        assert_eq!(found[0].severity, Severity::Note);
    }
}
