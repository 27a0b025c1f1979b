//! Texts of errors: each cause once, and remedies outside of towline.

use towline_control::plan::{Error, Failure};

/// Texts of QEMU that userfaultfd is missing, which is a matter of rights on every kernel that QEMU supports.
const USERFAULTFD_ERRORS: [&str; 4] = [
    "Background-snapshot is not supported by host kernel",
    "Userfaultfd not available",
    "userfault",
    "Postcopy is not supported",
];

/// Formats an error and its causes in one line. A cause whose text the error already contains is left out.
pub(crate) fn text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    crate::console::printable(&text).into_owned()
}

/// Formats a failure of a copy for people: several reasons as a list.
pub(crate) fn failure_text(failure: &Failure) -> String {
    match failure.error.as_ref() {
        Error::DoesNotFit { destination, reasons } if reasons.len() > 1 => {
            let reasons = reasons.iter().map(|reason| format!("\n  - {reason}")).collect::<String>();
            format!("the guest does not fit {destination}:{reasons}")
        }
        error => error.to_string(),
    }
}

/// Returns a remedy for an error of QEMU whose text does not contain it.
pub(crate) fn advice(text: &str) -> Option<&'static str> {
    let is_of_qemu = text.contains("QEMU on ");
    let needs_userfaultfd = USERFAULTFD_ERRORS.iter().any(|error| text.contains(error));
    (is_of_qemu && needs_userfaultfd).then_some(
        "QEMU's user needs the right to handle page faults: access to /dev/userfaultfd (Linux 6.1 and QEMU 8.0), \
         or the sysctl vm.unprivileged_userfaultfd=1",
    )
}

#[cfg(test)]
mod tests {
    use towline_control::plan::GuestAfterFailure;

    use super::*;

    /// An error that contains its cause's text, as those of the libraries do.
    #[derive(Debug)]
    struct Outer {
        source: std::io::Error,
    }

    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a.img: {}", self.source)
        }
    }

    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.source)
        }
    }

    #[test]
    fn a_cause_is_named_once() {
        let source = || std::io::Error::from_raw_os_error(2);
        let error = anyhow::Error::from(Outer { source: source() });
        assert_eq!(text(&error), "a.img: No such file or directory (os error 2)");
        let error = anyhow::Error::from(source()).context("--socket a");
        assert_eq!(text(&error), "--socket a: No such file or directory (os error 2)");
        let error = anyhow::Error::from(Outer { source: source() }).context("inspect");
        assert_eq!(text(&error), "inspect: a.img: No such file or directory (os error 2)");
    }

    #[test]
    fn several_reasons_are_a_list() {
        let failure = |reasons: &[&str]| {
            let reasons = reasons.iter().map(ToString::to_string).collect();
            let error = Error::DoesNotFit { destination: "QEMU on b".into(), reasons };
            Failure { error: Box::new(error), guest: GuestAfterFailure::SAFE, notes: Vec::new() }
        };
        assert_eq!(failure_text(&failure(&["x"])), "the guest does not fit QEMU on b: x");
        assert_eq!(failure_text(&failure(&["x", "y"])), "the guest does not fit QEMU on b:\n  - x\n  - y");
    }

    #[test]
    fn missing_rights_for_userfaultfd_have_a_remedy() {
        for text in [
            "QEMU on a refused: Background-snapshot is not supported by host kernel",
            "QEMU on b: Userfaultfd not available: Operation not permitted",
        ] {
            assert!(advice(text).is_some_and(|remedy| remedy.contains("vm.unprivileged_userfaultfd=1")));
        }
        assert_eq!(advice("QEMU on b: no space"), None);
        assert_eq!(advice("a.img: Userfaultfd not available"), None);
    }
}
