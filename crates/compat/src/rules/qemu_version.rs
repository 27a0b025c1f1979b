//! An older QEMU at the destination, or an untested version.

use super::Pair;
use crate::facts::version_numbers;
use crate::report::Findings;

/// The first and the last series that towline is tested with.
const TESTED_FROM: (u32, u32) = (7, 2);
const TESTED_TO: (u32, u32) = (11, 1);

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    if version_numbers(&source.version) > version_numbers(&destination.version) {
        findings.note(
            format!(
                "it goes from QEMU {} to the older {}, which QEMU tests less than the other way",
                source.version, destination.version
            ),
            "",
        );
    }
    for (side, qemu) in [("source", source), ("destination", destination)] {
        if let [major, minor, ..] = version_numbers(&qemu.version)[..]
            && !(TESTED_FROM..=TESTED_TO).contains(&(major, minor))
        {
            let text = format!(
                "QEMU {} at the {side} is not a version that towline is tested with: {}.{} to {}.{}",
                qemu.version, TESTED_FROM.0, TESTED_FROM.1, TESTED_TO.0, TESTED_TO.1
            );
            findings.note(text, "try it with a guest that may be lost first");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        let to = |version: &str| between(run, |_, destination| destination.version = version.into()).len();
        assert_eq!((to("7.2.19"), to("10.0.2"), to("10.1.0")), (1, 0, 0));
    }

    #[test]
    fn a_qemu_that_is_not_tested_is_noted() {
        let to = |version: &str| {
            let found = between(run, |source, destination| {
                source.version = "7.2.0".into();
                destination.version = version.into();
            });
            found.into_iter().map(|found| found.text).collect::<Vec<_>>()
        };
        assert_eq!((to("7.2.0"), to("11.1.3")), (vec![], vec![]));
        let wanted =
            "QEMU 11.2.0 at the destination is not a version that towline is tested with: 7.2 to 11.1";
        assert_eq!(to("11.2.0"), [wanted]);
    }
}
