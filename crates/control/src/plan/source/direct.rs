//! A QEMU that sends its guest to the QEMU of another host directly.

use std::fs;

use towline_channel::{Address, Listener};
use towline_migration::ZeroCopySend;
use towline_qmp::commands::{Capability, Migrate, MigrationStatus};

use super::super::context::Context;
use super::super::error::Error;
use super::super::request::Direct;
use super::migration::STOPPED;
use super::qmp_source::{self, QmpSource, STREAM_SOCKET};
use crate::qemu::AppliedSettings;

impl QmpSource {
    /// Listens for its stream, which another process passes on. Also returns the address.
    pub(in super::super) fn listen(&self) -> Result<(Listener, Address), Error> {
        Ok((self.dir.listen(STREAM_SOCKET)?, self.link.address.clone()))
    }

    /// Configures QEMU and has it migrate to `address`, until it waits with a stopped guest.
    pub(in super::super) fn start_direct(
        &mut self,
        address: &Address,
        how: &Direct,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        let options = context.options;
        let mut settings = self.migration_settings(context);
        settings.capabilities.insert(Capability::PAUSE_BEFORE_SWITCHOVER, true);
        settings.capabilities.extend(how.capabilities.iter().map(|name| (name.clone(), true)));
        if how.permits_postcopy() {
            settings.parameters.max_postcopy_bandwidth =
                Some(options.transfer_options().max_bandwidth.unwrap_or(0));
        }
        if options.zero_copy_send == ZeroCopySend::On {
            settings.capabilities.insert(Capability::ZERO_COPY_SEND, true);
            self.report_locked_memory(context);
        }
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        qmp_source::check_run_state(&mut self.qemu, options)?;
        context.check_cancelled()?;
        self.start_migration(&Migrate::to_uri(address.to_string()))
    }

    /// Warns of a limit of locked memory, with which the kernel may refuse to send without copies.
    fn report_locked_memory(&self, context: &Context<'_>) {
        let limits =
            self.qemu.process().pid().and_then(|pid| fs::read_to_string(format!("/proc/{pid}/limits")).ok());
        let limit = limits.as_deref().and_then(locked_memory_limit);
        let memory: u64 = self.qemu.facts().migrated_blocks().map(|block| block.used_bytes).sum();
        if let Some(limit) = limit.filter(|&limit| limit < memory) {
            context.observer.notice(&format!(
                "QEMU on {} may lock {limit} bytes of memory (RLIMIT_MEMLOCK), and its guest has {memory}: if the migration fails, raise the limit (prlimit --memlock) or give it CAP_IPC_LOCK",
                self.qemu.socket()
            ));
        }
    }

    /// Returns true if the guest is stopped, its disks have been copied, and the migration may complete.
    ///
    /// # Errors
    /// The migration has ended.
    pub(in super::super) fn is_at_switchover(&self) -> Result<bool, Error> {
        match self.last_status() {
            Some(status) if STOPPED.contains(status) || status.is_postcopy() => Ok(!self.copies_disks()),
            Some(status) if status.is_idle() => Err(self.failure()),
            _ => Ok(false),
        }
    }

    /// Returns true if it has not connected to its destination yet.
    pub(in super::super) fn is_connecting(&self) -> bool {
        self.last_status() == Some(&MigrationStatus::SETUP)
    }

    /// Has the migration complete.
    pub(in super::super) fn complete_direct(&mut self) -> Result<(), Error> {
        // Else another user of the monitor has had it complete.
        if self.last_status() == Some(&MigrationStatus::PRE_SWITCHOVER) {
            self.qemu.continue_migration()?;
        }
        Ok(())
    }

    /// Reports passes for which zero-copy sends were requested, and the kernel copied.
    pub(in super::super) fn report_missed_zero_copy(&self, context: &Context<'_>) {
        let ram = self.last_migration.as_ref().and_then(|migration| migration.ram.as_ref());
        if let Some(ram) = ram.filter(|_| context.options.zero_copy_send == ZeroCopySend::On) {
            let missed = ram.dirty_sync_missed_zero_copy;
            context
                .observer
                .notice(&format!("passes over memory in which the kernel copied all the same: {missed}"));
        }
    }
}

/// The soft limit of locked memory in `/proc/PID/limits`, in bytes; `None`: unlimited.
fn locked_memory_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_locked_memory_is_that_of_the_kernels_table() {
        let table = |soft: &str| {
            format!(
                "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {soft}   unlimited   bytes\nMax pending signals  1 1 signals\n"
            )
        };
        assert_eq!(locked_memory_limit(&table("8388608")), Some(8_388_608));
        assert_eq!(locked_memory_limit(&table("unlimited")), None);
        let own = fs::read_to_string("/proc/self/limits").unwrap();
        assert!(own.contains("Max locked memory"), "{own}");
    }
}
