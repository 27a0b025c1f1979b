//! The machine type with its version, which QEMU compares first.

use super::Pair;
use crate::facts::Subject;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let there = match &pair.destination.subject {
        Subject::Qemu(qemu) => &qemu.machine,
        Subject::Binary(binary) => &binary.machine,
        _ => return,
    };
    if let Some(guest) = pair.guest_machine()
        && guest != there
    {
        findings.no(
            format!("the guest's machine type is {guest}, there it is {there}"),
            format!("start it with -machine {guest}"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;

    #[test]
    fn another_version_of_a_machine_is_another_machine() {
        let found = between(run, |_, destination| destination.machine = "pc-q35-9.0".into());
        assert_eq!(
            found[0].to_string(),
            "the guest's machine type is pc-q35-10.0, there it is pc-q35-9.0 (start it with -machine pc-q35-10.0)"
        );
    }
}
