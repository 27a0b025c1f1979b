//! A running QEMU that sends its guest by postcopy to another one, by itself: started, switched, and recovered.

use towline_channel::Address;
use towline_qmp::commands::{Capability, Migrate, MigrateStartPostcopy, MigrationInfo, RunState};

use super::super::destination::is_live;
use super::super::{Error, Options, converge};
use super::{BANDWIDTH_UNLIMITED, QmpSource};
use crate::qemu::Settings;

impl QmpSource {
    /// Sets QEMU and has it migrate to `address`, pass after pass until it is told to switch.
    pub(in super::super) fn start_postcopy(
        &mut self,
        address: &Address,
        preempt: bool,
        options: &Options,
    ) -> Result<(), Error> {
        let mut wanted = self.wanted(0, options);
        wanted.capabilities.insert(Capability::POSTCOPY_RAM, true);
        if preempt {
            wanted.capabilities.insert(Capability::POSTCOPY_PREEMPT, true);
        }
        wanted.parameters.max_bandwidth = Some(options.max_bandwidth.unwrap_or(BANDWIDTH_UNLIMITED));
        // So much of what nobody waits for, too; 0 is QEMU's way to say "as fast as it goes".
        wanted.parameters.max_postcopy_bandwidth = Some(options.max_bandwidth.unwrap_or(0));
        self.settings = Some(Settings::apply(&mut self.qemu, &wanted)?);
        self.wait_tidy()?;
        self.begin(&Migrate::to_uri(address.to_string()))
    }

    /// How the migration goes now; `None`: QEMU does not answer just now.
    pub(in super::super) fn migration(&mut self) -> Result<Option<MigrationInfo>, Error> {
        let migration = self.patiently(|qemu| qemu.migration())?;
        if let Some(migration) = &migration {
            self.progress = converge::progress(migration);
        }
        Ok(migration)
    }

    /// Whether its guest runs, or sleeps and wakes up by itself; `None`: it does not answer just now, or the migration itself has
    /// stopped the guest, which says nothing of what it did before.
    pub(in super::super) fn is_live(&mut self) -> Result<Option<bool>, Error> {
        let status = self.patiently(|qemu| qemu.status())?;
        let by_migration = [RunState::FINISH_MIGRATE, RunState::POSTMIGRATE];
        Ok(status.filter(|status| !by_migration.contains(&status.status)).map(|status| is_live(&status)))
    }

    /// Has the guest go to its destination, and its memory follow.
    pub(in super::super) fn switch(&mut self) -> Result<(), Error> {
        self.qemu.client().execute(&MigrateStartPostcopy)?;
        Ok(())
    }

    /// Goes on, over another connection, with what was interrupted.
    pub(in super::super) fn resume_to(&mut self, address: &Address) -> Result<(), Error> {
        let command = Migrate { resume: Some(true), ..Migrate::to_uri(address.to_string()) };
        self.qemu.client().execute(&command)?;
        Ok(())
    }

    /// QEMU's words for what is wrong.
    pub(in super::super) fn failed(&self, migration: &MigrationInfo) -> Error {
        let text = migration.error_desc.clone().unwrap_or_else(|| "it does not say why".into());
        Error::SourceFailed { socket: self.qemu.socket().into(), text }
    }
}
