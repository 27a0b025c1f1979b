//! A prevented start of `run`: its exit status and its reason.

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
