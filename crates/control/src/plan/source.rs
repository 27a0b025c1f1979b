//! A running QEMU as source, driven by its monitor: checked, migrated to this process, watched, restored.

mod postcopy;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Address, Cancel, Listener};
use towline_migration::Tuning;
use towline_migration::incoming::{Connections, gather};
use towline_qmp::commands::{
    Capability, Migrate, MigrateCancel, MigrationInfo, MigrationParameters, MigrationStatus, RunState, Status,
};
use towline_qmp::{self as qmp, Event};

use super::convergence::{self, Convergence};
use super::error::Error;
use super::preflight::GuestFacts;
use super::private_dir::{PrivateDir, open_to_peer};
use super::progress::Progress;
use super::report::SourceState;
use super::request::Request;
use super::vsock::{self, DetachedVsocks};
use super::{compression, error_origin};
use crate::moves::{self, MoveEnd};
use crate::qemu::{self, AppliedSettings, MigrationSettings, Qemu};
use crate::switchover::{GuestRunState, SourceStatus};

/// A rate that no host reaches, as QEMU has no value for unlimited.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;
/// Timeout for lanes to connect after the main channel.
pub(super) const LANES_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of queries while memory is transferred.
const QUERY_INTERVAL: Duration = Duration::from_millis(250);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Timeout for a source whose copy is cancelled to connect.
const CANCELLED_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of queries while its connections are awaited.
const CONNECT_QUERY_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout for QEMU to clean up a migration: the previous one, and this one.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout for the exit of a QEMU whose monitor is disconnected.
const ENDED_TIMEOUT: Duration = Duration::from_secs(1);

/// Capabilities that change the stream into one that cannot be received here, or that would stop it midway.
const UNSUPPORTED_CAPABILITIES: [Capability; 10] = [
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
];

/// Further capabilities that exclude a background snapshot; a migration leaves them as they are.
const UNSUPPORTED_WITH_SNAPSHOT: [Capability; 5] = [
    Capability::AUTO_CONVERGE,
    Capability::DIRTY_BITMAPS,
    Capability::DIRTY_LIMIT,
    Capability::LATE_BLOCK_ACTIVATE,
    Capability::VALIDATE_UUID,
];

/// A QEMU whose guest is to be copied.
#[derive(Debug)]
pub(super) struct QmpSource {
    qemu: Qemu,
    settings: Option<AppliedSettings>,
    /// The guest ran when it was connected to, or is resumed for this copy.
    pub(super) was_running: bool,
    /// It is paused since an earlier copy, and is resumed for this one after all checks.
    resumes: bool,
    /// It was resumed for this copy.
    resumed: bool,
    /// The current migration is that of this command.
    started: bool,
    /// Last reply to `query-migrate`.
    last_migration: Option<MigrationInfo>,
    dir: PrivateDir,
    queried_at: Instant,
    pub(super) progress: Progress,
    convergence: Convergence,
    tuning: Tuning,
    /// Number of tuning changes that QEMU has.
    applied_changes: u64,
    /// Devices that are detached for the move.
    pub(super) vsocks: DetachedVsocks,
}

/// A source whose settings are restored, or that has been ended.
#[derive(Debug, Default)]
pub(super) struct RestoredSource {
    /// Downtime in milliseconds, as QEMU reported it last.
    pub(super) downtime_ms: Option<u64>,
    /// Notices for the user.
    pub(super) notes: Vec<String>,
}

