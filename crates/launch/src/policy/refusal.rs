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
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RefusalReason {
    /// The option is not on the list of those that an image may have.
    #[error("an image may not have this option")]
    Option,
    /// The option belongs to the process, which the launcher sets up itself.
    #[error("this option belongs to the process that saved it")]
    Process,
    /// The type, model or driver is not on the list.
    #[error("an image may not have this type")]
    Type,
    /// The property is not on the list.
    #[error("an image may not have this property")]
    Property,
    /// The value names something of the host.
    #[error("comes from this host only")]
    Host,
    /// The value does not have the permitted form.
    #[error("expected {expected}")]
    Form { expected: String },
    /// The property is given more than once.
    #[error("given more than once")]
    Repeated,
    /// The id is given more than once.
    #[error("this id is given more than once")]
    DuplicateId,
    /// The value was left out when the command line was recorded.
    #[error("a secret, which is not in the image")]
    LeftOut,
    /// Memory that nothing of the guest uses.
    #[error("memory that no part of the guest uses")]
    UnusedMemory,
    /// A file of this host without a format, which would be guessed from what the guest wrote.
    #[error("missing; without it QEMU guesses the format from what the guest wrote")]
    Format,
}

/// A command line that is not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Of the image, with every refusal.
    #[error("command line of the image is refused:{}", listed(.0))]
    Image(Vec<Refusal>),
    /// A setting of the user.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// An argument of the user.
    #[error("QEMU's arguments cannot be read: {0}")]
    Argument(crate::ParseError),
    /// An option of the user that would detach QEMU from the launcher.
    #[error("QEMU's arguments have {option}: {reason}")]
    Unsupervised { option: &'static str, reason: &'static str },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.setting)?;
        if !self.found.is_empty() {
            write!(f, "={}", self.found)?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Returns a line for each refusal.
fn listed(refusals: &[Refusal]) -> String {
    let mut lines: String = refusals.iter().take(SHOWN_MAX).map(|refusal| format!("\n  {refusal}")).collect();
    if refusals.len() > SHOWN_MAX {
        lines += &format!("\n  and {} more", refusals.len() - SHOWN_MAX);
    }
    lines
}

impl Refused {
    /// The settings that replace what is refused, without their values.
    pub fn settings(&self) -> Vec<&str> {
        let refusals: &[Refusal] = if let Self::Image(refusals) = self { refusals } else { &[] };
        let mut keys: Vec<&str> = refusals.iter().map(|refusal| refusal.setting.as_str()).collect();
        keys.dedup();
        keys
    }
}
