//! State of a postcopy migration.

use crate::memory::GuestMemory;
use crate::sys::Userfaultfd;

/// A postcopy migration under way.
pub(super) struct PostcopyProgress {
    pub(super) userfaultfd: Userfaultfd,
    pub(super) listening: bool,
    /// Mapped memory whose addresses the frontend has not acknowledged yet.
    pub(super) unacknowledged: Option<GuestMemory>,
}