impl QmpSource {
    /// Connects and checks that this guest can be copied.
    pub(super) fn prepare(path: &Path, options: &Request) -> Result<Self, Error> {
        let mut qemu = Qemu::connect(path, &qmp::Options::default())?;
        let socket = qemu.socket().to_owned();
        let facts = qemu.facts();
        if let Some(status) = &facts.migration.status
            && !status.is_final()
        {
            return Err(Error::Migrating { socket, status: status.as_str().into() });
        }
        let detached = |reason: &&String| options.detaches_vsock() && vsock::is_vsock_blocker(reason);
        let reasons: Vec<String> =
            facts.blocked_reasons().iter().filter(|reason| !detached(reason)).cloned().collect();
        if !reasons.is_empty() {
            return Err(Error::Blocked { socket, reasons });
        }
        let status = facts.status.status.clone();
        if status == RunState::INMIGRATE {
            return Err(Error::NoGuest { socket, status: status.as_str().into() });
        }
        let resumes = status == RunState::POSTMIGRATE;
        moves::check_source(&qemu, resumes)?;
        if resumes && !options.resumes() {
            return Err(Error::NeedsCont { socket });
        }
        let was_running = qemu.facts().status.running || resumes;
        let dir = PrivateDir::for_qemu(&qemu)?;
        let (queried_at, progress) = (Instant::now(), Progress::default());
        let convergence = Convergence::new(options, qemu.facts());
        let tuning = options.tuning.clone();
        let vsocks = if options.detaches_vsock() {
            DetachedVsocks::find(&mut qemu)?
        } else {
            DetachedVsocks::default()
        };
        Ok(Self {
            qemu,
            settings: None,
            was_running,
            resumes,
            resumed: false,
            started: false,
            last_migration: None,
            dir,
            queried_at,
            progress,
            convergence,
            tuning,
            applied_changes: 0,
            vsocks,
        })
    }

    /// Facts about its guest; all of them if it is compared with another QEMU.
    pub(super) fn guest(&mut self, is_compared: bool) -> Result<GuestFacts, Error> {
        GuestFacts::of_qemu(&mut self.qemu, is_compared)
    }

    /// Detaches devices that QEMU does not migrate.
    pub(super) fn detach(&mut self, cancel: &Cancel) -> Result<(), Error> {
        self.vsocks.detach(&mut self.qemu, cancel)
    }

    /// The QEMU.
    pub(super) fn qemu(&self) -> &Qemu {
        &self.qemu
    }

    /// The source in a record of the move.
    pub(super) fn move_end(&self) -> MoveEnd {
        MoveEnd::qemu(self.qemu.socket(), self.qemu.process())
    }

    /// The monitor's socket.
    pub(super) fn socket(&self) -> &str {
        self.qemu.socket()
    }

    /// QEMU's version with its package.
    pub(super) fn version_text(&self) -> String {
        self.qemu.version_text()
    }

    /// Configures QEMU and has it migrate to this process.
    pub(super) fn start(
        &mut self,
        lanes: usize,
        options: &Request,
        cancel: &Cancel,
    ) -> Result<Connections, Error> {
        let settings = self.migration_settings(lanes, options);
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        let path = self.stream_path();
        let listener = Listener::bind(&Address::Unix(path.clone()))?;
        open_to_peer(&path)?;
        self.wait_migration_cleanup()?;
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        self.start_migration(&Migrate::to_uri(format!("unix:{}", path.display())))?;
        let deadline = Instant::now() + options.connect_timeout;
        self.accept_connections(listener, lanes, deadline, cancel).map_err(|error| self.explain(error))
    }

    /// Resumes a guest that an earlier copy has paused, and has QEMU migrate it.
    fn start_migration(&mut self, migrate: &Migrate) -> Result<(), Error> {
        if self.resumes {
            self.qemu.cont()?;
            self.resumed = true;
        }
        self.started = true;
        let begun = self.qemu.migrate(migrate);
        if matches!(begun, Err(qemu::Error::Qmp(qmp::Error::Refusal { .. }))) {
            self.started = false;
        }
        begun?;
        Ok(())
    }

