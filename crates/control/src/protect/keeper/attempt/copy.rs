//! The first copy of a guest, with its disks, and the way to its checkpoints.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Map;
use towline_compat::checkpoints::CAPABILITY;
use towline_qmp::commands::{Capability, Migrate, MigrationParameters, MigrationStatus};

use super::super::super::messages::{FerryRequest, FromFerry, Received, ToFerry};
use super::super::process::FERRY_ENDED;
use super::super::request::Error;
use super::{Attempt, LOOK_INTERVAL, STATUS_INTERVAL, out_of_turn};
use crate::journal::{ProtectionRecord, UndoRecord, milliseconds};
use crate::protect::StandbyRequest;
use crate::qemu::{AppliedSettings, MigrationSettings};

/// Time for a step of the ferry, but for the first copy.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the first copy.
const COPY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Longest pause at the end of the first copy.
const COPY_PAUSE_MAX: Duration = Duration::from_secs(5);
/// QEMU's interval of requests, in milliseconds: the ferry replies when the next checkpoint is due.
const REQUEST_INTERVAL_MS: u64 = 5;
/// Time for which QEMU may stop the guest at the end of the first copy, in milliseconds.
const DOWNTIME_MS: u64 = 100;
/// Capabilities with which no checkpoints are taken here.
const OFF: [Capability; 4] =
    [Capability::MULTIFD, Capability::XBZRLE, Capability::POSTCOPY_RAM, Capability::X_IGNORE_SHARED];

impl Attempt<'_, '_> {
    /// Copies the guest, and has checkpoints taken.
    pub(super) fn copy(&mut self) -> Result<(), Error> {
        let request = self.keeper.request;
        let FromFerry::Certificate(certificate) = self.ferry.expect(STEP_TIMEOUT)? else {
            return Err(out_of_turn());
        };
        let (address, stands_by) = self.host.stand_by(&StandbyRequest {
            certificate,
            guest: self.keeper.guest.clone(),
            generation: self.keeper.generation,
            arbiter: request.arbiter.clone(),
            peer_timeout_ms: milliseconds(request.peer_timeout),
            checkpoint_bytes_max: request.checkpoint_bytes_max,
            disks: self.mirrors.disks(),
        })?;
        let [socket, disk_socket] = ["checkpoints.sock", "disks.sock"].map(|name| self.directory.join(name));
        self.ferry.link.send(&ToFerry::Begin(FerryRequest {
            standby: address.to_string(),
            certificate: stands_by.certificate,
            socket: socket.clone(),
            disks: self.mirrors.disks(),
            disk_socket: disk_socket.clone(),
            cards: self.cards.clone(),
            generation: self.keeper.generation,
            epoch_ms: milliseconds(request.epoch),
            ends_on_output: request.ends_on_output,
            peer_timeout_ms: milliseconds(request.peer_timeout),
            checkpoint_bytes_max: request.checkpoint_bytes_max,
        }));
        let FromFerry::Listening = self.ferry.expect(STEP_TIMEOUT)? else { return Err(out_of_turn()) };
        let (cancel, observer) = (self.keeper.cancel, self.keeper.observer);
        self.mirrors.start(&mut self.qemu, &disk_socket, stands_by.disks_are_new, cancel, observer)?;
        self.record()?;
        let settings = self.new_settings();
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        if self.is_emulated {
            self.qemu.stop()?;
        }
        self.ferry.link.send(&ToFerry::Copy);
        self.qemu.migrate(&Migrate::to_uri(format!("unix:{}", socket.display())))?;
        self.await_copy()?;
        self.await_secondary()?;
        self.mirrors.check(&mut self.qemu)?;
        // It may have a checkpoint from now on.
        self.may_be_taken = true;
        self.ferry.link.send(&ToFerry::Go);
        Ok(())
    }

    fn new_settings(&self) -> MigrationSettings {
        let known = &self.qemu.facts().capabilities;
        let on = [Capability::new(CAPABILITY), Capability::RETURN_PATH].map(|name| (name, true));
        let off = OFF.into_iter().filter(|name| known.contains_key(name)).map(|name| (name, false));
        let capabilities: BTreeMap<_, _> = on.into_iter().chain(off).collect();
        let mut other = Map::new();
        other.insert("x-checkpoint-delay".into(), REQUEST_INTERVAL_MS.into());
        let parameters = MigrationParameters {
            max_bandwidth: Some(0),
            downtime_limit: Some(DOWNTIME_MS),
            tls_creds: Some(String::new()),
            other,
            ..MigrationParameters::default()
        };
        MigrationSettings { capabilities, parameters }
    }

    /// Records the work of another towline if this process and the ferry are killed.
    fn record(&mut self) -> Result<(), Error> {
        let (ferry_pid, ferry_start_time) = self.ferry.identity();
        let entry = self.qemu.record(&UndoRecord::Protection(ProtectionRecord {
            ferry_pid,
            ferry_start_time,
            cards: self.cards.clone(),
            guest: self.keeper.guest.clone(),
            generation: self.keeper.generation,
            arbiter: self.keeper.request.arbiter.clone(),
            claimant: self.keeper.claimant.clone(),
        }));
        self.entry = Some(entry.ok_or(Error::NoJournal)?);
        Ok(())
    }

    /// Waits until the standby has the first copy.
    fn await_copy(&mut self) -> Result<(), Error> {
        let not_protected = |reason: &str| Err(Error::NotProtected { reason: reason.to_owned() });
        let deadline = Instant::now() + COPY_TIMEOUT;
        let (mut looked, mut runs) = (Instant::now(), Instant::now());
        loop {
            match self.ferry.link.receive(LOOK_INTERVAL) {
                Received::Message(FromFerry::Copied) => return Ok(()),
                Received::Message(FromFerry::Ended { reason, .. }) => return not_protected(&reason),
                Received::Message(_) => return Err(out_of_turn()),
                Received::End => return not_protected(FERRY_ENDED),
                Received::Nothing => {}
            }
            if self.keeper.cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            if !self.is_emulated && looked.elapsed() >= STATUS_INTERVAL {
                looked = Instant::now();
                if self.qemu.status()?.running {
                    runs = looked;
                }
                if runs.elapsed() > COPY_PAUSE_MAX {
                    return not_protected(
                        "the end of the first copy takes too long, for which the guest is stopped",
                    );
                }
            }
            if Instant::now() >= deadline {
                return not_protected("the first copy takes too long");
            }
        }
    }

    /// Waits until QEMU awaits its secondary: a message that comes earlier may be lost.
    fn await_secondary(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let status = self.qemu.migration()?.status.unwrap_or(MigrationStatus::NONE);
            if status == MigrationStatus::COLO {
                return Ok(());
            }
            if self.keeper.cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            if status.is_idle() || Instant::now() >= deadline {
                let reason = format!("QEMU's migration is {status} after the first copy, expected colo");
                return Err(Error::NotProtected { reason });
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }
}
