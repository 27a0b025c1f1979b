//! An older QEMU at the destination.

use super::{Pair, Rule};
use crate::report::Findings;

pub(super) const RULE: Rule = Rule { id: "qemu-version", about: "which QEMU is the older one", run };

fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    if source.version_numbers() > destination.version_numbers() {
        findings.note(
            format!(
                "it goes from QEMU {} to the older {}, which QEMU tests less than the other way",
                source.version, destination.version
            ),
            "",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        let to = |version: &str| between(&RULE, |_, destination| destination.version = version.into()).len();
        assert_eq!((to("7.2.19"), to("10.0.2"), to("10.1.0")), (1, 0, 0));
    }
}
