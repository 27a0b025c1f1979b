//! A waiting QEMU that receives a guest by postcopy: configures, queries and recovers it.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Address;
use towline_migration::Compression;
use towline_protocol::RamBlock;
use towline_protocol::ram::PAGE_SIZE;
use towline_qmp as qmp;
use towline_qmp::commands::{Capability, MigratePause, MigrateRecover, MigrationStatus, RunState, Status};

use super::super::context::Context;
use super::super::error::Error;
use super::super::error_origin;
use super::super::request::RequestedPages;
use super::{QmpDestination, RecoveryState};
use crate::qemu::is_live;
use crate::switchover::{DestinationStatus, FinalRunState, StartResult};

/// Delay before a QEMU that has not noticed the loss of its connection is notified.
pub(in super::super) const BREAK_AFTER: Duration = Duration::from_secs(1);
/// Interval of attempts to recover.
pub(in super::super) const RECOVER_INTERVAL: Duration = Duration::from_millis(20);
/// Number of queries without a reply after which a QEMU is taken for blocked.
const BLOCKED_QUERIES: usize = 6;

impl QmpDestination {
    /// As [`QmpDestination::prepare`], for postcopy.
    pub(in super::super) fn prepare_postcopy(path: &Path, context: &Context<'_>) -> Result<Self, Error> {
        let qemu = context.connect_qemu(path)?;
        context.require_paths(&qemu)?;
        Self::of(qemu)
    }

    /// Connects to a QEMU that runs a guest whose postcopy was interrupted.
    pub(in super::super) fn prepare_recovery(path: &Path, context: &Context<'_>) -> Result<Self, Error> {
        let qemu = context.connect_qemu(path).map_err(|error| match error.into() {
            error if error_origin::is_timeout(&error) => {
                Error::BlockedMonitor { socket: path.display().to_string(), source: Box::new(error) }
            }
            error => error,
        })?;
        let facts = qemu.facts();
        if facts.migration.status != Some(MigrationStatus::POSTCOPY_PAUSED) {
            let status = facts.migration.status.as_ref().map_or("none", MigrationStatus::as_str).to_owned();
            return Err(Error::NothingToRecover { socket: qemu.socket().into(), status });
        }
        let mut recovered = Self { is_incoming_started: true, ..Self::new(qemu)? };
        recovered.qemu.wait_for_replies();
        Ok(recovered)
    }

    /// Channel on which it expects requested pages.
    pub(in super::super) fn requested_pages(&self) -> RequestedPages {
        if self.facts().capabilities.get(&Capability::POSTCOPY_PREEMPT) == Some(&true) {
            RequestedPages::PreemptChannel
        } else {
            RequestedPages::MainChannel
        }
    }

