//! A QEMU that waits for a guest, controlled by its monitor: checks, configures and starts it.

mod direct;
mod guest;
mod postcopy;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use towline_channel::{Address, Cancel, ConnectOptions};
use towline_migration::Compression;
use towline_migration::outgoing::{Connections, connect};
use towline_qmp as qmp;
use towline_qmp::commands::{
    AddFd, Capability, MigrateIncoming, MigrationInfo, MigrationParameters, MigrationStatus, RunState,
    Status, Stop,
};

use super::context::{Context, lane_parameters};
use super::disks::DiskExports;
use super::error::Error;
use super::error_origin;
use super::preflight::uuid_bytes;
use super::private_dir::{PrivateDir, QemuLink};
use crate::qemu::{AppliedSettings, IncomingState, MigrationSettings, Qemu, QemuState};
use crate::switchover::{DestinationStatus, FinalRunState, StartResult};
pub(super) use postcopy::BREAK_AFTER;

/// Timeout for a QEMU that has everything to leave `inmigrate`.
const LOADED_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of queries to a QEMU that loads, and of one whose guest starts.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Timeout for the exit of a QEMU whose monitor is disconnected.
const ENDED_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for the exit of a QEMU that is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

const UNSUPPORTED_CAPABILITIES: [Capability; 7] = [
    Capability::XBZRLE,
    Capability::POSTCOPY_RAM,
    Capability::POSTCOPY_PREEMPT,
    Capability::X_IGNORE_SHARED,
    Capability::BACKGROUND_SNAPSHOT,
    Capability::VALIDATE_UUID,
    Capability::SWITCHOVER_ACK,
];

/// A guest that should have been started and does not run, if known.
#[derive(Debug)]
pub(super) struct StartFailure {
    pub(super) started: StartResult,
    pub(super) error: Box<Error>,
}

/// State of a QEMU whose postcopy connection was lost.
#[derive(Debug)]
pub(super) enum RecoveryState {
    /// Listening again at this address.
    Listening(Address),
    /// Not ready to listen.
    NotReady,
    /// Has everything.
    Completed,
    /// Failed, for this reason.
    Failed(Error),
}

/// A QEMU that waits for a guest.
#[derive(Debug)]
pub(super) struct QmpDestination {
    settings: Option<AppliedSettings>,
    dir: PrivateDir,
    /// The way of the stream to it.
    link: QemuLink,
    fdset: Option<i64>,
    /// Disks that the source writes.
    exports: Option<DiskExports>,
    /// True once it has received `migrate-incoming`, which QEMU accepts once.
    is_incoming_started: bool,
    /// Run state of the guest that it has reported to be loaded.
    loaded: Option<RunState>,
    /// Number of times that `migrate-recover` succeeded.
    recoveries: u32,
    /// By the last query, its postcopy has lost its connection.
    pub(super) is_interrupted: bool,
    /// Last, so that its journal has no other owner when its monitor closes.
    pub(super) qemu: Qemu,
}

/// Guest at a destination that is rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldGuest {
    /// None, or an incomplete one.
    Incomplete,
    /// The guest may be complete here, and this the only copy.
    MayBeOnlyCopy,
}

impl QmpDestination {
    /// Connects, or takes the connection to a QEMU of this process, and checks that it waits for
    /// `migrate-incoming`.
    pub(super) fn prepare(path: &Path, context: &Context<'_>) -> Result<Self, Error> {
        let mut prepared = Self::of(match context.own.and_then(|own| own.started?.take()) {
            Some(started) => started?,
            None => Qemu::connect(path, &context.monitor())?,
        })?;
        context.adapt_lanes(&prepared.qemu);
        prepared.exports = DiskExports::start(&mut prepared.qemu, &prepared.dir, context)?;
        Ok(prepared)
    }

    fn of(qemu: Qemu) -> Result<Self, Error> {
        let facts = qemu.facts();
        let socket = qemu.socket().to_owned();
        match &facts.incoming {
            IncomingState::Deferred => {}
            IncomingState::Listening => return Err(Error::WaitsElsewhere { socket }),
            IncomingState::No => {
                return Err(Error::NotWaiting { socket, status: facts.status.status.as_str().into() });
            }
            IncomingState::Loading(status) => {
                return Err(Error::UsedUp { socket, status: status.as_str().into() });
            }
        }
        Self::new(qemu)
    }

    fn new(qemu: Qemu) -> Result<Self, Error> {
        let dir = PrivateDir::for_qemu(&qemu)?;
        Ok(Self {
            qemu,
            settings: None,
            link: QemuLink::socket(&dir, "destination.sock"),
            dir,
            fdset: None,
            exports: None,
            is_incoming_started: false,
            loaded: None,
            recoveries: 0,
            is_interrupted: false,
        })
    }

    /// The facts.
    pub(super) fn facts(&self) -> &QemuState {
        self.qemu.facts()
    }

