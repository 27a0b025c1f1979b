//! The end of a QEMU's migration: cancelled, yanked, and cleaned up.

use std::thread;
use std::time::{Duration, Instant};

use towline_qmp::commands::{MigrateCancel, MigrateContinue, MigrationStatus, Yank, YankInstance};

use super::mirror::unless_refused;
use super::{Error, Qemu};

/// Timeout for a migration to end after it was cancelled, and for QEMU to clean it up.
pub(crate) const MIGRATION_CLEANUP_TIMEOUT: Duration = Duration::from_secs(15);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Qemu {
    /// Cancels its migration, also one that waits before the switchover: a QEMU (10.0) that fails, or is
    /// cancelled, in the moment before waits nevertheless, with a stopped guest, until a `migrate-continue`.
    /// One that refuses, as newer ones in postcopy, shows in its status what it does.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn cancel_migration(&mut self) -> Result<(), Error> {
        unless_refused(self.client().execute(&MigrateCancel))?;
        [MigrationStatus::CANCELLING, MigrationStatus::FAILED]
            .into_iter()
            .try_for_each(|state| unless_refused(self.client().execute(&MigrateContinue { state })))
    }

    /// Closes the connections of its migration, if there is one.
    ///
    /// # Errors
    /// The monitor is lost.
    pub(crate) fn yank_migration(&mut self) -> Result<(), Error> {
        // Out of band: its main loop may wait for these connections.
        unless_refused(self.client().execute_out_of_band(&Yank { instances: vec![YankInstance::Migration] }))
    }

    /// Waits until it has cleaned up a migration, some time after it reported `completed` or `failed`. Until
    /// then it may abort if settings are changed, and refuses a `migrate` ("duplicate yank instance") but
    /// is left in a migration that does not exist.
    ///
    /// Returns false if it has not within [`MIGRATION_CLEANUP_TIMEOUT`]. QEMU 10.0 may never do so after
    /// connections that broke in their first moment: its migration thread then waits for a lane whose thread
    /// has ended.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn wait_migration_cleanup(&mut self) -> Result<bool, Error> {
        let deadline = Instant::now() + MIGRATION_CLEANUP_TIMEOUT;
        while self.cleans_up_migration()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Returns true if it has not cleaned up its last migration.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(super) fn cleans_up_migration(&mut self) -> Result<bool, Error> {
        match self.client().execute_raw("query-yank", None) {
            Ok(instances) => {
                let mut instances = instances.as_array().into_iter().flatten();
                Ok(instances.any(|instance| instance["type"] == "migration"))
            }
            Err(error) if error.is_command_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
