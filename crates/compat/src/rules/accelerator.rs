//! KVM at the source, emulation at the destination.

use super::Pair;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    if let (Some(guest), Some(there)) = (source.kvm, destination.kvm)
        && guest != there
    {
        let name = |kvm| if kvm { "KVM" } else { "emulation (TCG)" };
        findings.unknown(
            format!("the guest runs by {}, there it would by {}", name(guest), name(there)),
            "QEMU does not promise that such a move works: start it with the same -accel",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::report::Severity;

    #[test]
    fn nobody_promises_that_it_works() {
        let found = between(run, |source, destination| {
            (source.kvm, destination.kvm) = (Some(true), Some(false));
        });
        assert_eq!(found[0].severity, Severity::Unknown);
        assert_eq!(between(run, |source, _| source.kvm = Some(true)), []);
    }
}
