//! `migration_version`: one attribute that each migratable device offers, judged by the destination's device
//! itself.
//!
//! Reading it returns the device's version string, which is opaque to other types. Writing the *source's*
//! string to the *destination's* attribute checks it: success, the device can be migrated there; an errno, it
//! cannot, and the device's log has the reason. Both types are compared before anything is written. A device
//! that cannot be migrated fails the read with ENODEV. (Linux, "vfio/mdev: expose mdev migration version",
//! 2019.)

use crate::facts::{AttributeFacts, Facts, Subject};
use crate::limits;
use crate::report::{Findings, Report};

/// Id of this rule's findings.
pub const RULE_ID: &str = "migration-version";
/// Errno of a device that cannot be migrated (`errno.h`).
const ENODEV: i32 = 19;

/// Adds the verdict of a destination's device on the source's version to a report. `write` passes the string
/// to the device, and is called only if the types match and the source has a string; its error is the
/// device's reason for refusing it.
///
/// Nothing is added unless both are attributes, or towline devices.
pub fn evaluate(
    report: &mut Report,
    source: &Facts,
    destination: &Facts,
    write: impl FnOnce(&str) -> Result<(), String>,
) {
    if let (Some(source), Some(destination)) = (attribute(source), attribute(destination)) {
        compare(&source, &destination, write, &mut Findings { rule: RULE_ID, report });
    }
}

/// The device's attribute, if the facts have one.
fn attribute(facts: &Facts) -> Option<AttributeFacts> {
    match &facts.subject {
        Subject::Attribute(attribute) => Some(attribute.clone()),
        Subject::Device(device) => Some(AttributeFacts {
            device_type: device.device_type.clone(),
            version: device.migration_version.clone(),
            errno: device.unmigratable.as_ref().map(|_| ENODEV),
        }),
        _ => None,
    }
}

fn compare(
    source: &AttributeFacts,
    destination: &AttributeFacts,
    write: impl FnOnce(&str) -> Result<(), String>,
    findings: &mut Findings<'_>,
) {
    if source.device_type != destination.device_type {
        return findings.no(
            format!(
                "the source's device is of type {:?}, the destination's of type {:?}",
                source.device_type, destination.device_type
            ),
            "only devices of one type can be compared, and migrated",
        );
    }
    let readable = source.version.as_ref().filter(|version| !version.is_empty() && source.errno.is_none());
    let Some(version) = readable else { return unreadable(source.errno, findings) };
    if version.len() > limits::MIGRATION_VERSION_BYTES_MAX {
        let text = format!(
            "the source's version string has {} bytes, expected at most {}",
            version.len(),
            limits::MIGRATION_VERSION_BYTES_MAX
        );
        return findings.no(text, "is this a migration_version attribute?");
    }
    if let Err(why) = write(version) {
        findings.no(
            format!("the destination's device refuses the source's version: {why}"),
            "its log has the reason",
        );
    }
}

fn unreadable(errno: Option<i32>, findings: &mut Findings<'_>) {
    match errno {
        Some(ENODEV) => {
            findings.no("the source's device cannot be migrated (ENODEV)", "its log has the reason");
        }
        Some(errno) => findings.unknown(
            format!("the source's version cannot be read: {}", std::io::Error::from_raw_os_error(errno)),
            "see that the attribute can be read",
        ),
        None => findings.unknown(
            "the source's version is empty or was not read",
            "is this a migration_version attribute?",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts;
    use crate::report::{ConfiguredBy, Verdict};

    fn attribute(device_type: &str, version: Option<&str>, errno: Option<i32>) -> Facts {
        let version = version.map(str::to_owned);
        Subject::Attribute(AttributeFacts { device_type: device_type.into(), version, errno }).into()
    }

    fn verdict(source: &Facts, answer: Result<(), String>) -> (Verdict, Option<String>) {
        let (mut report, mut written) = (Report::default(), None);
        evaluate(&mut report, source, &attribute("net", None, None), |version| {
            written = Some(version.to_owned());
            answer
        });
        (report.verdict(ConfiguredBy::Towline), written)
    }

    #[test]
    fn the_destination_decides() {
        let source = attribute("net", Some("v2 mq=4\n"), None);
        assert_eq!(verdict(&source, Ok(())), (Verdict::Yes, Some("v2 mq=4\n".into())));
        assert_eq!(verdict(&source, Err("why".into())).0, Verdict::No);
    }

    #[test]
    fn nothing_is_written_to_another_type_or_from_one_that_cannot_be_read() {
        let other = attribute("vsock", Some("v2"), None);
        assert_eq!(verdict(&other, Ok(())), (Verdict::No, None));
        assert_eq!(verdict(&attribute("net", None, Some(ENODEV)), Ok(())), (Verdict::No, None));
        assert_eq!(verdict(&attribute("net", None, Some(13)), Ok(())), (Verdict::CouldNotTell, None));
        let long = "x".repeat(limits::MIGRATION_VERSION_BYTES_MAX + 1);
        assert_eq!(verdict(&attribute("net", Some(&long), None), Ok(())), (Verdict::No, None));
    }

    #[test]
    fn a_device_of_ours_has_one_too() {
        let device = |unmigratable: Option<&str>| -> Facts {
            Subject::Device(facts::DeviceFacts {
                device_type: "net".into(),
                migration_version: Some("v2".into()),
                unmigratable: unmigratable.map(str::to_owned),
                ..facts::DeviceFacts::default()
            })
            .into()
        };
        assert_eq!(verdict(&device(None), Ok(())), (Verdict::Yes, Some("v2".into())));
        assert_eq!(verdict(&device(Some("it was started so")), Ok(())), (Verdict::No, None));
    }

    #[test]
    fn other_facts_are_no_pair_of_attributes() {
        let image: Facts = Subject::Image(facts::ImageFacts::default()).into();
        let mut report = Report::default();
        evaluate(&mut report, &image, &image, |_| panic!("nothing is written"));
        assert_eq!(report, Report::default());
    }
}
