//! The migration of a source while it runs: progress, result, cancellation.

use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_qmp::Event;
use towline_qmp::commands::{MigrateCancel, MigrationInfo, MigrationStatus, RunState, Status};

use super::super::error::Error;
use super::super::progress::Progress;
use super::super::request::CopyRequest;
use super::qmp_source::QmpSource;
use crate::switchover::SourceStatus;

/// Interval of queries while memory is transferred.
const QUERY_INTERVAL: Duration = Duration::from_millis(250);
/// Pause before a monitor that could not be reconnected is tried again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(10);

impl QmpSource {
    /// Queries the progress at intervals.
    pub(in super::super) fn poll(&mut self, cancel: &Cancel) -> Result<Progress, Error> {
        self.apply_tuning();
        if self.queried_at.elapsed() >= QUERY_INTERVAL {
            self.queried_at = Instant::now();
            // A QEMU that is completing does not reply for as long as that takes.
            let Some(migration) = self.qemu.watch_migration(Some(cancel))? else { return Ok(self.progress) };
            if migration.status == Some(MigrationStatus::FAILED) {
                let text = migration.error_desc.unwrap_or_else(|| "QEMU reports no reason".into());
                return Err(Error::SourceFailed { socket: self.qemu.socket().into(), text });
            }
            self.progress = self.convergence.progress(&migration);
            self.convergence.observe(&migration)?;
        }
        Ok(self.progress)
    }

    /// Queries the state of its migration. A missing reply is no evidence; an exited process is.
    pub(in super::super) fn query_status(&mut self, options: &CopyRequest) -> SourceStatus {
        match self.qemu.try_query(|qemu| Ok((qemu.migration()?, qemu.status()?))) {
            Ok(Some((migration, status))) => {
                let view = self.status_of(&migration, &status, options);
                self.last_migration = Some(migration);
                view
            }
            Ok(None) => SourceStatus::Unknown,
            Err(error) => {
                tracing::debug!(%error, "the source does not reply");
                if self.has_exited() { SourceStatus::Exited } else { self.reconnect() }
            }
        }
    }

    pub(super) fn status_of(
        &self,
        migration: &MigrationInfo,
        status: &Status,
        options: &CopyRequest,
    ) -> SourceStatus {
        let of_migration = migration.status.as_ref().filter(|_| self.started);
        match of_migration {
            Some(status) if *status == MigrationStatus::POSTCOPY_PAUSED => SourceStatus::FollowingPaused,
            Some(status) if status.is_postcopy() => SourceStatus::Following,
            Some(status) if !status.is_idle() => SourceStatus::Migrating,
            Some(done) if *done == MigrationStatus::COMPLETED => {
                // The guest of a background snapshot keeps running. Any other has been resumed if it is not
                // as the migration left it, even if it was stopped again, or sleeps.
                if status.status == RunState::POSTMIGRATE || options.is_snapshot() {
                    SourceStatus::Completed
                } else if status.status == RunState::FINISH_MIGRATE {
                    SourceStatus::Migrating
                } else {
                    SourceStatus::CompletedThenResumed
                }
            }
            // A source that fails late is stopped for a moment before it resumes its guest by itself.
            Some(_) if status.status == RunState::FINISH_MIGRATE => SourceStatus::Migrating,
            _ => SourceStatus::HasGuest,
        }
    }

    /// Connects again: the monitor is disconnected and QEMU is not known to have exited, so a proxy may have
    /// ended.
    pub(super) fn reconnect(&mut self) -> SourceStatus {
        if let Err(error) = self.qemu.reconnect() {
            tracing::debug!(%error, "the monitor cannot be reconnected");
            thread::sleep(RECONNECT_INTERVAL);
        }
        SourceStatus::Unknown
    }

    /// Error of a migration whose result is not known.
    pub(in super::super) fn not_completed(&self, waited: Duration) -> Error {
        let status = self.last_migration.as_ref().and_then(|migration| migration.status.as_ref());
        let status = status.map_or("nothing", MigrationStatus::as_str).to_owned();
        Error::NotCompleted { socket: self.qemu.socket().into(), status, waited }
    }

    /// Cancels the migration, if this command started it.
    pub(in super::super) fn cancel_migration(&mut self) -> Result<(), Error> {
        if self.started {
            self.qemu.try_query(|qemu| Ok(qemu.client().execute(&MigrateCancel)?))?;
        }
        Ok(())
    }

    /// Waits for an event with a new migration status.
    pub(in super::super) fn await_event(&mut self, at_most: Duration) {
        let is_migration = |event: &Event| MigrationStatus::of_event(event).is_some();
        if let Err(error) = self.qemu.client().wait_event(is_migration, at_most) {
            // The next query finds a lost monitor.
            tracing::trace!(%error, "no event");
        }
    }
}
