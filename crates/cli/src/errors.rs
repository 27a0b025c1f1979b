//! Texts of errors: each cause once, with the options of this command, and remedies outside of towline.

mod invalid;
mod remedies;

use std::error::Error as StdError;
use std::io;
use std::path::Path;

use anyhow::Chain;
use rustix::io::Errno;
use towline_channel::Error as ChannelError;
use towline_control::plan::{Error, Failure};
use towline_control::qemu::lacks_userfaultfd;
use towline_image::Error as ImageError;
use towline_image::atomic_file::Error as FileError;
use towline_image::manifest::Error as ManifestError;

use crate::sandbox::SandboxArgs;

type AnyError<'a> = &'a (dyn StdError + 'static);

/// Formats an error of a command and its causes in one line. A cause whose text the error already contains is
/// left out.
pub(crate) fn text(error: &anyhow::Error) -> String {
    let mut text = worded(error.as_ref());
    for cause in error.chain().skip(1) {
        let worded = worded(cause);
        if !text.contains(&cause.to_string()) && !text.contains(&worded) {
            text = format!("{text}: {worded}");
        }
    }
    crate::console::printable(&text).into_owned()
}

/// Formats an error of a library, which contains those of its causes that matter, with the options that change
/// them.
pub(crate) fn worded(error: AnyError<'_>) -> String {
    let mut text = remedies::worded(error).unwrap_or_else(|| error.to_string());
    for cause in Chain::new(error).skip(1) {
        if let Some(worded) = remedies::worded(cause)
            && !text.contains(&worded)
        {
            text = text.replacen(&cause.to_string(), &worded, 1);
        }
    }
    text
}

/// Formats a failure of a copy for people: several reasons as a list.
pub(crate) fn failure_text(failure: &Failure) -> String {
    match failure.error.as_ref() {
        Error::DoesNotFit { destination, reasons } if reasons.len() > 1 => {
            let reasons = reasons.iter().map(|reason| format!("\n  - {reason}")).collect::<String>();
            format!("the guest does not fit {destination}:{reasons}")
        }
        error => worded(error),
    }
}

/// Returns what is to be known beside an error: that the sandbox has caused it, or a remedy for QEMU.
pub(crate) fn notes(error: AnyError<'_>, sandbox: Option<&SandboxArgs>) -> Vec<String> {
    let denied = sandbox.and_then(|sandbox| sandbox.explain(errno(error)?, Chain::new(error).find_map(file)));
    let advice = Chain::new(error).any(needs_userfaultfd).then(|| {
        "QEMU's user needs the right to handle page faults: access to /dev/userfaultfd (Linux 6.1 and QEMU 8.0), \
         or the sysctl vm.unprivileged_userfaultfd=1"
            .into()
    });
    denied.into_iter().chain(advice).collect()
}

/// Returns the number of the system's error.
fn errno(error: AnyError<'_>) -> Option<Errno> {
    Chain::new(error).find_map(|cause| match cause.downcast_ref() {
        Some(FileError::Permission { .. }) => Some(Errno::ACCESS),
        _ => Errno::from_io_error(cause.downcast_ref::<io::Error>()?),
    })
}

/// Returns the file of an error.
fn file<'a>(error: AnyError<'a>) -> Option<&'a Path> {
    if let Some(ImageError::Read { path, .. } | ImageError::Write { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    if let Some(FileError::Permission { path, .. } | FileError::Io { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(ManifestError::Io { path, .. }), _) | (_, Some(ChannelError::TlsFile { path, .. })) => {
            Some(path)
        }
        _ => None,
    }
}

/// Returns true if QEMU named a lack of userfaultfd.
fn needs_userfaultfd(error: AnyError<'_>) -> bool {
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(Error::SourceFailed { text, .. } | Error::DestinationFailed { text, .. }), _) => {
            lacks_userfaultfd(text)
        }
        (_, Some(towline_qmp::Error::Refusal { desc, .. })) => lacks_userfaultfd(desc),
        _ => false,
    }
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
        let failed = |text: &str| Error::DestinationFailed { socket: "b".into(), text: text.into() };
        let of_qemu = failed("Userfaultfd not available: Operation not permitted");
        assert!(notes(&of_qemu, None)[0].contains("vm.unprivileged_userfaultfd=1"));
        assert!(notes(&failed("no space"), None).is_empty());
    }

    #[test]
    fn errors_of_libraries_have_the_options_that_change_them() {
        use towline_migration::Error as MigrationError;

        let why = "the guest was made".to_owned();
        let lane = MigrationError::Lane { lane: 1, source: Box::new(MigrationError::NoZeroCopy { why }) };
        assert_eq!(
            worded(&Error::from(lane)),
            "lane 1: zero-copy sends (--zero-copy-send on) are not possible: the guest was made; `auto` goes without where it must"
        );
        let socket = "a".to_owned();
        assert_eq!(
            worded(&Error::NeedsCont { socket }),
            "the guest on a is in `postmigrate` after an earlier copy: run `cont`, or pass --resume"
        );
        let taken = towline_launch::RuntimeError::Taken { name: "a".parse().unwrap(), holder: "b".into() };
        let error = towline_control::run::Error::from(taken);
        assert_eq!(worded(&error), "name a is taken by b; choose another with --name");
    }
}