    /// Page sizes of the memory that backs each of these blocks here.
    pub(in super::super) fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        let of = |block: &RamBlock| {
            let here = self.facts().migrated_blocks().find(|here| here.name == block.name);
            here.map_or(PAGE_SIZE, |here| here.page_bytes)
        };
        blocks.iter().map(of).collect()
    }

    /// Configures QEMU and has it listen. A guest that is to run is started by QEMU itself when POSTCOPY_RUN
    /// arrives. Lanes are used until then.
    pub(in super::super) fn start_postcopy(
        &mut self,
        requested_pages: RequestedPages,
        run_state: FinalRunState,
        lanes: usize,
        compression: Compression,
    ) -> Result<Address, Error> {
        let preempt = requested_pages == RequestedPages::PreemptChannel;
        let capabilities = [Capability::POSTCOPY_RAM, Capability::EVENTS].into_iter();
        let capabilities = capabilities.chain(preempt.then_some(Capability::POSTCOPY_PREEMPT));
        self.apply_settings(lanes, compression, capabilities.map(|name| (name, true)))?;
        match run_state {
            // Set while it waits: it runs even if it was started with -S.
            FinalRunState::Running => self.qemu.cont()?,
            FinalRunState::Paused => self.qemu.stop()?,
        }
        let command = self.migrate_incoming(self.link.uri.clone());
        self.is_incoming_started = true;
        self.qemu.client().execute(&command)?;
        Ok(self.link.address.clone())
    }

    /// Returns true if the guest runs; `None` if QEMU does not reply now, as when its main loop waits for a
    /// page.
    pub(in super::super) fn runs_now(&mut self) -> Result<Option<bool>, Error> {
        Ok(self.qemu.try_query(|qemu| qemu.status())?.map(|status| status.running))
    }

    /// Returns true if its main loop waits for a page of the guest: its monitor replies to nothing but
    /// commands out of band, and only on connections that were made before.
    pub(in super::super) fn is_blocked(&mut self) -> bool {
        (0..BLOCKED_QUERIES).all(|_| matches!(self.runs_now(), Ok(None)))
    }

    /// Determines the state after the connection was lost, and has QEMU listen again if it can.
    pub(in super::super) fn recovery_state(&mut self) -> RecoveryState {
        self.recovery().unwrap_or_else(|error| {
            let status = self.query_status();
            let is_there = matches!(status, DestinationStatus::Loaded | DestinationStatus::Running);
            RecoveryState::Ended { status, error: Some(error).filter(|_| !is_there) }
        })
    }

    fn recovery(&mut self) -> Result<RecoveryState, Error> {
        // Out of band: the main loop may wait for a page, and nothing else gets a reply then.
        let address = self.recovery_address(self.recoveries + 1);
        match self.qemu.client().execute_out_of_band(&MigrateRecover { uri: address.to_string() }) {
            Ok(_) => {
                self.recoveries += 1;
                return Ok(RecoveryState::Listening(address));
            }
            // A QEMU that got `migrate-recover` and no connection since continues to listen at that address.
            Err(qmp::Error::Refusal { desc, .. })
                if desc.contains("triggered already") && self.recoveries > 0 =>
            {
                return Ok(RecoveryState::Listening(self.recovery_address(self.recoveries)));
            }
            Err(qmp::Error::Refusal { desc, .. }) => tracing::debug!(desc, "no recovery yet"),
            Err(qmp::Error::Timeout { .. }) => return Ok(RecoveryState::NotReady),
            Err(error) => return Err(error.into()),
        }
        let Some(migration) = self.qemu.try_query(|qemu| qemu.migration())? else {
            return Ok(RecoveryState::NotReady);
        };
        Ok(match migration.status {
            Some(status) if status == MigrationStatus::COMPLETED => {
                RecoveryState::Ended { status: self.query_status(), error: None }
            }
            Some(status) if status == MigrationStatus::FAILED => {
                let error = Some(self.failed(migration.error_desc));
                RecoveryState::Ended { status: DestinationStatus::Failed, error }
            }
            _ => RecoveryState::NotReady,
        })
    }

    /// As [`Self::recovery_state`], until it listens or cannot, for this time at most. A QEMU that has not noticed the loss of its connection
    /// is notified.
    pub(in super::super) fn listen_again(&mut self, within: Duration) -> RecoveryState {
        let begun = Instant::now();
        let mut is_notified = false;
        loop {
            match self.recovery_state() {
                RecoveryState::NotReady if begun.elapsed() < within => {}
                state => return state,
            }
            if begun.elapsed() >= BREAK_AFTER && !is_notified {
                is_notified = true;
                self.pause_migration();
            }
            thread::sleep(RECOVER_INTERVAL);
        }
    }

    fn recovery_address(&self, recovery: u32) -> Address {
        Address::Unix(self.dir.join(&format!("recover-{recovery}.sock")))
    }

    /// Notifies QEMU of a connection that only this side knows to be lost.
    pub(in super::super) fn pause_migration(&mut self) {
        if let Err(error) = self.qemu.client().execute_out_of_band(&MigratePause) {
            tracing::debug!(%error, "migrate-pause");
        }
    }

    /// Starts the guest if all of its devices are loaded, even if memory is missing.
    ///
    /// # Errors
    /// It is not known whether it runs.
    pub(in super::super) fn start_if_loaded(&mut self) -> Result<StartResult, Error> {
        let status = self.qemu.try_query(|qemu| qemu.status()).ok().flatten();
        match status {
            Some(status) if is_live(&status) => return Ok(StartResult::Live),
            Some(status) if status.status == RunState::PAUSED => {}
            Some(_) | None => return Ok(StartResult::NotSent),
        }
        self.qemu.try_query(|qemu| qemu.cont())?;
        let status = self.qemu.try_query(|qemu| qemu.status())?;
        let runs = status.is_some_and(|status| is_live(&status));
        Ok(if runs { StartResult::Live } else { StartResult::Unknown })
    }

    /// Returns an error if the guest does not run.
    pub(in super::super) fn check_running(&mut self) -> Result<(), Error> {
        let status = self.qemu.status()?;
        if is_live(&status) {
            return Ok(());
        }
        Err(self.not_running(&status))
    }

    /// The error of a guest that was to run.
    pub(super) fn not_running(&self, status: &Status) -> Error {
        Error::NotRunning { socket: self.qemu.socket().to_owned(), status: status.status.as_str().into() }
    }

    /// Leaves QEMU's settings unchanged, for a later recovery.
    pub(in super::super) fn keep_settings(&mut self) {
        if let Some(settings) = self.settings.take() {
            settings.leave_applied();
        }
    }
}