    /// Waits for QEMU's connections, and queries meanwhile if it failed or exited.
    ///
    /// A cancellation waits for them too: a QEMU (10.0) whose connections break while it makes them may never
    /// complete that migration, and accepts no other.
    fn accept_connections(
        &mut self,
        listener: Listener,
        lanes: usize,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Connections, Error> {
        let (watcher, ends) = (thread::current(), Cancel::new()?);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let connections = gather(listener, lanes, deadline, LANES_TIMEOUT, &ends);
                watcher.unpark();
                connections
            });
            let (mut why, mut cancelled) = (None, None);
            while !waiter.is_finished() {
                thread::park_timeout(CONNECT_QUERY_INTERVAL);
                if why.is_none() && !ends.is_cancelled() {
                    why = self.check_not_failed().err();
                }
                if cancel.is_cancelled() {
                    cancelled.get_or_insert_with(Instant::now);
                }
                if why.is_some() || cancelled.is_some_and(|at| at.elapsed() >= CANCELLED_CONNECT_TIMEOUT) {
                    ends.cancel();
                }
            }
            match (waiter.join(), why) {
                (Ok(Ok(connections)), _) if cancelled.is_some() => {
                    connections.refuse();
                    Err(Error::Cancelled)
                }
                (Ok(Ok(connections)), _) => Ok(connections),
                (Ok(Err(_)), Some(why)) => Err(why),
                (Ok(Err(error)), None) => Err(error.into()),
                (Err(panic), _) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn check_not_failed(&mut self) -> Result<(), Error> {
        let Some(migration) = self.qemu.try_query(|qemu| qemu.migration())? else { return Ok(()) };
        if migration.status == Some(MigrationStatus::FAILED) {
            let text = migration.error_desc.unwrap_or_else(|| "it gives no reason".into());
            return Err(Error::SourceFailed { socket: self.qemu.socket().into(), text });
        }
        Ok(())
    }

    /// Waits until QEMU has cleaned up a migration, some time after it reported `completed` or `failed`. A
    /// `migrate` that comes too early is refused ("duplicate yank instance") and leaves QEMU in a migration
    /// that does not exist.
    ///
    /// Returns false if it has not within the timeout.
    fn wait_migration_cleanup(&mut self) -> Result<bool, Error> {
        let deadline = Instant::now() + CLEANUP_TIMEOUT;
        while self.is_cleanup_pending()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Restores the settings, unless QEMU is still cleaning up: it may evaluate them then, and abort.
    fn restore_settings_if_clean(&mut self, is_clean: bool) -> Vec<String> {
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

    fn is_cleanup_pending(&mut self) -> Result<bool, Error> {
        match self.qemu.client().execute_raw("query-yank", None) {
            Ok(instances) => Ok(instances
                .as_array()
                .is_some_and(|list| list.iter().any(|instance| instance["type"] == "migration"))),
            Err(error) if error.is_command_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn stream_path(&self) -> PathBuf {
        self.dir.join("source.sock")
    }

    fn migration_settings(&self, lanes: usize, options: &Request) -> MigrationSettings {
        let known = &self.qemu.facts().capabilities;
        let mut capabilities: BTreeMap<_, _> = UNSUPPORTED_CAPABILITIES
            .into_iter()
            .filter(|name| known.contains_key(name))
            .map(|name| (name, false))
            .collect();
        capabilities.insert(Capability::RETURN_PATH, !options.is_snapshot());
        capabilities.insert(Capability::EVENTS, true);
        capabilities.insert(Capability::MULTIFD, lanes > 0);
        if options.transfer_options().throttle {
            capabilities.insert(Capability::AUTO_CONVERGE, true);
        }
        if options.is_snapshot() {
            let off = UNSUPPORTED_WITH_SNAPSHOT.into_iter().filter(|name| known.contains_key(name));
            capabilities.extend(off.map(|name| (name, false)));
            capabilities.insert(Capability::BACKGROUND_SNAPSHOT, true);
        }
        let parameters = MigrationParameters {
            multifd_channels: (lanes > 0).then(|| u8::try_from(lanes).unwrap_or(u8::MAX)),
            max_bandwidth: Some(options.transfer_options().max_bandwidth.unwrap_or(BANDWIDTH_UNLIMITED)),
            downtime_limit: Some(u64::try_from(options.downtime_limit.as_millis()).unwrap_or(u64::MAX)),
            tls_creds: Some(String::new()),
            ..compression::parameters(options.compression, lanes)
        };
        MigrationSettings { capabilities, parameters }
    }

    /// Applies changed limits. They are restored with all other settings. A refused limit does not end the
    /// copy.
    fn apply_tuning(&mut self) {
        let changes = self.tuning.changes();
        if std::mem::replace(&mut self.applied_changes, changes) == changes {
            return;
        }
        let milliseconds = |limit: Duration| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let bandwidth = self.tuning.max_bandwidth().map(|rate| rate.unwrap_or(BANDWIDTH_UNLIMITED));
        let parameters = MigrationParameters {
            max_bandwidth: bandwidth,
            downtime_limit: self.tuning.downtime_limit().map(milliseconds),
            ..MigrationParameters::default()
        };
        let Some(settings) = &mut self.settings else { return };
        if let Err(error) = settings.change(&mut self.qemu, parameters) {
            tracing::warn!(%error, "the source refused changed limits");
        }
        if let Some(limit) = self.tuning.downtime_limit() {
            self.convergence.set_downtime(limit);
        }
    }

    /// Queries the progress at intervals.
    pub(super) fn poll(&mut self) -> Result<Progress, Error> {
        self.apply_tuning();
        if self.queried_at.elapsed() >= QUERY_INTERVAL {
            self.queried_at = Instant::now();
            // A QEMU that is completing does not reply for as long as that takes.
            let Some(migration) = self.qemu.try_query(|qemu| qemu.migration())? else {
                return Ok(self.progress);
            };
            if migration.status == Some(MigrationStatus::FAILED) {
                let text = migration.error_desc.unwrap_or_else(|| "it gives no reason".into());
                return Err(Error::SourceFailed { socket: self.qemu.socket().into(), text });
            }
            self.progress = convergence::progress(&migration);
            self.convergence.observe(&migration)?;
        }
        Ok(self.progress)
    }

    /// Queries the state of its migration. A missing reply is no evidence; an exited process is. `live`: a
    /// background snapshot, whose guest keeps running.
    pub(super) fn query_status(&mut self, live: bool) -> SourceStatus {
        match self.qemu.try_query(|qemu| Ok((qemu.migration()?, qemu.status()?))) {
            Ok(Some((migration, status))) => {
                let view = self.status_of(&migration, &status, live);
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

    fn status_of(&self, migration: &MigrationInfo, status: &Status, live: bool) -> SourceStatus {
        let of_migration = migration.status.as_ref().filter(|_| self.started);
        match of_migration {
            Some(status) if !status.is_final() => SourceStatus::Migrating,
            Some(done) if *done == MigrationStatus::COMPLETED => {
                if status.running && !live {
                    SourceStatus::CompletedThenResumed
                } else {
                    SourceStatus::Completed
                }
            }
            // A source that fails late is stopped for a moment before it resumes its guest by itself.
            Some(_) if status.status == RunState::FINISH_MIGRATE => SourceStatus::Migrating,
            _ => SourceStatus::HasGuest,
        }
    }

    /// Connects again: the monitor is disconnected and QEMU is not known to have exited, so a proxy may have
    /// ended.
    fn reconnect(&mut self) -> SourceStatus {
        if let Err(error) = self.qemu.reconnect() {
            tracing::debug!(%error, "the monitor cannot be reconnected");
            thread::sleep(POLL_INTERVAL);
        }
        SourceStatus::Unknown
    }

    /// Error of a migration whose result is not known.
    pub(super) fn not_completed(&self, waited: Duration) -> Error {
        let status = self.last_migration.as_ref().and_then(|migration| migration.status.as_ref());
        let status = status.map_or("nothing", MigrationStatus::as_str).to_owned();
        Error::NotCompleted { socket: self.qemu.socket().into(), status, waited }
    }

    /// Cancels the migration, if this command started it.
    pub(super) fn cancel_migration(&mut self) -> Result<(), Error> {
        if self.started {
            self.qemu.try_query(|qemu| Ok(qemu.client().execute(&MigrateCancel)?))?;
        }
        Ok(())
    }

    /// Downtime in milliseconds. QEMU reports `completed` a moment before it has this number, which is there
    /// after the cleanup.
    fn downtime(&mut self) -> Option<u64> {
        let downtime = self.qemu.migration().ok()?.downtime?;
        u64::try_from(downtime).ok()
    }

    /// Waits for an event with a new migration status.
    pub(super) fn await_event(&mut self, at_most: Duration) {
        let is_migration = |event: &Event| MigrationStatus::of_event(event).is_some();
        let never = AtomicBool::new(false);
        if let Err(error) = self.qemu.client().wait_event(is_migration, at_most, &never) {
            // The next query finds a lost monitor.
            tracing::trace!(%error, "no event");
        }
    }

    /// Restores the settings and resumes the guest that this migration stopped if `resume`. `undoes`: the guest
    /// stays here, and gets its detached devices back.
    pub(super) fn restore(&mut self, resume: bool, undoes: bool) -> Result<RestoredSource, Error> {
        let tidy = self.wait_migration_cleanup();
        let (downtime_ms, mut notes) = match tidy {
            Ok(is_clean) => (self.downtime(), self.restore_settings_if_clean(is_clean)),
            Err(error) if undoes => return Err(error),
            // The copy is complete, whatever becomes of its source now.
            Err(error) => {
                self.keep_settings();
                (None, vec![error.to_string()])
            }
        };
        if undoes {
            let attached = self.vsocks.attach(&mut self.qemu);
            notes.extend(attached.err().map(|error| error.to_string()));
        }
        if undoes && self.resumed {
            // An earlier copy had paused it.
            self.qemu.stop()?;
        } else if resume {
            self.qemu.cont()?;
        }
        Ok(RestoredSource { downtime_ms, notes })
    }

    /// Ends QEMU after a move. Returns the downtime in milliseconds.
    pub(super) fn quit(&mut self) -> Result<Option<u64>, Error> {
        self.keep_settings();
        let downtime_ms = self.wait_migration_cleanup().ok().and_then(|_| self.downtime());
        self.qemu.quit()?;
        Ok(downtime_ms)
    }

    /// State of the guest at the source when the copy is complete.
    pub(super) fn state_after(&self, options: &Request, exited: bool, guest: GuestRunState) -> SourceState {
        if exited || options.ends_source() {
            return SourceState::Ended;
        }
        let live = options.is_snapshot() && self.was_running;
        if live || options.resumes() && guest.is_live() { SourceState::Running } else { SourceState::Paused }
    }

    /// Returns true if QEMU is known to have exited, and the guest with it.
    pub(super) fn has_exited(&self) -> bool {
        self.qemu.has_exited(ENDED_TIMEOUT)
    }

    /// Leaves QEMU's settings as they are: it has exited, or cannot be configured.
    pub(super) fn keep_settings(&mut self) {
        if let Some(settings) = self.settings.take() {
            settings.keep();
        }
    }

    /// Only after QEMU's cleanup, which evaluates the current settings some time after the migration's end, and
    /// aborts (`yank_unregister_instance`) if it has lanes that these do not have.
    fn restore_settings(&mut self) -> Vec<String> {
        let restored = self.settings.take().map(|settings| settings.restore(&mut self.qemu));
        restored.and_then(Result::err).map(|error| error.to_string()).into_iter().collect()
    }

    /// Replaces an error of the stream by QEMU's own reason, if it has one. QEMU knows nothing of an error on
    /// our side.
    pub(super) fn explain(&mut self, error: Error) -> Error {
        let socket = self.qemu.socket().to_owned();
        let is_protocol = matches!(error, Error::Migration(towline_migration::Error::Protocol { .. }));
        if is_protocol || !error_origin::is_from(&error, &socket, &self.stream_path()) {
            return error;
        }
        match self.qemu.migration().map_err(Error::from) {
            Ok(migration) if migration.status.as_ref().is_some_and(MigrationStatus::has_failed) => {
                match migration.error_desc {
                    Some(text) => Error::SourceFailed { socket, text: format!("{text} ({error})") },
                    None => error,
                }
            }
            Err(gone) if error_origin::is_monitor_lost(&gone) && self.has_exited() => {
                tracing::debug!(%error, "the source exited");
                Error::SourceEnded { socket }
            }
            _ => error,
        }
    }
}
