//! The verb of a finished copy, move or upgrade.

/// Operation on the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Copied,
    Moved,
    Upgraded,
}

impl Verb {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Copied => "copied",
            Self::Moved => "moved",
            Self::Upgraded => "upgraded",
        }
    }
}
