//! The source has a guest, the destination waits for one.

use super::Pair;
use crate::facts::IncomingState;
use crate::report::{ConfiguredBy, Findings, Severity};

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    if pair.source.qemu().is_some_and(|source| source.status == "inmigrate") {
        findings.no("the source waits for a guest itself", "is this the destination?");
    }
    if !pair.is_live {
        return;
    }
    let Some(destination) = pair.destination_qemu() else { return };
    match destination.incoming {
        IncomingState::Deferred => {}
        IncomingState::No => findings.no(
            format!("the destination does not wait for a guest, its status is `{}`", destination.status),
            "start it with `-incoming defer`",
        ),
        IncomingState::Listening => findings.add(
            Severity::No,
            Some(ConfiguredBy::Towline),
            "the destination already waits for a guest at the address on its command line".into(),
            "start it with `-incoming defer`, or copy to that address".into(),
        ),
        IncomingState::Loading => findings.no(
            "the destination has been given a guest to load before",
            "end it and start it again with `-incoming defer`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;

    #[test]
    fn a_destination_that_runs_a_guest_takes_none() {
        let found = between(run, |_, destination| {
            destination.incoming = IncomingState::No;
            destination.status = "running".into();
        });
        assert_eq!(
            found[0].to_string(),
            "the destination does not wait for a guest, its status is `running` (start it with `-incoming defer`)"
        );
        let found = between(run, |_, destination| destination.incoming = IncomingState::Listening);
        assert_eq!(found[0].configured_by, Some(ConfiguredBy::Towline));
        let found = between(run, |_, destination| destination.incoming = IncomingState::Loading);
        assert_eq!(found[0].severity, Severity::No);
    }

    #[test]
    fn a_source_that_waits_has_no_guest() {
        let found = between(run, |source, _| source.status = "inmigrate".into());
        assert_eq!(found[0].text, "the source waits for a guest itself");
    }
}
