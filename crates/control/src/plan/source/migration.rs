//! The migration of a source: its settings; its progress, result and cancellation while it runs; and its end,
//! which is QEMU's cleanup, the old settings, and the guest.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_image::SYNC_TIME;
use towline_migration::convergence::CannotConverge;
use towline_qmp::Event;
use towline_qmp::commands::{
    Capability, MigrationInfo, MigrationParameters, MigrationStatus, RunState, Status,
};

use super::super::context::{Context, lane_parameters};
use super::super::disks::DiskMirrors;
use super::super::error::Error;
use super::super::progress::{Progress, SourceState};
use super::super::request::{CopyRequest, Throttling};
use super::qmp_source::QmpSource;
use crate::qemu::{self, MIGRATION_CLEANUP_TIMEOUT, MigrationSettings, Qemu};
use crate::switchover::{GuestRunState, SourceStatus};

/// Interval of queries while memory is transferred.
const QUERY_INTERVAL: Duration = Duration::from_millis(250);
/// States of a migration whose guest is stopped.
pub(super) const STOPPED: [MigrationStatus; 3] =
    [MigrationStatus::PRE_SWITCHOVER, MigrationStatus::DEVICE, MigrationStatus::COMPLETED];
/// Pause before a monitor that could not be reconnected is tried again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(10);

impl QmpSource {
    /// Queries the progress at intervals.
    pub(in super::super) fn poll(&mut self, context: &Context<'_>) -> Result<Progress, Error> {
        let cancel = context.cancel;
        self.apply_tuning(context.options);
        if self.sees_switchover() || self.queried_at.elapsed() >= QUERY_INTERVAL {
            self.queried_at = Instant::now();
            // A QEMU that is completing does not reply for as long as that takes.
            let Some(migration) = self.qemu.watch_migration(Some(cancel))? else { return Ok(self.progress) };
            if migration.status == Some(MigrationStatus::FAILED) {
                return Err(self.failed(migration.error_desc));
            }
            self.progress = self.convergence.progress(&migration);
            self.observe(&migration, context)?;
            self.follow_mirrors(&migration, cancel)?;
            relax_downtime(&migration, context.options);
            self.last_migration = Some(migration);
        }
        Ok(self.progress)
    }

    /// Waits up to an interval for the switchover, if that waits for this process. Returns true if it is there.
    fn sees_switchover(&mut self) -> bool {
        let is_stopped =
            |event: &Event| MigrationStatus::of_event(event).is_some_and(|status| STOPPED.contains(&status));
        (self.waits_for_peer || self.copies_disks())
            && self.qemu.client().wait_event(is_stopped, QUERY_INTERVAL).is_ok()
    }

    /// Returns true if disks are copied, and the guest's writes with them.
    pub(super) fn copies_disks(&self) -> bool {
        self.mirrors.as_ref().is_some_and(DiskMirrors::are_active)
    }

    /// Ends the copy of disks when the guest is stopped, and has the migration go on unless that waits for another towline.
    fn follow_mirrors(&mut self, migration: &MigrationInfo, cancel: &Cancel) -> Result<(), Error> {
        let Some(mirrors) = self.mirrors.as_mut().filter(|mirrors| mirrors.are_active()) else {
            return Ok(());
        };
        if migration.status != Some(MigrationStatus::PRE_SWITCHOVER) {
            return mirrors.check(&mut self.qemu, migration);
        }
        mirrors.complete(&mut self.qemu, cancel)?;
        if self.waits_for_peer {
            return Ok(());
        }
        Ok(self.qemu.continue_migration()?)
    }

