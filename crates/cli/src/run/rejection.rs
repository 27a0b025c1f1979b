//! A prevented start of `run`: its exit status and its reason.

use crate::exit::Exit;

/// A `run` that is not started.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) exit: Exit,
    pub(crate) text: String,
}

impl Rejection {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, text: text.into() }
    }

    pub(crate) fn refused(error: &dyn std::fmt::Display) -> Self {
        Self { exit: Exit::Failed, text: error.to_string() }
    }
}
