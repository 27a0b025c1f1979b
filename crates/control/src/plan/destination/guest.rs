//! The guest of a QEMU that has received it: started, or left to its source.

use std::time::Instant;

use towline_qmp::commands::{RemoveFd, RunState, Status};

use super::super::error::Error;
use super::super::error_origin;
use super::{ENDED_TIMEOUT, HeldGuest, LOADED_TIMEOUT, POLL_INTERVAL, QmpDestination, StartFailure, is_live};
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
            Err(error) => return Err(self.not_run(error)),
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
                Ok(Some(status)) if error.is_none() => return Err(self.stopped_again(&status)),
                Ok(_) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                Ok(Some(status)) => return Err(self.stopped_again(&status)),
                Ok(None) => {
                    let socket = self.qemu.socket().to_owned();
                    let (status, waited) = ("nothing".into(), LOADED_TIMEOUT);
                    let error = error.unwrap_or(Error::NotCompleted { socket, status, waited });
                    return Err(StartFailure { started: StartResult::Unknown, error: Box::new(error) });
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

    fn stopped_again(&mut self, status: &Status) -> StartFailure {
        self.keep_settings();
        let (socket, status) = (self.qemu.socket().to_owned(), status.status.as_str().into());
        StartFailure {
            started: StartResult::StoppedAgain,
            error: Box::new(Error::NotRunning { socket, status }),
        }
    }

    /// `cont` was not sent, for this reason.
    fn not_sent(&mut self, error: Error) -> StartFailure {
        self.keep_settings();
        let has_exited = error_origin::is_monitor_lost(&error) && self.qemu.has_exited(ENDED_TIMEOUT);
        let started = if has_exited { StartResult::ExitedBefore } else { StartResult::NotSent };
        StartFailure { started, error: Box::new(error) }
    }

    /// `cont` failed.
    fn not_run(&mut self, error: Error) -> StartFailure {
        if error_origin::is_refusal(&error) {
            self.keep_settings();
            return StartFailure { started: StartResult::Refused, error: Box::new(error) };
        }
        self.not_seen(error)
    }

    /// `cont` was sent, and its effect cannot be queried.
    fn not_seen(&mut self, error: Error) -> StartFailure {
        self.keep_settings();
        let started = match &error {
            error if error_origin::is_monitor_lost(error) && self.qemu.has_exited(ENDED_TIMEOUT) => {
                StartResult::Exited
            }
            _ => StartResult::Unknown,
        };
        StartFailure { started, error: Box::new(error) }
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
