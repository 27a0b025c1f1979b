//! Migration parameters that must be equal at both ends, for a `migrate` by hand.

use serde_json::Value;

use super::Pair;
use crate::facts::QemuFacts;
use crate::report::{ConfiguredBy, Findings, Severity};

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let mut compare = |name: &str, shown: [String; 2]| {
        if shown[0] != shown[1] {
            let text = format!(
                "the parameter {name} is {} at the source and {} at the destination",
                shown[0], shown[1]
            );
            let remedy = "migrate-set-parameters at both, or let towline do it";
            findings.add(Severity::No, Some(ConfiguredBy::ByHand), text, remedy.into());
        }
    };
    let both = [source, destination];
    if both.iter().all(|qemu| qemu.capabilities.get("multifd") == Some(&true)) {
        for name in ["multifd-channels", "multifd-compression"] {
            compare(name, both.map(|qemu| value(qemu, name).to_string()));
        }
    }
    let encrypts = |qemu: &QemuFacts| match value(qemu, "tls-creds").as_str() {
        None | Some("") => "unset".to_owned(),
        Some(_) => "set".to_owned(),
    };
    compare("tls-creds", both.map(encrypts));
}

fn value(qemu: &QemuFacts, name: &str) -> Value {
    qemu.parameters.get(name).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::between;
    use super::*;

    fn found(multifd: bool, name: &str, mine: Value, theirs: Value) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            for (qemu, value) in [(source, mine), (destination, theirs)] {
                qemu.capabilities.insert("multifd".into(), multifd);
                qemu.parameters.insert(name.into(), value);
            }
        })
    }

    #[test]
    fn channels_and_compression_matter_with_multifd() {
        let one = found(true, "multifd-channels", json!(2), json!(4));
        assert_eq!(one[0].text, "the parameter multifd-channels is 2 at the source and 4 at the destination");
        assert_eq!(one[0].configured_by, Some(ConfiguredBy::ByHand));
        assert_eq!(found(false, "multifd-channels", json!(2), json!(4)), []);
        assert_eq!(found(true, "multifd-compression", json!("zstd"), json!("none")).len(), 1);
    }

    #[test]
    fn credentials_have_names_of_their_own() {
        assert_eq!(found(false, "tls-creds", json!("a"), json!("b")), []);
        assert_eq!(found(false, "tls-creds", json!("a"), json!("")).len(), 1);
    }
}
