//! Exit status of the process.

use schemars::JsonSchema;
use serde::Serialize;
use towline_control::record;

/// Identifier of the exit status, from the best result to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Exit {
    Done,
    /// Refused or failed; a guest is where it was.
    Failed,
    Usage,
    /// Failed; the state of a guest must be checked.
    NeedsAttention,
    CouldNotTell,
    /// The guest is paused.
    Paused,
    /// The QEMU waits for a guest.
    Waiting,
    /// The QEMU has ended.
    Ended,
    /// There is no such guest.
    NoGuest,
}

/// An unusable command line: its text, for [`Exit::Usage`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

impl Exit {
    /// Returns the exit status of a command that failed before it could report a result of its own.
    pub(crate) fn of_error(error: &anyhow::Error) -> Self {
        match error.downcast_ref::<record::Error>() {
            // Two guests may run.
            Some(record::Error::TakenFromHere { .. }) => Self::NeedsAttention,
            _ if error.is::<UsageError>() => Self::Usage,
            _ => Self::Failed,
        }
    }

    /// Returns the exit status.
    pub(crate) fn code(self) -> u8 {
        self as u8
    }
}
