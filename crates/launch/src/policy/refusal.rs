//! Refusals of an image's command line, by name.

use std::fmt;

use super::super::settings::SettingError;

/// Refusals that a message lists; the number of the others follows.
const SHOWN_MAX: usize = 24;

/// One option or property that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The key of the setting that replaces it, as `drive.disk0.file`.
    pub setting: String,
    /// The beginning of its value, with control characters escaped.
    pub found: String,
    /// The reason.
    pub reason: RefusalReason,
}

/// Reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The option is not on the list of those that an image may have.
    Option,
    /// The option belongs to the process, which the launcher sets up itself.
    Process,
    /// The type, model or driver is not on the list.
    Type,
    /// The property is not on the list.
    Property,
    /// The value names something of the host.
    Host,
    /// The value does not have the permitted form.
    Form {
        /// Description of that form.
        expected: String,
    },
    /// The property is given more than once.
    Repeated,
    /// The id is given more than once.
    DuplicateId,
    /// The value was left out when the command line was recorded.
    LeftOut,
    /// Memory that nothing of the guest uses.
    UnusedMemory,
    /// A file of this host without a format, which would be guessed from what the guest wrote.
    Format,
}

/// A command line that is not started.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// Of the image, with every refusal.
    Image(Vec<Refusal>),
    /// A setting of the user.
    Setting(SettingError),
    /// An argument of the user.
    Argument(crate::ParseError),
    /// An option of the user that would detach QEMU from the launcher.
    Unsupervised {
        /// The option.
        option: &'static str,
        /// The reason, and what to do.
        reason: &'static str,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.setting)?;
        if !self.found.is_empty() {
            write!(f, "={}", self.found)?;
        }
        let reason = match &self.reason {
            RefusalReason::Option => "an image may not have this option",
            RefusalReason::Process => "this option belongs to the process that saved it",
            RefusalReason::Type => "an image may not have this type",
            RefusalReason::Property => "an image may not have this property",
            RefusalReason::Host => "comes from this host only",
            RefusalReason::Form { expected } => return write!(f, ": expected {expected}"),
            RefusalReason::Repeated => "given more than once",
            RefusalReason::DuplicateId => "this id is given more than once",
            RefusalReason::UnusedMemory => "memory that no part of the guest uses",
            RefusalReason::LeftOut => "a secret, which is not in the image",
            RefusalReason::Format => "missing; without it QEMU guesses the format from what the guest wrote",
        };
        write!(f, ": {reason}")
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refusals = match self {
            Self::Image(refusals) => refusals,
            Self::Setting(error) => return write!(f, "{error}"),
            Self::Argument(error) => return write!(f, "QEMU's arguments cannot be read: {error}"),
            Self::Unsupervised { option, reason } => {
                return write!(f, "QEMU's arguments have {option}: {reason}");
            }
        };
        write!(f, "command line of the image is refused:")?;
        for refusal in refusals.iter().take(SHOWN_MAX) {
            write!(f, "\n  {refusal}")?;
        }
        match refusals.len().checked_sub(SHOWN_MAX) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, "\n  and {more} more"),
        }
    }
}

impl Refused {
    /// The settings that replace what is refused, without their values.
    #[must_use]
    pub fn settings(&self) -> Vec<&str> {
        let refusals: &[Refusal] = if let Self::Image(refusals) = self { refusals } else { &[] };
        let mut keys: Vec<&str> = refusals.iter().map(|refusal| refusal.setting.as_str()).collect();
        keys.dedup();
        keys
    }
}

impl std::error::Error for Refused {}

impl From<SettingError> for Refused {
    fn from(error: SettingError) -> Self {
        Self::Setting(error)
    }
}