    /// Ends QEMU, which does not run its guest: it is killed if it does not end by itself.
    ///
    /// # Errors
    /// It has not ended.
    pub(super) fn end(&mut self) -> Result<(), Error> {
        self.keep_settings();
        match self.qemu.quit() {
            Ok(()) => Ok(()),
            Err(_) if self.qemu.process().kill(KILL_TIMEOUT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Configures QEMU, has it load the guest and stay paused, and connects to it.
    pub(super) fn start(&mut self, lanes: usize, context: &Context<'_>) -> Result<Connections, Error> {
        if let Some(exports) = &self.exports {
            exports.expect_ends();
        }
        self.apply_settings(lanes, false, context.options.compression)?;
        if self.qemu.process().has_own_root() {
            self.link = QemuLink::pass(&mut self.qemu)?;
        }
        self.listen(self.link.uri.clone())?;
        let uuid = uuid_bytes(&self.facts().uuid);
        let deadline = Instant::now() + context.options.connect_timeout;
        let plain = ConnectOptions::default();
        Ok(connect(&self.link.address, lanes, uuid, &plain, deadline, context.cancel)?)
    }

    /// Returns true if this QEMU can load the file of an image itself.
    pub(super) fn loads_images(&self) -> bool {
        self.facts().capabilities.contains_key(&Capability::MAPPED_RAM)
    }

    /// Has QEMU load the image in `file` itself and stay paused. The file is passed as a descriptor, so QEMU
    /// needs no permission for its path.
    pub(super) fn load(&mut self, file: &File, lanes: usize) -> Result<(), Error> {
        self.apply_settings(lanes, true, Compression::None)?;
        let add = AddFd { fdset_id: None, opaque: Some("towline image".into()) };
        let added = self.qemu.client().execute_with_fds(&add, &[file.as_fd()])?;
        self.fdset = Some(added.fdset_id);
        self.listen(format!("file:/dev/fdset/{}", added.fdset_id))
    }

    fn settings(&self, lanes: usize, mapped_ram: bool, compression: Compression) -> MigrationSettings {
        let known = &self.facts().capabilities;
        let mut capabilities: BTreeMap<_, _> = basic_capabilities(known).collect();
        capabilities.insert(Capability::MULTIFD, lanes > 0);
        if known.contains_key(&Capability::MAPPED_RAM) {
            capabilities.insert(Capability::MAPPED_RAM, mapped_ram);
        }
        let parameters =
            MigrationParameters { mode: self.facts().normal_mode(), ..lane_parameters(compression, lanes) };
        MigrationSettings { capabilities, parameters }
    }

    fn apply_settings(
        &mut self,
        lanes: usize,
        mapped_ram: bool,
        compression: Compression,
    ) -> Result<(), Error> {
        let settings = self.settings(lanes, mapped_ram, compression);
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        Ok(())
    }

    /// The command that has it listen; from 9.1 on it stays after a failure.
    fn migrate_incoming(&self, uri: String) -> MigrateIncoming {
        let version = &self.facts().version.qemu;
        let stays = (version.major, version.minor) >= (9, 1);
        MigrateIncoming { exit_on_error: stays.then_some(false), ..MigrateIncoming::on_uri(uri) }
    }

    fn listen(&mut self, uri: String) -> Result<(), Error> {
        let command = self.migrate_incoming(uri);
        // `stop` is sent while it waits, so it loads and stays paused: until the source is done, the guest
        // may run only there. A QEMU that listens and refused it is not connected to.
        let requests = [qmp::CommandRequest::new(&Stop)?, qmp::CommandRequest::new(&command)?];
        self.is_incoming_started = true;
        let replies = self.qemu.client().execute_all(&requests)?;
        replies.into_iter().try_for_each(|reply| reply.value().map(|_| ()))?;
        Ok(())
    }

    /// Returns true if QEMU has loaded everything.
    ///
    /// # Errors
    /// It failed to.
    pub(super) fn is_loaded(&mut self) -> Result<bool, Error> {
        let (migration, status) = self.qemu.migration_and_status()?;
        self.see_loaded(migration, status)
    }

    fn see_loaded(&mut self, migration: MigrationInfo, status: Status) -> Result<bool, Error> {
        match migration.status {
            Some(status) if status == MigrationStatus::FAILED => Err(self.failed(migration.error_desc)),
            _ => {
                self.loaded = Some(status.status).filter(|state| *state != RunState::INMIGRATE);
                Ok(self.loaded.is_some())
            }
        }
    }

    /// An error with QEMU's own reason, if it has one.
    fn failed(&self, reason: Option<String>) -> Error {
        let text = reason.unwrap_or_else(|| "its own log says why".into());
        Error::DestinationFailed { socket: self.qemu.socket().into(), text }
    }

    /// Returns an error if it failed to load the guest; a missing reply is not a failure.
    pub(super) fn check_not_failed(&mut self) -> Result<(), Error> {
        match self.is_loaded() {
            Err(error) if !error_origin::is_timeout(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// As [`is_loaded`](Self::is_loaded), of a QEMU that loads a file itself. Until then its monitor does not
    /// reply, which takes longer the larger the guest and the slower the disk, so a timeout means "not yet";
    /// a QEMU that exits closes its socket.
    pub(super) fn has_loaded_file(&mut self, cancel: &Cancel) -> Result<bool, Error> {
        let loaded = self.qemu.try_query_until(cancel, Qemu::migration_and_status)?;
        loaded.map_or(Ok(false), |(migration, status)| self.see_loaded(migration, status))
    }

    /// Queries the state of the guest. A missing reply is no evidence; an exited process is.
    pub(super) fn query_status(&mut self) -> DestinationStatus {
        let found = self.qemu.try_query(Qemu::migration_and_status);
        // Without a reply it is not known to be.
        let status =
            found.as_ref().ok().and_then(Option::as_ref).and_then(|(found, _)| found.status.as_ref());
        self.is_interrupted = status == Some(&MigrationStatus::POSTCOPY_PAUSED);
        match found {
            Ok(None) => DestinationStatus::Unknown,
            Ok(Some((migration, _))) if migration.status == Some(MigrationStatus::FAILED) => {
                DestinationStatus::Failed
            }
            Ok(Some((_, status))) if status.status == RunState::INMIGRATE => DestinationStatus::Loading,
            Ok(Some((migration, status)))
                if migration.status.as_ref().is_some_and(MigrationStatus::is_postcopy) =>
            {
                DestinationStatus::LacksMemory(FinalRunState::running_if(is_live(&status)))
            }
            Ok(Some((_, status))) if is_live(&status) => DestinationStatus::Running,
            Ok(Some(_)) => DestinationStatus::Loaded,
            Err(_) if self.qemu.has_exited(ENDED_TIMEOUT) => DestinationStatus::Exited,
            Err(error) => {
                tracing::debug!(%error, "the destination does not reply");
                DestinationStatus::Unknown
            }
        }
    }

    /// Error of a guest that is not in its final state after this time.
    pub(super) fn not_completed(&mut self, waited: Duration) -> Error {
        let socket = self.qemu.socket().to_owned();
        let migration = self.qemu.try_query(Qemu::migration).ok().flatten();
        let status = migration.and_then(|migration| migration.status);
        let status = status.as_ref().map_or("nothing", MigrationStatus::as_str).to_owned();
        Error::NotCompleted { socket, status, waited }
    }

    /// Waits until the guest, all of which was sent, is loaded.
    pub(super) fn wait_loaded(&mut self) -> Result<(), Error> {
        // A loaded guest stays loaded.
        if self.loaded.is_some() {
            return Ok(());
        }
        let deadline = Instant::now() + LOADED_TIMEOUT;
        loop {
            match self.is_loaded() {
                Ok(true) => return Ok(()),
                Err(error) if !error_origin::is_timeout(&error) => return Err(error),
                Ok(false) | Err(_) => {}
            }
            if Instant::now() >= deadline {
                let (socket, status) = (self.qemu.socket().to_owned(), RunState::INMIGRATE.as_str().into());
                return Err(Error::NotCompleted { socket, status, waited: LOADED_TIMEOUT });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns true if the error comes from this QEMU.
    pub(super) fn is_error_origin(&self, error: &Error) -> bool {
        error_origin::is_from(error, self.qemu.socket(), &self.link.address)
    }

    /// Replaces an error of the stream to QEMU by QEMU's own reason, if it has one.
    pub(super) fn explain(&mut self, error: Error) -> Error {
        if !self.is_error_origin(&error) {
            return error;
        }
        let reason = match self.qemu.migration().map_err(Error::from) {
            Ok(migration) if migration.status.as_ref().is_some_and(MigrationStatus::has_failed) => {
                migration.error_desc
            }
            Err(gone) if error_origin::is_monitor_lost(&gone) => {
                Some("it ended while it loaded; its own log says why".into())
            }
            _ => return error,
        };
        tracing::debug!(%error, "the destination failed");
        self.failed(reason)
    }
}

/// Returns true if the guest runs, or is suspended and wakes up by itself.
pub(super) fn is_live(status: &Status) -> bool {
    status.running || status.status == RunState::SUSPENDED
}

/// Capabilities of every destination, if this QEMU knows them.
fn basic_capabilities(known: &BTreeMap<Capability, bool>) -> impl Iterator<Item = (Capability, bool)> {
    let off = UNSUPPORTED_CAPABILITIES.into_iter().map(|name| (name, false));
    // Drives are locked at `cont`, as 10.0 does by itself: before, the source must be able to run the guest
    // from them.
    off.chain([(Capability::LATE_BLOCK_ACTIVATE, true)]).filter(|(name, _)| known.contains_key(name))
}

#[cfg(test)]
mod tests;
