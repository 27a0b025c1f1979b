//! Exit status of the process.

use std::process::ExitCode;

/// Result of the process, from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Exit {
    Done,
    /// Refused or failed; a guest is where it was.
    Failed,
    Usage,
    /// Failed; the state of a guest must be checked.
    NeedsAttention,
    CouldNotTell,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

impl Exit {
    /// Returns the exit status.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::NeedsAttention => 3,
            Self::CouldNotTell => 4,
        }
    }
}
