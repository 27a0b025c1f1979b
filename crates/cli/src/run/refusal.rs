//! A run that is refused: its reason for people, with the option that changes it, its identifier and its exit
//! status.

use towline_control::run::Error;
use towline_launch::Refused;

use crate::command_line::quoted;
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::units::size;

/// Reports that no guest was started.
pub(super) fn refused(reporter: &Reporter, error: &Error) -> Exit {
    let (exit, reason) = classified(error);
    reporter.failed(&text(error), reason, exit)
}

/// Returns the exit status, and the identifier of the reason.
fn classified(error: &Error) -> (Exit, &'static str) {
    match error {
        Error::NoCommandLine { .. }
        | Error::NoCacheDirectory
        | Error::NoStores { .. }
        | Error::Name(_)
        | Error::Variable(_) => (Exit::Usage, "usage"),
        Error::Image(_) => (Exit::Failed, "image"),
        Error::CommandLine(_) | Error::Refused(_) => (Exit::Failed, "command-line"),
        _ => (Exit::Failed, "other"),
    }
}

/// Returns why no guest runs, and the option that changes it.
fn text(error: &Error) -> String {
    match error {
        Error::Refused(refused) => refused_options(refused),
        Error::NoCommandLine { .. } => format!("{error}; write all arguments of its QEMU after --"),
        Error::NoCacheDirectory => format!("{error}; give --cache-dir"),
        Error::Cache { .. } => format!("{error}; choose another with --cache-dir, or use --postcopy"),
        Error::NoRoom { directory, free, needed, image } => format!(
            "directory {} has {} free, expected {} for {image}; choose another with --cache-dir, or use --postcopy",
            directory.display(),
            size(*free),
            size(*needed)
        ),
        Error::NotMapped { .. } => format!("{error}; leave --share out, and it is copied"),
        _ => error.to_string(),
    }
}

/// Returns the refusals of a command line, with the command that has a setting for each option that is
/// refused.
fn refused_options(refused: &Refused) -> String {
    let settings = refused.settings();
    if settings.is_empty() {
        return refused.to_string();
    }
    let mut words: Vec<String> = std::env::args_os().map(|word| quoted(&word)).collect();
    let at = words.iter().position(|word| word == "--").unwrap_or(words.len());
    words.splice(at..at, settings.into_iter().map(|key| format!("--set {key}=VALUE")));
    format!("{refused}:\n  {}", words.join(" "))
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
            assert!(text(&error).contains(remedy) && classified(&error).0 == exit, "{error}");
        }
    }
}
