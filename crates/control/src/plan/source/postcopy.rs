//! A running QEMU that sends its guest by postcopy to another QEMU directly: started, switched, recovered.

use towline_channel::Address;
use towline_qmp::commands::{Capability, Migrate, MigrateStartPostcopy, MigrationInfo, RamStats, RunState};

use super::super::destination::is_live;
use super::super::error::Error;
use super::super::request::{CopyRequest, RequestedPages};
use super::super::validate::check_multifd_with_postcopy;
use super::configuration::BANDWIDTH_UNLIMITED;
use super::qmp_source::QmpSource;
use crate::qemu::AppliedSettings;

/// The first QEMU that reads the dirty log twice before it sends anything: 10.0 does not, 11.1 does.
const READS_DIRTY_LOG_TWICE_SINCE: (u32, u32) = (10, 1);

impl QmpSource {
    /// Configures QEMU and has it migrate to `address`, pass after pass until it switches to postcopy.
    pub(in super::super) fn start_postcopy(
        &mut self,
        address: &Address,
        requested_pages: RequestedPages,
        lanes: usize,
        options: &CopyRequest,
    ) -> Result<(), Error> {
        let mut settings = self.migration_settings(lanes, options);
        settings.capabilities.insert(Capability::POSTCOPY_RAM, true);
        if requested_pages == RequestedPages::PreemptChannel {
            settings.capabilities.insert(Capability::POSTCOPY_PREEMPT, true);
        }
        settings.parameters.max_bandwidth =
            Some(options.transfer_options().max_bandwidth.unwrap_or(BANDWIDTH_UNLIMITED));
        // The same rate for background pages; 0 is unlimited.
        settings.parameters.max_postcopy_bandwidth =
            Some(options.transfer_options().max_bandwidth.unwrap_or(0));
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        self.wait_migration_cleanup()?;
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
        let reason = format!(
            "--postcopy with a running guest that QEMU {} emulates: QEMU loses track of what such a guest writes while it is sent; leave \
             --postcopy out, or pause the guest first (`stop`) and give --run",
            self.version_text()
        );
        Err(Error::Blocked { socket: self.qemu.socket().into(), reasons: vec![reason] })
    }

    /// Refuses a QEMU that has no lanes in a migration that may become postcopy.
    pub(in super::super) fn check_multifd_with_postcopy(&self) -> Result<(), Error> {
        check_multifd_with_postcopy(&self.qemu)
    }

    /// Returns true if QEMU has sent all of the guest's memory once. Newer versions would switch with nothing
    /// left to send, which the destination refuses (QEMU 11.1), so they need remaining bytes.
    pub(in super::super) fn has_passed_once(&self, ram: &RamStats) -> bool {
        let version = &self.qemu.facts().version.qemu;
        if (version.major, version.minor) < READS_DIRTY_LOG_TWICE_SINCE {
            ram.dirty_sync_count > 1
        } else {
            ram.dirty_sync_count > 2 && ram.remaining > 0
        }
    }

    /// Queries the migration; `None` if QEMU does not reply now.
    pub(in super::super) fn migration(&mut self) -> Result<Option<MigrationInfo>, Error> {
        let migration = self.qemu.watch_migration(None)?;
        if let Some(migration) = &migration {
            self.progress = self.convergence.progress(migration);
        }
        Ok(migration)
    }

    /// Returns true if its guest runs, or is suspended and wakes up by itself; `None` if QEMU does not reply
    /// now, or the migration itself has stopped the guest.
    pub(in super::super) fn is_live(&mut self) -> Result<Option<bool>, Error> {
        let status = self.qemu.try_query(|qemu| qemu.status())?;
        let by_migration = [RunState::FINISH_MIGRATE, RunState::POSTMIGRATE];
        Ok(status.filter(|status| !by_migration.contains(&status.status)).map(|status| is_live(&status)))
    }

    /// Switches to postcopy.
    pub(in super::super) fn switch_to_postcopy(&mut self) -> Result<(), Error> {
        self.qemu.client().execute(&MigrateStartPostcopy)?;
        Ok(())
    }

    /// Resumes an interrupted postcopy over another connection.
    pub(in super::super) fn resume_to(&mut self, address: &Address) -> Result<(), Error> {
        let command = Migrate { resume: Some(true), ..Migrate::to_uri(address.to_string()) };
        self.qemu.client().execute(&command)?;
        Ok(())
    }

    /// An error with QEMU's own text.
    pub(in super::super) fn failed(&self, migration: &MigrationInfo) -> Error {
        let text = migration.error_desc.clone().unwrap_or_else(|| "QEMU reports no reason".into());
        Error::SourceFailed { socket: self.qemu.socket().into(), text }
    }
}
