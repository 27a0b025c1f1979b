//! A running QEMU that sends its guest by postcopy to another QEMU directly: started, switched, recovered.

use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Address;
use towline_compat::postcopy::{CANCELS_SINCE, READS_DIRTY_LOG_TWICE_SINCE};
use towline_migration::Snapshot;
use towline_qmp::commands::{
    Capability, Migrate, MigratePause, MigrateStartPostcopy, MigrationInfo, MigrationStatus, RamStats,
    RunState,
};

use super::super::context::Context;
use super::super::convergence::moved;
use super::super::destination::BREAK_AFTER;
use super::super::error::{BlockedBy, Error};
use super::super::progress::Observer;
use super::super::request::{CopyRequest, PostcopySwitch, RequestedPages};
use super::super::validate::check_multifd_with_postcopy;
use super::qmp_source::{QmpSource, blocked};
use crate::qemu::{AppliedSettings, Qemu};
use crate::switchover::{GuestRunState, SourceStatus};

/// Time for which a lost monitor of the source is connected to again.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of queries to a source that sends the rest of its memory.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(20);

impl QmpSource {
    /// Configures QEMU and has it migrate to `address`, pass after pass until it switches to postcopy.
    pub(in super::super) fn start_postcopy(
        &mut self,
        address: &Address,
        requested_pages: RequestedPages,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        let mut settings = self.migration_settings(context);
        settings.capabilities.insert(Capability::POSTCOPY_RAM, true);
        if requested_pages == RequestedPages::PreemptChannel {
            settings.capabilities.insert(Capability::POSTCOPY_PREEMPT, true);
        }
        // The same rate for background pages; 0 is unlimited.
        settings.parameters.max_postcopy_bandwidth =
            Some(context.options.transfer_options().max_bandwidth.unwrap_or(0));
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        self.start_migration(&Migrate::to_uri(address.to_string()))
    }

    /// Refuses a guest whose writes would be lost.
    ///
    /// QEMU 11.1 reads the dirty log twice before it sends the first page of a migration that may become
    /// postcopy. An emulated guest's (TCG) writes between the two, and later ones to the same pages, are not
    /// tracked: stale pages arrive. QEMU 10.0 reads it once; versions between are not known to be right. A
    /// paused guest writes nothing.
    pub(in super::super) fn check_postcopy(&mut self) -> Result<(), Error> {
        let version = &self.qemu.facts().version.qemu;
        if !self.was_running
            || (version.major, version.minor) < READS_DIRTY_LOG_TWICE_SINCE
            || self.qemu.is_kvm()?
        {
            return Ok(());
        }
        Err(blocked(&self.qemu, BlockedBy::EmulatedPostcopy { version: self.qemu.version_text() }))
    }

    /// Refuses a guest that cannot be switched to postcopy, and says what that risks.
    pub(in super::super) fn prepare_switch(&mut self, context: &Context<'_>) -> Result<(), Error> {
        self.check_postcopy()?;
        let qemu = &self.qemu.facts().version.qemu;
        if (qemu.major, qemu.minor) < CANCELS_SINCE {
            let (version, first) = (self.qemu.version_text(), CANCELS_SINCE.0);
            let reason = format!(
                "QEMU {version} leaves its guest stopped if a switch to postcopy is cancelled: the source needs {first}.0"
            );
            return Err(blocked(&self.qemu, BlockedBy::Qemu(reason)));
        }
        if context.lanes() > 0 {
            check_multifd_with_postcopy(&self.qemu)?;
        }
        context.observer.notice(
            "once the guest is switched to postcopy, it is lost if either host fails before all of its memory has arrived",
        );
        Ok(())
    }

    /// Returns true if QEMU is to switch to postcopy, by a reply to `query-migrate`.
    pub(in super::super) fn is_to_switch(
        &mut self,
        migration: &MigrationInfo,
        switch: PostcopySwitch,
        observer: &dyn Observer,
    ) -> Result<bool, Error> {
        if !migration.ram.as_ref().is_some_and(|ram| self.has_passed_once(ram)) {
            return Ok(false);
        }
        if switch == PostcopySwitch::FirstPass {
            return Ok(true);
        }
        match self.convergence.observe(migration) {
            Err(Error::CannotConverge { why, .. }) => {
                observer.notice(&format!("{why}; it is switched to postcopy"));
                Ok(true)
            }
            observed => observed.map(|_| false),
        }
    }

    /// Returns true if QEMU has sent all of the guest's memory once. Newer versions would switch with nothing
    /// left to send, which the destination refuses (QEMU 11.1), so they need remaining bytes.
    fn has_passed_once(&self, ram: &RamStats) -> bool {
        let version = &self.qemu.facts().version.qemu;
        if (version.major, version.minor) < READS_DIRTY_LOG_TWICE_SINCE {
            ram.dirty_sync_count > 1
        } else {
            ram.dirty_sync_count > 2 && ram.remaining > 0
        }
    }

