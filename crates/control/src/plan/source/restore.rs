//! The end of a migration at its source: QEMU's cleanup, its settings, its guest.

use std::thread;
use std::time::{Duration, Instant};

use super::super::error::Error;
use super::super::report::SourceState;
use super::super::request::CopyRequest;
use super::qmp_source::QmpSource;
use crate::switchover::GuestRunState;

/// Timeout for QEMU to clean up a migration: the previous one, and this one.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(15);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Action on the source's guest once its settings are restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum GuestAction {
    /// Left unchanged.
    Leave,
    /// Resumed: this migration stopped it.
    Resume,
}

/// End of the copy whose source is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum CopyEnd {
    /// The guest is at its destination.
    Complete,
    /// The guest stays here, and gets its detached devices back.
    Failed,
}

/// A source whose settings are restored.
#[derive(Debug, Default)]
pub(in super::super) struct RestoredSource {
    /// Downtime in milliseconds, as QEMU reported it last.
    pub(in super::super) downtime_ms: Option<u64>,
    /// Notices for the user.
    pub(in super::super) notes: Vec<String>,
}

impl QmpSource {
    /// Restores the settings, and then the guest.
    pub(in super::super) fn restore(
        &mut self,
        action: GuestAction,
        end: CopyEnd,
    ) -> Result<RestoredSource, Error> {
        let tidy = self.wait_migration_cleanup();
        let (downtime_ms, mut notes) = match tidy {
            Ok(is_clean) => (self.reported_downtime(), self.restore_settings_if_clean(is_clean)),
            Err(error) if end == CopyEnd::Failed => return Err(error),
            // The copy is complete, even if its source fails now.
            Err(error) => {
                self.keep_settings();
                (None, vec![error.to_string()])
            }
        };
        if end == CopyEnd::Failed {
            let attached = self.vsocks.attach(&mut self.qemu);
            notes.extend(attached.err().map(|error| error.to_string()));
        }
        if end == CopyEnd::Failed && self.resumed {
            // An earlier copy had paused it.
            self.qemu.stop()?;
        } else if action == GuestAction::Resume {
            self.qemu.cont()?;
        }
        Ok(RestoredSource { downtime_ms, notes })
    }

    /// Ends QEMU after a move. Returns the downtime in milliseconds.
    pub(in super::super) fn quit(&mut self) -> Result<Option<u64>, Error> {
        self.keep_settings();
        let downtime_ms = self.wait_migration_cleanup().ok().and_then(|_| self.reported_downtime());
        self.qemu.quit()?;
        Ok(downtime_ms)
    }

    /// State of the guest at the source when the copy is complete.
    pub(in super::super) fn state_after(
        &mut self,
        options: &CopyRequest,
        exited: bool,
        guest: GuestRunState,
    ) -> SourceState {
        if exited || options.ends_source() {
            return SourceState::Ended;
        }
        if options.is_snapshot() {
            let runs = self.qemu.status().map_or(self.was_running, |status| status.running);
            return if runs { SourceState::Running } else { SourceState::Unchanged };
        }
        if options.resumes() && guest.is_live() { SourceState::Running } else { SourceState::Paused }
    }

    /// Waits until QEMU has cleaned up a migration, some time after it reported `completed` or `failed`. A
    /// `migrate` that comes too early is refused ("duplicate yank instance") and leaves QEMU in a migration
    /// that does not exist.
    ///
    /// Returns false if it has not within the timeout.
    pub(super) fn wait_migration_cleanup(&mut self) -> Result<bool, Error> {
        let deadline = Instant::now() + CLEANUP_TIMEOUT;
        while self.is_cleanup_pending()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    pub(super) fn is_cleanup_pending(&mut self) -> Result<bool, Error> {
        match self.qemu.client().execute_raw("query-yank", None) {
            Ok(instances) => Ok(instances
                .as_array()
                .is_some_and(|list| list.iter().any(|instance| instance["type"] == "migration"))),
            Err(error) if error.is_command_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Downtime in milliseconds. QEMU reports `completed` a moment before it has this number, which is there
    /// after the cleanup.
    pub(in super::super) fn reported_downtime(&mut self) -> Option<u64> {
        let downtime = self.qemu.migration().ok()?.downtime?;
        u64::try_from(downtime).ok()
    }

    /// Restores the settings, unless QEMU is still cleaning up: it may evaluate them then, and abort.
    pub(super) fn restore_settings_if_clean(&mut self, is_clean: bool) -> Vec<String> {
        if is_clean {
            return self.restore_settings();
        }
        self.keep_settings();
        let (socket, waited) = (self.qemu.socket(), CLEANUP_TIMEOUT.as_secs());
        vec![format!(
            "QEMU on {socket} has not cleaned up its migration within {waited} s: its capabilities and parameters stay as they \
             were set for this copy"
        )]
    }

    /// Only after QEMU's cleanup, which evaluates the current settings some time after the migration's end,
    /// and aborts (`yank_unregister_instance`) if it has lanes that these do not have.
    pub(super) fn restore_settings(&mut self) -> Vec<String> {
        let restored = self.settings.take().map(|settings| settings.restore(&mut self.qemu));
        restored.and_then(Result::err).map(|error| error.to_string()).into_iter().collect()
    }
}
