//! Switches of the machine.

use serde_json::Value;

use super::Pair;
use crate::report::Findings;

/// Properties that the facts of devices, memory and processors include.
const SEEN_ELSEWHERE: &[&str] = &["hpet", "vmport", "i8042", "sata", "smbus", "pit", "pic", "acpi", "smp"];
/// Properties whose difference a guest was seen to survive.
const COMPATIBLE_DIFFERENCES: &[&str] = &["smm", "nvdimm", "max-ram-below-4g"];
/// Part of the state of the memory hot-plug controller.
const SLOTS: &str = "slots";
/// Parts of a property that have their own rule.
const MEMORY_SIZE: &str = "size";

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.machine_properties, &destination.machine_properties) else {
        return;
    };
    for (name, mine) in guest.iter().filter(|(name, _)| !SEEN_ELSEWHERE.contains(&name.as_str())) {
        let Some(theirs) = there.get(name) else { continue };
        let (mine, theirs) = (without_size(mine), without_size(theirs));
        let text = format!("-machine's {name} is {mine} in the guest and {theirs} there");
        let remedy = "start both with the same -machine and -m";
        if mine == theirs {
        } else if mine.get(SLOTS) != theirs.get(SLOTS) {
            findings.no(format!("{text}: the slots are in the stream"), remedy);
        } else if COMPATIBLE_DIFFERENCES.contains(&name.as_str()) {
            findings.note(text, remedy);
        } else {
            findings.unknown(text, remedy);
        }
    }
}

/// The size is a RAM block's.
fn without_size(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            map.iter().filter(|(name, _)| *name != MEMORY_SIZE).map(|(k, v)| (k.clone(), v.clone())).collect()
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::between;
    use super::*;
    use crate::report::Severity;

    fn found(name: &str, guest: Value, there: Value) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            source.machine_properties = Some([(name.to_owned(), guest)].into());
            destination.machine_properties = Some([(name.to_owned(), there)].into());
        })
    }

    #[test]
    fn a_switch_that_differs_is_not_known() {
        assert_eq!(found("other", json!("on"), json!("off"))[0].severity, Severity::Unknown);
        assert_eq!(found("smm", json!("on"), json!("off"))[0].severity, Severity::Note);
        assert_eq!(found("hpet", json!(true), json!(false)), []);
        assert_eq!(found("memory", json!({ "size": 1 }), json!({ "size": 2 })), []);
        let slots = found("memory", json!({ "size": 1, "slots": 2 }), json!({ "size": 1 }));
        assert_eq!((slots.len(), slots[0].severity), (1, Severity::No));
    }
}