    /// Queries a source that was asked to switch to postcopy, at intervals. A lost monitor is connected to again:
    /// a proxy in front of it may have ended.
    ///
    /// # Errors
    /// It has been lost for too long, and QEMU is not known to have exited.
    pub(in super::super) fn follow(&mut self, options: &CopyRequest) -> Result<SourceStatus, Error> {
        let error = match self.qemu.try_query(Qemu::migration_and_status) {
            Ok(found) => {
                self.lost_since = None;
                let Some((migration, status)) = found else { return Ok(SourceStatus::Unknown) };
                let is_idle = migration.status.as_ref().is_some_and(MigrationStatus::is_idle);
                self.progress = self.convergence.progress(&migration);
                let status = self.status_of(&migration, &status, options);
                self.last_migration = Some(migration);
                if !is_idle {
                    thread::sleep(FOLLOW_INTERVAL);
                }
                return Ok(status);
            }
            Err(error) => error,
        };
        if self.has_exited() {
            return Ok(SourceStatus::Exited);
        }
        let lost_since = *self.lost_since.get_or_insert_with(Instant::now);
        if lost_since.elapsed() >= RECONNECT_TIMEOUT {
            return Err(error.into());
        }
        Ok(self.reconnect())
    }

    /// Counters of QEMU's own migration.
    pub(in super::super) fn counted(&self) -> Snapshot {
        self.last_migration.as_ref().map(moved).unwrap_or_default()
    }

    /// Number of pages that the destination has requested.
    pub(in super::super) fn requested_pages(&self) -> u64 {
        let ram = self.last_migration.as_ref().and_then(|migration| migration.ram.as_ref());
        ram.map_or(0, |ram| ram.postcopy_requests)
    }

    /// Queries the migration; `None` if QEMU does not reply now.
    pub(in super::super) fn migration(&mut self) -> Result<Option<MigrationInfo>, Error> {
        let migration = self.qemu.watch_migration(None)?;
        if let Some(migration) = &migration {
            self.progress = self.convergence.progress(migration);
            self.last_migration = Some(migration.clone());
        }
        Ok(migration)
    }

    /// Run state of its guest; `None` if QEMU does not reply now, or the migration itself has stopped the guest.
    pub(in super::super) fn guest_state(&mut self) -> Result<Option<GuestRunState>, Error> {
        let status = self.qemu.try_query(|qemu| qemu.status())?;
        let by_migration = [RunState::FINISH_MIGRATE, RunState::POSTMIGRATE];
        let status = status.filter(|status| !by_migration.contains(&status.status));
        Ok(status.map(|status| GuestRunState::from_state(Some(status.status.as_str()))))
    }

    /// Switches to postcopy.
    pub(in super::super) fn switch_to_postcopy(&mut self) -> Result<(), Error> {
        self.qemu.client().execute(&MigrateStartPostcopy)?;
        Ok(())
    }

    /// Waits until it has completed, or its connection is lost, of which it is notified if it has not noticed and that is this process's own.
    pub(in super::super) fn await_pause(
        &mut self,
        within: Duration,
        is_own: bool,
        options: &CopyRequest,
    ) -> Result<(), Error> {
        let begun = Instant::now();
        let mut is_notified = !is_own;
        loop {
            match self.follow(options)? {
                SourceStatus::FollowingPaused | SourceStatus::Completed => return Ok(()),
                SourceStatus::Following | SourceStatus::Unknown if begun.elapsed() < within => {}
                _ => return Err(self.not_completed(begun.elapsed())),
            }
            if begun.elapsed() >= BREAK_AFTER && !is_notified {
                is_notified = true;
                if let Err(error) = self.qemu.client().execute(&MigratePause) {
                    tracing::debug!(%error, "migrate-pause");
                }
            }
        }
    }

    /// Resumes an interrupted postcopy over another connection.
    pub(in super::super) fn resume_to(&mut self, address: &Address) -> Result<(), Error> {
        let command = Migrate { resume: Some(true), ..Migrate::to_uri(address.to_string()) };
        self.qemu.client().execute(&command)?;
        Ok(())
    }

    /// The error of the migration in the last reply.
    pub(in super::super) fn failure(&self) -> Error {
        self.failed(self.last_migration.as_ref().and_then(|migration| migration.error_desc.clone()))
    }

    /// An error with QEMU's own text, if it has one.
    pub(super) fn failed(&self, reason: Option<String>) -> Error {
        let text = reason.unwrap_or_else(|| "QEMU reports no reason".into());
        Error::SourceFailed { socket: self.qemu.socket().into(), text }
    }
}
