//! A running QEMU as the source: prepared, told to migrate to us, watched, put in order.

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

use super::converge::{self, Convergence};
use super::error::Error;
use super::fit::Guest;
use super::private_dir::{PrivateDir, open_to_peer};
use super::progress::Progress;
use super::report::SourceState;
use super::request::Request;
use super::vsock::{self, Vsocks};
use super::{blame, compression};
use crate::moves::{self, End};
use crate::qemu::{self, Qemu, Settings, Wanted};
use crate::switchover::{GuestRun, SourceView};

/// A rate that no host reaches: QEMU's way to say "as fast as it goes".
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;
/// How long lanes may come after the main channel.
pub(super) const LANES_TIMEOUT: Duration = Duration::from_secs(5);
/// How often QEMU is asked how far it is.
const ASK_INTERVAL: Duration = Duration::from_millis(250);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long a source whose copy is cancelled may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is asked whether it gave up while its connections are waited for.
const CONNECT_LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long a source may take to be done with a migration: the one before this, and this.
const TIDY_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a QEMU whose monitor is closed may take to end.
const ENDED_TIMEOUT: Duration = Duration::from_secs(1);

/// Capabilities that change the stream into one that cannot be taken here, or that would stop it half-way.
const MUST_BE_OFF: [Capability; 10] = [
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

/// More that does not go with a background snapshot; those of a migration stay as they are.
const MUST_BE_OFF_LIVE: [Capability; 5] = [
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
    settings: Option<Settings>,
    /// The guest ran when it was found, or is run on for this copy.
    pub(super) ran: bool,
    /// It is paused since an earlier copy, and is to be run on for this one, when everything has been checked.
    resumes: bool,
    /// It was.
    resumed: bool,
    /// The migration is that of this command.
    started: bool,
    /// The migration as it was seen last.
    seen: Option<MigrationInfo>,
    dir: PrivateDir,
    asked: Instant,
    pub(super) progress: Progress,
    convergence: Convergence,
    tuning: Tuning,
    /// How many of its changes QEMU was told.
    tuned: u64,
    /// What is to be taken out of the guest for as long as it is moved, and was.
    pub(super) vsocks: Vsocks,
}

/// A source that is in order again, or ended.
#[derive(Debug, Default)]
pub(super) struct Released {
    /// How long the guest stood still, in milliseconds, by QEMU's last word.
    pub(super) downtime_ms: Option<u64>,
    /// What the user should know.
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
        let detached = |reason: &&String| options.detaches_vsock() && vsock::is_reason(reason);
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
        moves::refuse_source(&qemu, resumes)?;
        if resumes && !options.resumes() {
            return Err(Error::NeedsCont { socket });
        }
        let ran = qemu.facts().status.running || resumes;
        let dir = PrivateDir::for_qemu(&qemu)?;
        let (asked, progress) = (Instant::now(), Progress::default());
        let convergence = Convergence::new(options, qemu.facts());
        let tuning = options.tuning.clone();
        let vsocks = if options.detaches_vsock() { Vsocks::find(&mut qemu)? } else { Vsocks::default() };
        Ok(Self {
            qemu,
            settings: None,
            ran,
            resumes,
            resumed: false,
            started: false,
            seen: None,
            dir,
            asked,
            progress,
            convergence,
            tuning,
            tuned: 0,
            vsocks,
        })
    }

    /// What is known of its guest; all of it if that is compared with another QEMU.
    pub(super) fn guest(&mut self, is_compared: bool) -> Result<Guest, Error> {
        Guest::of_qemu(&mut self.qemu, is_compared)
    }

    /// Takes out of the guest what QEMU does not migrate.
    pub(super) fn detach(&mut self, cancel: &Cancel) -> Result<(), Error> {
        self.vsocks.detach(&mut self.qemu, cancel)
    }

    /// The QEMU.
    pub(super) fn qemu(&self) -> &Qemu {
        &self.qemu
    }

    /// What it is to a record.
    pub(super) fn end_of_move(&self) -> End {
        End::qemu(self.qemu.socket(), self.qemu.process())
    }

    /// The monitor's socket.
    pub(super) fn socket(&self) -> &str {
        self.qemu.socket()
    }

    /// QEMU's version with its package.
    pub(super) fn version_text(&self) -> String {
        self.qemu.version_text()
    }

    /// Sets QEMU and has it migrate to us.
    pub(super) fn start(
        &mut self,
        lanes: usize,
        options: &Request,
        cancel: &Cancel,
    ) -> Result<Connections, Error> {
        let wanted = self.wanted(lanes, options);
        self.settings = Some(Settings::apply(&mut self.qemu, &wanted)?);
        let path = self.stream_path();
        let listener = Listener::bind(&Address::Unix(path.clone()))?;
        open_to_peer(&path)?;
        self.wait_tidy()?;
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        self.begin(&Migrate::to_uri(format!("unix:{}", path.display())))?;
        let deadline = Instant::now() + options.connect_timeout;
        self.connected(listener, lanes, deadline, cancel).map_err(|error| self.explain(error))
    }

    /// Runs a guest on that an earlier copy has paused, and has QEMU migrate it.
    fn begin(&mut self, migrate: &Migrate) -> Result<(), Error> {
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

    /// Waits for QEMU's connections, and looks meanwhile whether it gave up or ended.
    ///
    /// Who cancels waits for them too: a QEMU (10.0) whose connections break while it makes them may never be done with that
    /// migration, and takes no other one.
    fn connected(
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
                thread::park_timeout(CONNECT_LOOK_INTERVAL);
                if why.is_none() && !ends.is_cancelled() {
                    why = self.has_not_failed().err();
                }
                if cancel.is_cancelled() {
                    cancelled.get_or_insert_with(Instant::now);
                }
                if why.is_some() || cancelled.is_some_and(|at| at.elapsed() >= CONNECT_TIMEOUT) {
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

    fn has_not_failed(&mut self) -> Result<(), Error> {
        let Some(migration) = self.qemu.patiently(|qemu| qemu.migration())? else { return Ok(()) };
        if migration.status == Some(MigrationStatus::FAILED) {
            let text = migration.error_desc.unwrap_or_else(|| "it does not say why".into());
            return Err(Error::SourceFailed { socket: self.qemu.socket().into(), text });
        }
        Ok(())
    }

    /// Waits until QEMU has cleaned up a migration, of which it says earlier that it is complete or failed. A `migrate` that
    /// comes too early is refused ("duplicate yank instance") and leaves QEMU in a migration that is none.
    ///
    /// False if it had not by then.
    fn wait_tidy(&mut self) -> Result<bool, Error> {
        let deadline = Instant::now() + TIDY_TIMEOUT;
        while self.is_untidy()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Puts the settings back. Not while QEMU cleans up: it may look at them then, and abort over what it finds.
    fn restore_settings_if(&mut self, is_tidy: bool) -> Vec<String> {
        if is_tidy {
            return self.restore_settings();
        }
        self.forget();
        let (socket, waited) = (self.qemu.socket(), TIDY_TIMEOUT.as_secs());
        vec![format!(
            "QEMU on {socket} has not cleaned up its migration within {waited} s: its capabilities and parameters stay as they \
             were set for this copy"
        )]
    }

    fn is_untidy(&mut self) -> Result<bool, Error> {
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

    fn wanted(&self, lanes: usize, options: &Request) -> Wanted {
        let known = &self.qemu.facts().capabilities;
        let mut capabilities: BTreeMap<_, _> = MUST_BE_OFF
            .into_iter()
            .filter(|name| known.contains_key(name))
            .map(|name| (name, false))
            .collect();
        capabilities.insert(Capability::RETURN_PATH, !options.is_snapshot());
        capabilities.insert(Capability::EVENTS, true);
        capabilities.insert(Capability::MULTIFD, lanes > 0);
        if options.means().throttle {
            capabilities.insert(Capability::AUTO_CONVERGE, true);
        }
        if options.is_snapshot() {
            let off = MUST_BE_OFF_LIVE.into_iter().filter(|name| known.contains_key(name));
            capabilities.extend(off.map(|name| (name, false)));
            capabilities.insert(Capability::BACKGROUND_SNAPSHOT, true);
        }
        let parameters = MigrationParameters {
            multifd_channels: (lanes > 0).then(|| u8::try_from(lanes).unwrap_or(u8::MAX)),
            max_bandwidth: Some(options.means().max_bandwidth.unwrap_or(BANDWIDTH_UNLIMITED)),
            downtime_limit: Some(u64::try_from(options.downtime_limit.as_millis()).unwrap_or(u64::MAX)),
            tls_creds: Some(String::new()),
            ..compression::parameters(options.compression, lanes)
        };
        Wanted { capabilities, parameters }
    }

    /// Tells QEMU of limits that were changed. They are put back with all others. One that it refuses ends no copy.
    fn tune(&mut self) {
        let changes = self.tuning.changes();
        if std::mem::replace(&mut self.tuned, changes) == changes {
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
            tracing::warn!(%error, "the source does not take limits that were changed");
        }
        if let Some(limit) = self.tuning.downtime_limit() {
            self.convergence.set_downtime(limit);
        }
    }

    /// Looks how far QEMU is, from time to time.
    pub(super) fn look(&mut self) -> Result<Progress, Error> {
        self.tune();
        if self.asked.elapsed() >= ASK_INTERVAL {
            self.asked = Instant::now();
            // A QEMU that completes answers nothing for as long as that takes.
            let Some(migration) = self.qemu.patiently(|qemu| qemu.migration())? else {
                return Ok(self.progress);
            };
            if migration.status == Some(MigrationStatus::FAILED) {
                let text = migration.error_desc.unwrap_or_else(|| "it does not say why".into());
                return Err(Error::SourceFailed { socket: self.qemu.socket().into(), text });
            }
            self.progress = converge::progress(&migration);
            self.convergence.observe(&migration)?;
        }
        Ok(self.progress)
    }

    /// What becomes of its migration. An answer that does not come says nothing; a process that has exited does. `live`: a
    /// background snapshot, whose guest runs on.
    pub(super) fn view(&mut self, live: bool) -> SourceView {
        match self.qemu.patiently(|qemu| Ok((qemu.migration()?, qemu.status()?))) {
            Ok(Some((migration, status))) => {
                let view = self.seen(&migration, &status, live);
                self.seen = Some(migration);
                view
            }
            Ok(None) => SourceView::Unknown,
            Err(error) => {
                tracing::debug!(%error, "the source does not answer");
                if self.has_ended() { SourceView::Exited } else { self.reconnect() }
            }
        }
    }

    fn seen(&self, migration: &MigrationInfo, status: &Status, live: bool) -> SourceView {
        let of_migration = migration.status.as_ref().filter(|_| self.started);
        match of_migration {
            Some(status) if !status.is_final() => SourceView::Migrating,
            Some(done) if *done == MigrationStatus::COMPLETED => {
                if status.running && !live {
                    SourceView::CompletedAndRun
                } else {
                    SourceView::Completed
                }
            }
            // A source that fails late is stopped for a moment before it runs on by itself.
            Some(_) if status.status == RunState::FINISH_MIGRATE => SourceView::Migrating,
            _ => SourceView::HasGuest,
        }
    }

    /// The monitor is closed, and QEMU is not known to have exited: a proxy may have ended, and another one may be there.
    fn reconnect(&mut self) -> SourceView {
        if let Err(error) = self.qemu.reconnect() {
            tracing::debug!(%error, "the monitor is not there again");
            thread::sleep(POLL_INTERVAL);
        }
        SourceView::Unknown
    }

    /// Why it is not known what became of its migration.
    pub(super) fn not_completed(&self, waited: Duration) -> Error {
        let status = self.seen.as_ref().and_then(|seen| seen.status.as_ref());
        let status = status.map_or("nothing", MigrationStatus::as_str).to_owned();
        Error::NotCompleted { socket: self.qemu.socket().into(), status, waited }
    }

    /// Cancels the migration, if it is that of this command.
    pub(super) fn cancel_own(&mut self) -> Result<(), Error> {
        if self.started {
            self.qemu.patiently(|qemu| Ok(qemu.client().execute(&MigrateCancel)?))?;
        }
        Ok(())
    }

    /// How long the guest stood still, in milliseconds. QEMU says that it is complete a moment before it has worked that out: it has
    /// when it is tidy.
    fn downtime(&mut self) -> Option<u64> {
        let downtime = self.qemu.migration().ok()?.downtime?;
        u64::try_from(downtime).ok()
    }

    /// Waits until QEMU tells of a new migration status, at most this long.
    pub(super) fn await_event(&mut self, at_most: Duration) {
        let is_migration = |event: &Event| MigrationStatus::of_event(event).is_some();
        let never = AtomicBool::new(false);
        if let Err(error) = self.qemu.client().wait_event(is_migration, at_most, &never) {
            // A monitor that is gone is found so by the next question.
            tracing::trace!(%error, "no event");
        }
    }

    /// Puts the settings back, and runs the guest that this migration stopped if `resume`. `undoes`: the guest stays here, with
    /// what was taken out of it.
    pub(super) fn restore(&mut self, resume: bool, undoes: bool) -> Result<Released, Error> {
        let tidy = self.wait_tidy();
        let (downtime_ms, mut notes) = match tidy {
            Ok(is_tidy) => (self.downtime(), self.restore_settings_if(is_tidy)),
            Err(error) if undoes => return Err(error),
            // The copy is complete, whatever becomes of its source now.
            Err(error) => {
                self.forget();
                (None, vec![error.to_string()])
            }
        };
        if undoes {
            let attached = self.vsocks.attach(&mut self.qemu);
            notes.extend(attached.err().map(|error| error.to_string()));
        }
        if undoes && self.resumed {
            // It was paused when it was found, by an earlier copy.
            self.qemu.stop()?;
        } else if resume {
            self.qemu.cont()?;
        }
        Ok(Released { downtime_ms, notes })
    }

    /// After a move: ends QEMU. The guest is elsewhere. Returns how long it stood still, in milliseconds.
    pub(super) fn end(&mut self) -> Result<Option<u64>, Error> {
        self.forget();
        let downtime_ms = self.wait_tidy().ok().and_then(|_| self.downtime());
        self.qemu.quit()?;
        Ok(downtime_ms)
    }

    /// What the guest does here when the copy is complete.
    pub(super) fn state_after(&self, options: &Request, exited: bool, guest: GuestRun) -> SourceState {
        if exited || options.ends_source() {
            return SourceState::Ended;
        }
        let live = options.is_snapshot() && self.ran;
        if live || options.resumes() && guest.is_live() { SourceState::Running } else { SourceState::Paused }
    }

    /// Whether QEMU is known to have ended, and the guest with it.
    pub(super) fn has_ended(&self) -> bool {
        self.qemu.has_ended(ENDED_TIMEOUT)
    }

    /// QEMU has ended: there is nothing to put back.
    pub(super) fn forget(&mut self) {
        if let Some(settings) = self.settings.take() {
            settings.keep();
        }
    }

    /// Only when QEMU has cleaned up: it does so by the settings that it finds then, some time after it says that it is done, and
    /// aborts (`yank_unregister_instance`) if it has lanes that these do not speak of.
    fn restore_settings(&mut self) -> Vec<String> {
        let restored = self.settings.take().map(|settings| settings.restore(&mut self.qemu));
        restored.and_then(Result::err).map(|error| error.to_string()).into_iter().collect()
    }

    /// Replaces an error of the stream by QEMU's own reason, where it has one. An error on our side is no news to QEMU.
    pub(super) fn explain(&mut self, error: Error) -> Error {
        let socket = self.qemu.socket().to_owned();
        let is_protocol = matches!(error, Error::Migration(towline_migration::Error::Protocol { .. }));
        if is_protocol || !blame::is_of(&error, &socket, &self.stream_path()) {
            return error;
        }
        match self.qemu.migration().map_err(Error::from) {
            Ok(migration) if migration.status.as_ref().is_some_and(MigrationStatus::has_failed) => {
                match migration.error_desc {
                    Some(text) => Error::SourceFailed { socket, text: format!("{text} ({error})") },
                    None => error,
                }
            }
            Err(gone) if blame::is_gone(&gone) && self.has_ended() => {
                tracing::debug!(%error, "the source ended");
                Error::SourceEnded { socket }
            }
            _ => error,
        }
    }
}
