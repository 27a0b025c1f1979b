//! The guest of a QEMU that has received it: started, or left to its source.

use std::time::Instant;

use towline_qmp::commands::{RemoveFd, RunState};

use super::super::error::Error;
use super::super::error_origin;
use super::{ENDED_TIMEOUT, HeldGuest, LOADED_TIMEOUT, POLL_INTERVAL, QmpDestination, StartFailure};
use crate::qemu::is_live;
use crate::switchover::StartResult;

impl QmpDestination {
    /// Starts the guest and checks that it runs.
    pub(in super::super) fn start_guest(&mut self) -> Result<StartResult, StartFailure> {
        self.wait_loaded().map_err(|error| self.not_sent(error))?;
        self.end_exports().map_err(|error| self.not_sent(error))?;
        // `cont` leaves it suspended, and its drives unchanged.
        if self.loaded == Some(RunState::SUSPENDED) {
            self.qemu.activate_drives().map_err(|error| self.not_sent(error.into()))?;
        }
        let (mut first, error) = match self.qemu.cont_and_status().map_err(Error::from) {
            Ok(status) => (Some(status), None),
            Err(error) if error_origin::is_timeout(&error) => (None, Some(error)),
            Err(error) if error_origin::is_refusal(&error) => {
                return Err(self.not_started(StartResult::Refused, error));
            }
            Err(error) => return Err(self.not_seen(error)),
        };
        let deadline = Instant::now() + LOADED_TIMEOUT;
        loop {
            let found = match first.take() {
                Some(status) => Ok(Some(status)),
                None => self.qemu.try_query(|qemu| qemu.status()),
            };
            match found {
                Ok(Some(status)) if is_live(&status) => return Ok(StartResult::Live),
                // A command without a reply may still be carried out.
                Ok(found) if (found.is_none() || error.is_some()) && Instant::now() < deadline => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Ok(Some(status)) => {
                    let error = self.not_running(&status);
                    return Err(self.not_started(StartResult::StoppedAgain, error));
                }
                Ok(None) => {
                    let error = error.unwrap_or_else(|| self.not_after("nothing", LOADED_TIMEOUT));
                    return Err(self.not_started(StartResult::Unknown, error));
                }
                Err(error) => return Err(self.not_seen(error.into())),
            }
        }
    }

    /// Ends the source's way to the disks, all of which it has written before its guest was loaded here.
    fn end_exports(&mut self) -> Result<(), Error> {
        if let Some(exports) = &self.exports {
            exports.end(&mut self.qemu)?;
            self.exports = None;
        }
        Ok(())
    }

    /// Its guest was to be started.
    fn not_started(&mut self, started: StartResult, error: Error) -> StartFailure {
        self.keep_settings();
        StartFailure { started, error: Box::new(error) }
    }

    /// `cont` was not sent, for this reason.
    fn not_sent(&mut self, error: Error) -> StartFailure {
        let has_exited = error_origin::is_monitor_lost(&error) && self.qemu.has_exited(ENDED_TIMEOUT);
        self.not_started(if has_exited { StartResult::ExitedBefore } else { StartResult::NotSent }, error)
    }

    /// `cont` was sent, and its effect cannot be queried.
    fn not_seen(&mut self, error: Error) -> StartFailure {
        let has_exited = error_origin::is_monitor_lost(&error) && self.qemu.has_exited(ENDED_TIMEOUT);
        self.not_started(if has_exited { StartResult::Exited } else { StartResult::Unknown }, error)
    }

    /// Restores QEMU's settings. Returns notices. This is the last query of a QEMU that has the guest.
    ///
    /// # Errors
    /// QEMU has exited since.
    pub(in super::super) fn restore_settings(&mut self) -> Result<Vec<String>, Error> {
        self.end_exports()?;
        self.qemu.activate_drives()?;
        let restored = self.settings.take().map(|settings| settings.restore(&mut self.qemu));
        let mut notes: Vec<_> =
            restored.and_then(Result::err).map(|error| error.to_string()).into_iter().collect();
        if let Some(fdset_id) = self.fdset.take()
            && let Err(error) = self.qemu.client().execute(&RemoveFd { fdset_id, fd: None })
        {
            notes.push(format!(
                "the image's descriptor stays open in QEMU on {}: {error}",
                self.qemu.socket()
            ));
        }
        self.qemu.status()?;
        Ok(notes)
    }

    /// Rolls back after a failure, when nothing runs here. Returns notices about changes that are left.
    pub(in super::super) fn roll_back(&mut self, held: HeldGuest) -> Vec<String> {
        if let Err(error) = self.end_exports() {
            tracing::debug!(%error, "the exports of its disks");
        }
        let status = self.qemu.status();
        match self.settings.take() {
            Some(settings) if !self.is_incoming_started && status.is_ok() => {
                let restored = settings.restore(&mut self.qemu);
                return restored.err().map(|error| error.to_string()).into_iter().collect();
            }
            Some(settings) => settings.leave_applied(),
            None => {}
        }
        match status {
            Ok(status) if held == HeldGuest::MayBeOnlyCopy && status.status != RunState::INMIGRATE => {
                Vec::new()
            }
            Ok(status) if self.is_incoming_started && !status.running => {
                vec![format!(
                    "QEMU on {} may hold a part of the guest: end it and start it again before the next copy",
                    self.qemu.socket()
                )]
            }
            _ => Vec::new(),
        }
    }
}
