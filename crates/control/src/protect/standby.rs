//! The other host of a protected guest: keeps its memory and its last device state, and runs it when its host is lost.
//!
//! ```text
//!   first copy, checkpoints ──► memory in a file ── mapped by ──► a QEMU that waits
//!                          ├──► writes to its disks ────────── by NBD ───────────────┤
//!                          └──► device state of the last one ── at the takeover ──┘
//! ```
//! A checkpoint is received whole before any of it is written to the memory, so a checkpoint that is cut off was none. After a loss it is no
//! longer written: the guest goes on from the last one, or not at all.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use towline_channel::{Address, Cancel, Channel, ConnectOptions, Listener};
use towline_migration::checkpoints::{self, CheckpointSink};
use towline_migration::incoming::{self, Connections, Incoming};
use towline_migration::outgoing::{self, Outgoing};
use towline_migration::{Error as MigrationError, GuestWithPresentBlocks, Memory, Session, Statistics};
use towline_protocol::colo::{Checkpoint, CheckpointBuffer};
use towline_protocol::device_state::DeviceState;
use towline_qmp::commands::{MigrateIncoming, RunState, Stop};
use towline_qmp::{self as qmp, CommandRequest};

use super::disks::{EpochWrites, StandbyDisk};
use super::memory::{StandbyMemory, StandbyMemoryError};
use crate::arbiter::{Arbiter, Claim, Claimant, Stake};
use crate::cards::HoldingCards;
use crate::lock::lock;
use crate::nbd::Export;
use crate::plan::{self, PrivateDir};
use crate::qemu::{Error as QemuError, Qemu};

/// Time for each step before the first checkpoint.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the disks to be copied before; the end of the way to the guest's host ends it earlier.
const DISKS_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);
/// Time in which the guest's host may say that this was no death.
const GRACE: Duration = Duration::from_millis(100);
/// Time in which the waiting QEMU loads the device state.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Request of a guest's host to stand by for the guest, for which this host has made a place.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct StandbyRequest {
    /// Certificate of the end that connects, in hexadecimal digits of DER.
    pub(crate) certificate: String,
    /// The guest's name, and its generation at its host.
    pub(crate) guest: String,
    pub(crate) generation: u64,
    pub(crate) arbiter: Arbiter,
    /// Silence after which the guest's host is lost.
    pub(crate) peer_timeout_ms: u64,
    pub(crate) checkpoint_bytes_max: usize,
    /// Disks of the guest, which it gets as well.
    pub(crate) disks: Vec<Export>,
}

/// A standby before its guest comes.
#[derive(Debug)]
pub(crate) struct Standby {
    pub(crate) request: StandbyRequest,
    pub(crate) memory: StandbyMemory,
    pub(crate) listener: Listener,
    /// Monitor of the QEMU that waits for the guest.
    pub(crate) qemu: PathBuf,
    /// Control sockets of its cards.
    pub(crate) cards: Vec<PathBuf>,
    pub(crate) control: Arc<StandbyControl>,
}

/// The guest's host ends a protection in order by this.
#[derive(Debug)]
pub struct StandbyControl {
    phase: Mutex<Phase>,
    changed: Condvar,
    channel: OnceLock<Arc<dyn Channel>>,
    /// Ends the wait for the guest's host.
    cancel: Cancel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Standing,
    /// It may have the guest.
    Deciding,
    /// It never takes the guest over.
    Released,
}

/// End of a standby.
#[derive(Debug)]
pub enum StandbyEnd {
    /// The guest's host has ended the protection.
    Released,
    /// The guest runs on at its host.
    Lost,
    /// The guest runs here.
    TakenOver(Takeover),
}

/// Times of a takeover in milliseconds since the loss.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Takeover {
    /// Generation of the guest here.
    pub generation: u64,
    /// Checkpoint from which it goes on.
    pub epoch: u64,
    /// The QEMU has the device state.
    pub loaded_ms: f64,
    /// The arbiter has decided.
    pub won_ms: f64,
    /// The guest runs.
    pub runs_ms: f64,
    /// Its cards send.
    pub passes_ms: f64,
}

