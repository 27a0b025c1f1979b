//! A stored guest that is restored by postcopy, and timeouts of its connection.

use std::path::Path;
use std::time::Duration;

use towline_migration::Guest;

/// Time for which a lost connection is recovered.
pub(super) const RECOVER_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay before a destination that has not noticed the loss of its connection is notified.
pub(super) const BREAK_AFTER: Duration = Duration::from_secs(1);

/// A stored guest.
pub(in super::super) struct RestoreSource<'a> {
    pub(in super::super) guest: &'a dyn Guest,
    /// True if it ran when it was stored.
    pub(in super::super) was_running: bool,
    /// The image's path; its working set is a file beside it.
    pub(in super::super) path: Option<&'a Path>,
}
