//! Answers of an action, as OCF has them.

use std::error::Error as StdError;

use crate::console::{self, OverflowPolicy};
use crate::errors;

/// Prints a line for the cluster's log.
pub(super) use crate::console::notice as say;

/// An exit status of OCF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    Done = 0,
    Failed = 1,
    Arguments = 2,
    Unimplemented = 3,
    /// Not usable on this host.
    Installed = 5,
    /// Not usable on any host.
    Configured = 6,
    NotRunning = 7,
    Promoted = 8,
    FailedPromoted = 9,
}

/// An action that was not done, or whose answer is no.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) code: Code,
    /// The reason; `None`: the status says all.
    pub(super) reason: Option<String>,
}

pub(super) type Outcome = Result<(), Refusal>;

impl Refusal {
    pub(super) const NOT_RUNNING: Self = Self { code: Code::NotRunning, reason: None };
    /// An instance that runs, and is promoted.
    pub(super) const PROMOTED: Self = Self { code: Code::Promoted, reason: None };

    pub(super) fn new(code: Code, reason: impl Into<String>) -> Self {
        Self { code, reason: Some(reason.into()) }
    }

    pub(super) fn of(code: Code, error: &(dyn StdError + 'static)) -> Self {
        Self::new(code, errors::worded(error))
    }

    pub(super) fn failed(reason: impl Into<String>) -> Self {
        Self::new(Code::Failed, reason)
    }
}

impl<T: StdError + 'static> From<T> for Refusal {
    fn from(error: T) -> Self {
        Self::of(Code::Failed, &error)
    }
}

/// Prints what was asked for.
pub(super) fn answer(text: &str) {
    console::print(OverflowPolicy::Always, text.trim_end());
}