/// Reason for which a standby has ended without its guest.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// The guest has not come, or a checkpoint was not usable.
    #[error("the guest's copy: {0}")]
    Copy(#[from] MigrationError),
    /// The way to its host.
    #[error("the way to the guest's host: {0}")]
    Channel(#[from] towline_channel::Error),
    /// The waiting QEMU.
    #[error("the QEMU that waits for the guest: {0}")]
    Qemu(#[from] QemuError),
    /// A card.
    #[error(
        "a card of the guest: {0}; the guest runs, and what it sends is held: see that the card runs, and have it pass (`towline ctl`)"
    )]
    Card(qmp::Error),
    /// It was ended before the guest was protected.
    #[error("the protection has ended before the first checkpoint")]
    TooEarly,
    /// Its memory.
    #[error("{0}")]
    Memory(#[from] StandbyMemoryError),
    /// A directory for its sockets.
    #[error("{0}")]
    Sockets(#[from] Box<plan::Error>),
    /// A disk.
    #[error("disk {name} of the guest here: {source}")]
    Disk {
        name: String,
        /// Of its connection, or of NBD.
        source: std::io::Error,
    },
    /// The state is loaded.
    #[error("the guest is here and may not run: {0}; `cont` at its monitor runs it")]
    NotRun(QemuError),
    /// The QEMU does not load the state.
    #[error("the QEMU that waits for the guest has not loaded it within {} s", LOAD_TIMEOUT.as_secs())]
    NotLoaded,
}

impl StandbyError {
    /// Returns true if the guest may be here all the same.
    pub(crate) fn has_guest(&self) -> bool {
        matches!(self, Self::Card(_) | Self::NotRun(_))
    }
}

impl From<qmp::Error> for StandbyError {
    fn from(error: qmp::Error) -> Self {
        Self::Qemu(error.into())
    }
}

impl StandbyControl {
    pub(crate) fn new() -> Result<Self, towline_channel::Error> {
        let (phase, changed, channel) = (Mutex::new(Phase::Standing), Condvar::new(), OnceLock::new());
        Ok(Self { phase, changed, channel, cancel: Cancel::new()? })
    }

    /// Waits for the end of the QEMU that waits for the guest: without it the guest cannot go on here, and its host learns that.
    pub(crate) fn watch(&self, qemu: &impl AsFd, ended: &Cancel) {
        let mut fds = [PollFd::new(qemu, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        while poll(&mut fds, None) == Err(Errno::INTR) {}
        if !ended.is_cancelled() {
            tracing::warn!("the QEMU that waits for the guest has ended: not standing by any more");
            self.release();
            // Nothing is claimed for it any more.
            self.cancel.cancel();
        }
    }

    /// Ends the standby: it never takes the guest over. False: it may do so already.
    pub fn release(&self) -> bool {
        let mut phase = lock(&self.phase);
        if *phase == Phase::Standing {
            *phase = Phase::Released;
            self.changed.notify_all();
            self.cancel.cancel();
            // It is received from.
            self.channel.get().map(|channel| channel.shutdown(Shutdown::Both));
        }
        *phase == Phase::Released
    }

    /// Begins to decide, unless it is released within the time of grace.
    fn begins_to_decide(&self) -> bool {
        let phase = lock(&self.phase);
        let waited = self.changed.wait_timeout_while(phase, GRACE, |phase| *phase == Phase::Standing);
        let mut phase = waited.unwrap_or_else(PoisonError::into_inner).0;
        if *phase == Phase::Released {
            return false;
        }
        *phase = Phase::Deciding;
        true
    }
}

/// Writes checkpoints to the memory, and to the disks.
struct Applier<'a> {
    memory: &'a Memory,
    disks: &'a [StandbyDisk],
    channel: &'a dyn Channel,
    peer_timeout: Duration,
    limit: usize,
    buffer: Option<CheckpointBuffer>,
    /// Number and device state of the last one that is whole.
    last: Option<(u64, DeviceState)>,
    /// The memory or a disk is that of no checkpoint.
    is_torn: bool,
}

impl CheckpointSink for Applier<'_> {
    fn buffer(&mut self) -> Result<CheckpointBuffer, MigrationError> {
        Ok(self.buffer.take().unwrap_or_else(|| CheckpointBuffer::new(self.limit)))
    }

    fn mark(&mut self, _number: u64) -> Result<(), MigrationError> {
        Ok(())
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), MigrationError> {
        let failed = |error| MigrationError::Guest(Box::new(error));
        let writes =
            EpochWrites::receive(self.disks, checkpoint.number(), self.peer_timeout).map_err(failed)?;
        self.is_torn = true;
        checkpoints::apply(&checkpoint, self.memory)?;
        writes.write().map_err(failed)?;
        self.is_torn = false;
        if self.last.is_none() {
            self.channel.set_timeouts(Some(self.peer_timeout), Some(self.peer_timeout))?;
        }
        self.last = Some((checkpoint.number(), checkpoint.device_state().clone()));
        self.buffer = Some(checkpoint.into_buffer());
        Ok(())
    }
}

/// State from which a guest goes on.
struct LastCheckpoint {
    epoch: u64,
    devices: DeviceState,
    lost_at: Instant,
}

impl Standby {
    /// Stands by for the guest until its host ends that, or is lost. `notice` gets what a person should know meanwhile.
    ///
    /// # Errors
    /// [`StandbyError`]: the guest is not here.
    pub(crate) fn run(self, notice: &dyn Fn(&str)) -> Result<StandbyEnd, StandbyError> {
        let mut qemu = Qemu::inspect(&self.qemu, &qmp::Options::default())?;
        let directory = PrivateDir::for_qemu(&qemu).map_err(Box::new)?;
        let state = Address::Unix(directory.join("state.sock"));
        let disks = directory.join("disks.sock");
        self.listen(&mut qemu, &state, &disks)?;
        let memory = self.memory.sink()?;
        let last = self.receive(&memory, &disks);
        // Its host may have ended the way in order.
        if !self.control.begins_to_decide() {
            return Ok(StandbyEnd::Released);
        }
        let last = last?;
        self.load(&mut qemu, &state, &memory, &last)?;
        let loaded_ms = millis_since(last.lost_at);
        let claimant = Claimant::new();
        let StandbyRequest { arbiter, guest, generation, .. } = &self.request;
        let claim = Claim { guest, generation: generation + 1, stake: Stake::Copy };
        match arbiter.decide(&claim, &claimant, &self.control.cancel, notice) {
            Ok(true) => self.run_guest(&mut qemu, &last, loaded_ms).map(StandbyEnd::TakenOver),
            Ok(false) | Err(_) => Ok(StandbyEnd::Lost),
        }
    }

    /// Has the QEMU wait for the device state. It loads it and stays paused.
    fn listen(&self, qemu: &mut Qemu, state: &Address, disks: &Path) -> Result<(), StandbyError> {
        let incoming = MigrateIncoming::on_uri(state.to_string());
        let requests = [CommandRequest::new(&Stop)?, CommandRequest::new(&incoming)?];
        let replies = qemu.client().execute_all(&requests)?;
        if !self.request.disks.is_empty() {
            let drives = qemu.written_drives()?;
            qemu.export_drives(&drives, disks)?;
        }
        Ok(replies.into_iter().try_for_each(|reply| reply.value().map(|_| ()))?)
    }

    /// Receives checkpoints until the way to the guest's host ends. Returns the last one.
    fn receive(&self, memory: &Memory, disks: &Path) -> Result<LastCheckpoint, StandbyError> {
        let disks = self.receive_disks(disks)?;
        let channel = self.listener.accept(Instant::now() + STEP_TIMEOUT, &self.control.cancel)?;
        let channel = self.control.channel.get_or_init(|| channel.into());
        let patience = if disks.is_empty() { STEP_TIMEOUT } else { DISKS_TIMEOUT };
        channel.set_timeouts(Some(patience), Some(STEP_TIMEOUT))?;
        let (session, statistics) = (Arc::new(Session::default()), Arc::new(Statistics::default()));
        let incoming = Incoming::new(session, statistics, incoming::Options::default());
        let first = incoming.run_first_copy(&Connections::single(Arc::clone(channel)), memory)?;
        self.memory.check(memory)?;
        let mut applier = Applier {
            memory,
            disks: &disks,
            channel: channel.as_ref(),
            peer_timeout: Duration::from_millis(self.request.peer_timeout_ms),
            limit: self.request.checkpoint_bytes_max,
            buffer: None,
            last: None,
            is_torn: false,
        };
        let Err(error) = checkpoints::take(channel.as_ref(), first, &mut applier);
        let lost_at = Instant::now();
        tracing::info!(%error, epoch = applier.last.as_ref().map(|(epoch, _)| epoch), "no more checkpoints");
        match applier.last {
            _ if applier.is_torn => Err(error.into()),
            None => Err(StandbyError::TooEarly),
            Some((epoch, devices)) => Ok(LastCheckpoint { epoch, devices, lost_at }),
        }
    }

    /// Accepts a connection for each disk.
    fn receive_disks(&self, server: &Path) -> Result<Vec<StandbyDisk>, StandbyError> {
        let disk = |disk: &Export| {
            let channel = self.listener.accept(Instant::now() + STEP_TIMEOUT, &self.control.cancel)?;
            let standby = StandbyDisk::new(disk, server, channel.into(), self.request.checkpoint_bytes_max);
            standby.map_err(|source| StandbyError::Disk { name: disk.name.clone(), source })
        };
        self.request.disks.iter().map(disk).collect()
    }

    /// Has the QEMU load the last checkpoint. It stays paused, and nothing of it leaves.
    fn load(
        &self,
        qemu: &mut Qemu,
        state: &Address,
        memory: &Memory,
        last: &LastCheckpoint,
    ) -> Result<(), StandbyError> {
        // The disks are the guest's from here on.
        qemu.end_exports()?;
        memory.set_device_state(last.devices.bytes().to_vec());
        let deadline = Instant::now() + LOAD_TIMEOUT;
        let plain = ConnectOptions::default();
        let connections = outgoing::connect(state, 0, [0; 16], &plain, deadline, &Cancel::new()?)?;
        let (session, statistics) = (Arc::new(Session::default()), Arc::new(Statistics::default()));
        let guest = GuestWithPresentBlocks::new(memory, self.memory.present())?;
        Outgoing::new(session, statistics, outgoing::Options::default()).run(&connections, &guest)?;
        while qemu.status()?.status == RunState::INMIGRATE {
            if Instant::now() >= deadline {
                return Err(StandbyError::NotLoaded);
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Runs the guest, which is loaded, and has its cards send.
    fn run_guest(
        &self,
        qemu: &mut Qemu,
        last: &LastCheckpoint,
        loaded_ms: f64,
    ) -> Result<Takeover, StandbyError> {
        let (generation, epoch, won_ms) =
            (self.request.generation + 1, last.epoch, millis_since(last.lost_at));
        qemu.cont().map_err(StandbyError::NotRun)?;
        let runs_ms = millis_since(last.lost_at);
        HoldingCards::pass_all(&self.cards, generation).map_err(StandbyError::Card)?;
        let passes_ms = millis_since(last.lost_at);
        Ok(Takeover { generation, epoch, loaded_ms, won_ms, runs_ms, passes_ms })
    }
}

fn millis_since(time: Instant) -> f64 {
    time.elapsed().as_secs_f64() * 1e3
}
