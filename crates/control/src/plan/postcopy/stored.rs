//! A stored guest that is run at once, and how long its connection may be gone.

use std::path::Path;
use std::time::Duration;

use towline_migration::Guest;

/// How long a lost connection is made again before somebody else has to.
pub(super) const RECOVER_TIMEOUT: Duration = Duration::from_secs(60);
/// When a destination that has not noticed by itself is told that its connection is lost.
pub(super) const BREAK_AFTER: Duration = Duration::from_secs(1);

/// A stored guest.
pub(in super::super) struct RestoreSource<'a> {
    pub(in super::super) guest: &'a dyn Guest,
    /// It ran when it was stored.
    pub(in super::super) was_running: bool,
    /// The image's path, beside which its working set is.
    pub(in super::super) path: Option<&'a Path>,
}