    /// Ends the copies of disks, of which the source keeps its own. They stay, paused, while its migration has not been cleaned up, which
    /// may have the guest run as they end. Returns a note on those that stay.
    fn end_mirrors(&mut self, is_unclean: bool) -> Result<Option<String>, Error> {
        if is_unclean {
            let text = "the copies of its disks are paused, and stay until its QEMU is restarted or upgraded, or its migration ends";
            return Ok(self.copies_disks().then(|| text.into()));
        }
        match self.mirrors.take().map_or(Ok(()), |mirrors| mirrors.end(&mut self.qemu)) {
            Err(error @ Error::Qemu(qemu::Error::JobRuns { .. })) => {
                Ok(Some(format!("the copy of its disks was not ended: {error}")))
            }
            ended => ended.map(|()| None),
        }
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

    /// Status of its migration in the last reply.
    pub(in super::super) fn last_status(&self) -> Option<&MigrationStatus> {
        self.last_migration.as_ref()?.status.as_ref()
    }

    /// Error of a migration whose result is not known.
    pub(in super::super) fn not_completed(&self, waited: Duration) -> Error {
        let status = self.last_status().map_or("nothing", MigrationStatus::as_str).to_owned();
        Error::NotCompleted { socket: self.qemu.socket().into(), status, waited }
    }

    /// Cancels the migration, if this command started it.
    pub(in super::super) fn cancel_migration(&mut self) -> Result<(), Error> {
        // Its main loop may wait for the other QEMU until the kernel gives that up, for example for the end of zero-copy sends.
        if self.started && self.waits_for_peer {
            self.qemu.yank_migration()?;
        }
        if self.started {
            self.qemu.try_now(Qemu::cancel_migration)?;
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

/// First downtime limit of an upgrade, for what is left of the memory that it sends. QEMU stops its guest as soon as it can send the rest
/// within the limit, and would send a fast guest's whole memory within the default.
const UPGRADE_DOWNTIME: Duration = Duration::from_millis(2);
/// QEMU's lowest `max-cpu-throttle`, with which auto-converge is on and has no effect, in percent.
const THROTTLE_PERCENT_MIN: u8 = 1;
/// A rate that no host reaches, as QEMU has no value for unlimited.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;
/// Capabilities with which the stream cannot be received here, or would stop midway.
const UNSUPPORTED_CAPABILITIES: [Capability; 11] = [
    Capability::XBZRLE,
    Capability::POSTCOPY_RAM,
    Capability::POSTCOPY_PREEMPT,
    Capability::PAUSE_BEFORE_SWITCHOVER,
    Capability::X_IGNORE_SHARED,
    Capability::BACKGROUND_SNAPSHOT,
    Capability::ZERO_COPY_SEND,
    Capability::SWITCHOVER_ACK,
    Capability::MAPPED_RAM,
    Capability::RELEASE_RAM,
    // A destination compares what it receives even if its own is off.
    Capability::VALIDATE_UUID,
];

/// Further capabilities that exclude a background snapshot; a migration does not change them.
const UNSUPPORTED_WITH_SNAPSHOT: [Capability; 4] = [
    Capability::AUTO_CONVERGE,
    Capability::DIRTY_BITMAPS,
    Capability::DIRTY_LIMIT,
    Capability::LATE_BLOCK_ACTIVATE,
];

impl QmpSource {
    pub(super) fn migration_settings(&self, context: &Context<'_>) -> MigrationSettings {
        let (lanes, options) = (context.lanes(), context.options);
        let known = &self.qemu.facts().capabilities;
        let mut capabilities: BTreeMap<_, _> = UNSUPPORTED_CAPABILITIES
            .into_iter()
            .filter(|name| known.contains_key(name))
            .map(|name| (name, false))
            .collect();
        capabilities.insert(Capability::RETURN_PATH, !options.is_snapshot());
        capabilities.insert(Capability::EVENTS, true);
        capabilities.insert(Capability::MULTIFD, lanes > 0);
        if options.leaves_out_shared_memory() && known.contains_key(&Capability::X_IGNORE_SHARED) {
            // The new QEMU has it: what is sent all the same (a memfd's, from 8.1 on) is dropped.
            capabilities.insert(Capability::X_IGNORE_SHARED, true);
        }
        if self.mirrors.is_some() {
            capabilities.insert(Capability::PAUSE_BEFORE_SWITCHOVER, true);
        }
        let throttling = options.transfer_options().throttling;
        if throttling != Throttling::Unchanged {
            capabilities.insert(Capability::AUTO_CONVERGE, true);
        }
        // No QEMU changes the capability while it migrates.
        let throttle_now = (throttling == Throttling::IfNotConverging).then_some(THROTTLE_PERCENT_MIN);
        if options.is_snapshot() {
            let off = UNSUPPORTED_WITH_SNAPSHOT.into_iter().filter(|name| known.contains_key(name));
            capabilities.extend(off.map(|name| (name, false)));
            capabilities.insert(Capability::BACKGROUND_SNAPSHOT, true);
        }
        let parameters = MigrationParameters {
            max_bandwidth: Some(options.transfer_options().max_bandwidth.unwrap_or(BANDWIDTH_UNLIMITED)),
            downtime_limit: Some(downtime_for_qemu(first_downtime(options), options)),
            cpu_throttle_initial: throttle_now,
            max_cpu_throttle: throttle_now,
            mode: self.qemu.facts().normal_mode(),
            ..lane_parameters(options.compression, lanes)
        };
        MigrationSettings { capabilities, parameters }
    }

    /// Evaluates the progress, and has QEMU throttle its guest or switch it to postcopy.
    fn observe(&mut self, migration: &MigrationInfo, context: &Context<'_>) -> Result<(), Error> {
        match context.options.postcopy() {
            Some(_) if self.is_asked_to_switch || migration.status != Some(MigrationStatus::ACTIVE) => {}
            Some(how) => {
                if self.is_to_switch(migration, how.switch, context.observer)? {
                    self.switch_to_postcopy()?;
                    self.is_asked_to_switch = true;
                }
            }
            None => {
                if let Some(why) = self.convergence.observe(migration)? {
                    self.throttle(&why, context)?;
                }
            }
        }
        Ok(())
    }

    /// Has QEMU throttle a guest that was found not to converge, as its user permitted.
    fn throttle(&mut self, why: &CannotConverge, context: &Context<'_>) -> Result<(), Error> {
        context.observer.notice(&format!("{why}; it is throttled from now on"));
        let before = &self.qemu.facts().parameters;
        let parameters = MigrationParameters {
            cpu_throttle_initial: before.cpu_throttle_initial,
            max_cpu_throttle: before.max_cpu_throttle,
            ..MigrationParameters::default()
        };
        let Some(settings) = &mut self.settings else { return Ok(()) };
        Ok(settings.change(&mut self.qemu, parameters)?)
    }

    /// Applies changed limits. They are restored with all other settings. A refused limit does not end the
    /// copy.
    fn apply_tuning(&mut self, options: &CopyRequest) {
        let tuning = &options.tuning;
        let changes = tuning.changes();
        if std::mem::replace(&mut self.applied_changes, changes) == changes {
            return;
        }
        let bandwidth = tuning.max_bandwidth().map(|rate| rate.unwrap_or(BANDWIDTH_UNLIMITED));
        let parameters = MigrationParameters {
            max_bandwidth: bandwidth,
            downtime_limit: tuning.downtime_limit().map(|limit| downtime_for_qemu(limit, options)),
            ..MigrationParameters::default()
        };
        let Some(settings) = &mut self.settings else { return };
        if let Err(error) = settings.change(&mut self.qemu, parameters) {
            tracing::warn!(%error, "the source refused changed limits");
        }
        if let Some(limit) = tuning.downtime_limit() {
            self.convergence.set_downtime(limit);
        }
    }
}

/// Doubles the downtime limit of an upgrade, up to the user's, if QEMU has passed over memory more than once: its guest writes faster
/// than the limit allows.
fn relax_downtime(migration: &MigrationInfo, options: &CopyRequest) {
    let passes = migration.ram.as_ref().map_or(0, |ram| ram.dirty_sync_count);
    let now = options.tuning.downtime_limit().unwrap_or(first_downtime(options));
    if options.is_upgrade() && passes > 1 && now < options.downtime_limit {
        options.tuning.set_downtime_limit((now * 2).min(options.downtime_limit));
    }
}

/// Downtime limit at the beginning.
fn first_downtime(options: &CopyRequest) -> Duration {
    if options.is_upgrade() { options.downtime_limit.min(UPGRADE_DOWNTIME) } else { options.downtime_limit }
}

/// The milliseconds in which QEMU may send what is left: at least half of the limit. The last sync of an image whose guest runs on takes
/// the rest.
fn downtime_for_qemu(limit: Duration, options: &CopyRequest) -> u64 {
    let limit = if options.resumes() { limit - SYNC_TIME.min(limit / 2) } else { limit };
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

/// Action on the source's guest once its settings are restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::plan) enum GuestAction {
    /// Left unchanged.
    Leave,
    /// Resumed: this migration stopped it.
    Resume,
}

/// End of the copy whose source is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::plan) enum CopyEnd {
    /// The guest is at its destination.
    Complete,
    /// The guest stays here, and gets its detached devices back.
    Failed,
}

impl QmpSource {
    /// Restores the settings, and then the guest. Returns notices for the user.
    pub(in crate::plan) fn restore(
        &mut self,
        action: GuestAction,
        end: CopyEnd,
    ) -> Result<Vec<String>, Error> {
        self.mirrors.iter_mut().for_each(DiskMirrors::disconnect);
        let tidy = self.qemu.wait_migration_cleanup();
        let ended = self.end_mirrors(matches!(tidy, Ok(false)));
        let mut notes = match tidy {
            Ok(is_clean) => self.restore_settings(is_clean),
            Err(error) if end == CopyEnd::Failed => return Err(error.into()),
            // The copy is complete, even if its source fails now.
            Err(error) => {
                self.keep_settings();
                vec![error.to_string()]
            }
        };
        match ended {
            Ok(note) => notes.extend(note),
            // The guest may be left stopped.
            Err(error) if end == CopyEnd::Failed => return Err(error),
            Err(error) => notes.push(error.to_string()),
        }
        let run = if end == CopyEnd::Failed && self.resumed {
            // An earlier copy had paused it.
            self.qemu.stop()
        } else if action == GuestAction::Resume {
            self.qemu.cont()
        } else {
            Ok(())
        };
        if end == CopyEnd::Failed {
            // It may take seconds.
            let attached = self.vsocks.attach(&mut self.qemu);
            notes.extend(attached.err().map(|error| error.to_string()));
        }
        run?;
        Ok(notes)
    }

    /// Ends QEMU after a move. Returns the downtime in milliseconds.
    pub(in crate::plan) fn quit(&mut self) -> Result<Option<u64>, Error> {
        self.keep_settings();
        let downtime_ms = self.qemu.wait_migration_cleanup().ok().and_then(|_| self.reported_downtime());
        self.qemu.quit()?;
        Ok(downtime_ms)
    }

    /// State of the guest at the source when the copy is complete.
    pub(in crate::plan) fn state_after(
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

    /// Downtime in milliseconds. QEMU reports `completed` a moment before it has this number, which is there
    /// after the cleanup.
    pub(in crate::plan) fn reported_downtime(&mut self) -> Option<u64> {
        let downtime = self.qemu.migration().ok()?.downtime?;
        u64::try_from(downtime).ok()
    }

    /// Restores the settings only after QEMU's cleanup, which evaluates the current settings some time after the migration's end,
    /// and aborts (`yank_unregister_instance`) if it has lanes that these do not have.
    fn restore_settings(&mut self, is_clean: bool) -> Vec<String> {
        if is_clean {
            let restored = self.settings.take().map(|settings| settings.restore(&mut self.qemu));
            return restored.and_then(Result::err).map(|error| error.to_string()).into_iter().collect();
        }
        self.keep_settings();
        let (socket, waited) = (self.qemu.socket(), MIGRATION_CLEANUP_TIMEOUT.as_secs());
        vec![format!(
            "QEMU on {socket} has not cleaned up its migration within {waited} s: its capabilities and parameters stay as they \
             were set for this copy"
        )]
    }
}
