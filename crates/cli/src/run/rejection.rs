//! A prevented start of `run`: its exit status and its reason.

use towline_launch::Refused;

use crate::command_line::quoted;
use crate::exit::Exit;

/// A `run` that is not started.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) exit: Exit,
    /// Its identifier in `--json`.
    pub(crate) reason: &'static str,
    pub(crate) text: String,
}

impl Rejection {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, reason: "usage", text: text.into() }
    }

    /// Of a command line: with the command that has a setting for each option that is refused.
    pub(crate) fn refused_options(refused: &Refused) -> Self {
        let mut words: Vec<String> = std::env::args_os().map(|word| quoted(&word)).collect();
        let at = words.iter().position(|word| word == "--").unwrap_or(words.len());
        let settings = refused.settings();
        if settings.is_empty() {
            return Self::of_command_line(refused);
        }
        words.splice(at..at, settings.into_iter().map(|key| format!("--set {key}=VALUE")));
        Self::of_command_line(&format!("{refused}:\n  {}", words.join(" ")))
    }

    pub(crate) fn refused(error: &dyn std::fmt::Display) -> Self {
        Self { exit: Exit::Failed, reason: "other", text: error.to_string() }
    }

    pub(crate) fn of_image(error: &dyn std::fmt::Display) -> Self {
        Self { reason: "image", ..Self::refused(error) }
    }

    pub(crate) fn of_command_line(error: &dyn std::fmt::Display) -> Self {
        Self { reason: "command-line", ..Self::refused(error) }
    }
}
