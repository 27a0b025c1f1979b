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
use towline_compat::facts::IncomingState;
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
use crate::qemu::{AppliedSettings, MigrationSettings, Qemu, QemuState, is_live};
use crate::switchover::{DestinationStatus, FinalRunState, StartResult};
pub(super) use postcopy::{BREAK_AFTER, RECOVER_INTERVAL};

/// Timeout for a QEMU that has everything to leave `inmigrate`.
pub(super) const LOADED_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of queries to a QEMU that loads, and of one whose guest starts.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Timeout for the exit of a QEMU whose monitor is disconnected.
const ENDED_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for the exit of a QEMU that is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

const UNSUPPORTED_CAPABILITIES: [Capability; 8] = [
    Capability::MAPPED_RAM,
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
    /// It has everything, or its guest is lost, or not known any more, for this reason.
    Ended { status: DestinationStatus, error: Option<Error> },
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
            None => context.connect_qemu(path)?,
        })?;
        context.adapt_lanes(&prepared.qemu);
        prepared.exports = DiskExports::start(&mut prepared.qemu, &prepared.dir, context)?;
        Ok(prepared)
    }

    fn of(qemu: Qemu) -> Result<Self, Error> {
        let facts = qemu.facts();
        let socket = qemu.socket().to_owned();
        match facts.incoming {
            IncomingState::Deferred => {}
            IncomingState::Listening => return Err(Error::WaitsElsewhere { socket }),
            IncomingState::No => {
                return Err(Error::NotWaiting { socket, status: facts.status.status.as_str().into() });
            }
            IncomingState::Loading => {
                let status = facts.migration.status.as_ref().map_or("unknown", |status| status.as_str());
                return Err(Error::UsedUp { socket, status: status.into() });
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
        self.apply_settings(lanes, context.options.compression, [])?;
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
        self.apply_settings(lanes, Compression::None, [(Capability::MAPPED_RAM, true)])?;
        let add = AddFd { fdset_id: None, opaque: Some("towline image".into()) };
        let added = self.qemu.client().execute_with_fds(&add, &[file.as_fd()])?;
        self.fdset = Some(added.fdset_id);
        self.listen(format!("file:/dev/fdset/{}", added.fdset_id))
    }

    /// Applies the settings of every destination, and these.
    fn apply_settings(
        &mut self,
        lanes: usize,
        compression: Compression,
        further: impl IntoIterator<Item = (Capability, bool)>,
    ) -> Result<(), Error> {
        // The guest is on its way.
        self.exports.iter().for_each(DiskExports::expect_ends);
        let mut capabilities: BTreeMap<_, _> = basic_capabilities(&self.facts().capabilities).collect();
        capabilities.insert(Capability::MULTIFD, lanes > 0);
        capabilities.extend(further);
        let parameters =
            MigrationParameters { mode: self.facts().normal_mode(), ..lane_parameters(compression, lanes) };
        let settings = MigrationSettings { capabilities, parameters };
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
        self.is_interrupted = false;
        let (migration, status) = match found {
            Ok(Some((migration, status))) => (migration.status, status),
            Ok(None) => return DestinationStatus::Unknown,
            Err(_) if self.qemu.has_exited(ENDED_TIMEOUT) => return DestinationStatus::Exited,
            Err(error) => {
                tracing::debug!(%error, "the destination does not reply");
                return DestinationStatus::Unknown;
            }
        };
        self.is_interrupted = migration == Some(MigrationStatus::POSTCOPY_PAUSED);
        match migration {
            Some(migration) if migration == MigrationStatus::FAILED => DestinationStatus::Failed,
            _ if status.status == RunState::INMIGRATE => DestinationStatus::Loading,
            Some(migration) if migration.is_postcopy() => {
                DestinationStatus::LacksMemory(FinalRunState::running_if(is_live(&status)))
            }
            _ if is_live(&status) => DestinationStatus::Running,
            _ => DestinationStatus::Loaded,
        }
    }

    /// Error of a guest that is not in its final state after this time.
    pub(super) fn not_completed(&mut self, waited: Duration) -> Error {
        let migration = self.qemu.try_query(Qemu::migration).ok().flatten();
        let status = migration.and_then(|migration| migration.status);
        self.not_after(status.as_ref().map_or("nothing", MigrationStatus::as_str), waited)
    }

    fn not_after(&self, status: &str, waited: Duration) -> Error {
        Error::NotCompleted { socket: self.qemu.socket().to_owned(), status: status.to_owned(), waited }
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
                return Err(self.not_after(RunState::INMIGRATE.as_str(), LOADED_TIMEOUT));
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

/// Capabilities of every destination, if this QEMU knows them.
fn basic_capabilities(known: &BTreeMap<Capability, bool>) -> impl Iterator<Item = (Capability, bool)> {
    let off = UNSUPPORTED_CAPABILITIES.into_iter().map(|name| (name, false));
    // Drives are locked at `cont`, as 10.0 does by itself: before, the source must be able to run the guest
    // from them.
    off.chain([(Capability::LATE_BLOCK_ACTIVATE, true)]).filter(|(name, _)| known.contains_key(name))
}

#[cfg(test)]
mod tests;
