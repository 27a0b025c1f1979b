//! A run that is refused: the identifier of the reason, and the exit status.

use towline_control::run::Error;

use crate::errors;
use crate::events::Reason;
use crate::exit::Exit;
use crate::progress::Reporter;

/// Reports that no guest was started.
pub(super) fn refused(reporter: &Reporter, error: &Error) -> Exit {
    let (exit, reason) = classified(error);
    reporter.failed(&errors::worded(error), reason, exit)
}

/// Returns the exit status, and the identifier of the reason.
fn classified(error: &Error) -> (Exit, Reason) {
    match error {
        Error::NoCommandLine { .. }
        | Error::NoCacheDirectory
        | Error::NoStores { .. }
        | Error::Name(_)
        | Error::Variable(_) => (Exit::Usage, Reason::Usage),
        Error::Image(_) => (Exit::Failed, Reason::Image),
        Error::CommandLine(_) | Error::Refused(_) => (Exit::Failed, Reason::CommandLine),
        _ => (Exit::Failed, Reason::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_option_that_changes_them() {
        let name = "a b".parse::<towline_launch::GuestName>().unwrap_err();
        for (error, remedy, exit) in [
            (Error::NoCommandLine { image: "a.img".into() }, "after --", Exit::Usage),
            (Error::NoCacheDirectory, "--cache-dir", Exit::Usage),
            (Error::Name(name), "--name", Exit::Usage),
            (Error::Cache { directory: "a".into(), reason: "b".into() }, "--cache-dir", Exit::Failed),
            (Error::NotMapped { image: "a".into(), reason: "b".into() }, "leave --share out", Exit::Failed),
        ] {
            assert!(errors::worded(&error).contains(remedy) && classified(&error).0 == exit, "{error}");
        }
    }
}
