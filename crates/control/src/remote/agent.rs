//! The other end of the session: makes a place for a guest, and receives it; or sends an image.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Map, Value, json};
use towline_channel::{Address, Listener, OneTimeCredentials};
use towline_compat::facts::{BlockFacts, Subject};
use towline_compat::{ConfiguredBy, Facts, evaluate};
use towline_launch::{
    GuestDirectory, GuestIdentity, GuestName, HostArguments, IncomingOption, Launcher, Lifetime, QemuVersion,
    Recorded, RunningGuest, RuntimeError, RuntimeRoot,
};
use towline_qmp::commands::{Capability, QueryStatus, RunState};
use towline_qmp::{self as qmp, Client, Command, CommandError, Commands, Dialogue};

use super::Error;
use super::disks::{CopiedDisk, WrittenDisk};
use super::frames::{Card, FrameReceiver};
use super::guest::of_two_hosts;
use super::new_disks::NewDisks;
use super::protection::{AgentStandby, StandsBy};
use super::waiting::{
    END_TIMEOUT, StartedForGuest, failed, free_port, one_time_credentials, own_address, parsed, reply,
};
use super::{
    ENDED, Ended, FRAMES, FRAMES_KEY, LISTENING, NewGuest, Place, Prepare, Prepared, Receive, ReceiveDirect,
    Receiving, SESSION, SESSION_KEY, SendImage, Sending, compression_of,
};
use crate::check::CheckEnd;
use crate::hex::to_hex;
use crate::lock::lock;
use crate::plan::{
    self, AfterCopy, ConnectingEnd, CopyRequest, CopyResult, Destination, Direct, SHARED_CAPABILITIES,
    Source, Task, Tls, TransferOptions, WritableDisks, wait_for_socket,
};
use crate::procfs::of_kernel;
use crate::protect::{StandbyMemory, StandbyRequest};
use crate::qemu::Qemu;

/// Commands of an agent.
const COMMANDS: [&str; 4] = [Prepare::NAME, Receive::NAME, SendImage::NAME, StandbyRequest::NAME];
/// Time for which a socket of a QEMU that is being started is waited for.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which the source may take to connect, once it knows where.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(60);
/// The same after its disks were copied; the end of the session ends it before.
const DISKS_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// An agent, which prepares one guest for its host. A QEMU that it has started is ended with it.
#[derive(Debug)]
pub struct Agent {
    root: RuntimeRoot,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Begun,
    Prepared(Box<Ready>),
    Requested(AgentTask),
}

/// A place that was made for a guest.
#[derive(Debug)]
struct Ready {
    destination: Destination,
    started: Option<StartedForGuest>,
    refusals: Vec<String>,
    copies_disks: bool,
    cards: Vec<Card>,
    /// The QEMU can be connected again after it has lost its source in a postcopy.
    recovers: bool,
}

/// Task of an agent once its session has prepared it.
#[derive(Debug)]
pub enum AgentTask {
    /// Receives or sends a guest.
    Copy(Box<AgentCopy>),
    /// Stands by for one.
    StandBy(Box<AgentStandby>),
}

/// The guest that is received or sent next.
#[derive(Debug)]
pub struct AgentCopy {
    /// Where it comes from.
    pub source: Source,
    /// Where it goes.
    pub destination: Destination,
    /// The copy.
    pub request: CopyRequest,
    /// Cards of the QEMU, which get frames of the source.
    pub frames: FrameReceiver,
    started: Option<StartedForGuest>,
}

impl Commands for Agent {
    fn names(&self) -> &[&'static str] {
        &COMMANDS
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        match name {
            Prepare::NAME => reply(&self.prepare(&parsed(arguments)?)?),
            Receive::NAME => reply(&self.receive(&parsed(arguments)?)?),
            SendImage::NAME => reply(&self.send(&parsed(arguments)?)?),
            StandbyRequest::NAME => reply(&self.stand_by(parsed(arguments)?)?),
            _ => Err(CommandError::NotFound),
        }
    }
}

impl Agent {
    /// An agent whose guests are below `root`.
    pub fn new(root: RuntimeRoot) -> Self {
        Self { root, state: Mutex::default() }
    }

    /// The next task, once that was requested.
    pub fn task(&self) -> Option<AgentTask> {
        let mut state = lock(&self.state);
        match std::mem::take(&mut *state) {
            State::Requested(task) => Some(task),
            other => {
                *state = other;
                None
            }
        }
    }

    fn prepare(&self, request: &Prepare) -> Result<Prepared, CommandError> {
        let guest = Facts::parse(request.facts.to_string().as_bytes()).map_err(failed)?;
        let (destination, started) = match &request.place {
            Place::Qmp(path) => (Destination::Qmp(path.clone()), None),
            Place::Guest(place) => {
                let blocks = guest.qemu().filter(|_| place.is_standby).map(|qemu| &qemu.blocks[..]);
                let (monitor, started) = self.start(place, request.disks.copied(), blocks)?;
                (Destination::Qmp(monitor), Some(started))
            }
            Place::File(path) => (Destination::Image(path.clone()), None),
            Place::Store(location) => (Destination::Store(location.parse().map_err(failed)?), None),
        };
        let mut ready = Ready {
            destination,
            started,
            refusals: Vec::new(),
            copies_disks: !request.disks.copied().is_empty(),
            cards: Vec::new(),
            recovers: false,
        };
        let mut facts = None;
        if let Destination::Qmp(socket) = &ready.destination {
            let mut qemu = waiting_qemu(socket)?;
            let there = Subject::Qemu(Box::new(qemu.compat_facts().map_err(failed)?)).into();
            let disks = WrittenDisk::of(&mut qemu).map_err(failed)?;
            ready.cards = Card::of(&mut qemu);
            ready.recovers = plan::recovers(&qemu.facts().version.qemu);
            let report = evaluate(&of_two_hosts(&guest, &there, request.lanes));
            ready.refusals = report.reasons(ConfiguredBy::Towline);
            ready.refusals.extend(request.disks.refusals(&disks));
            facts = Some(reply(&there)?);
        }
        let cards = ready.cards.iter().map(|card| card.chardev.clone()).collect();
        let prepared = Prepared { facts, refusals: ready.refusals.clone(), cards };
        *lock(&self.state) = State::Prepared(Box::new(ready));
        Ok(prepared)
    }

    /// Makes these disks, and starts a QEMU for this guest. Both outlive this process, which may be killed while the guest is there already.
    /// `blocks`: those of a guest for which it stands by. Returns the monitor, too.
    fn start(
        &self,
        guest: &NewGuest,
        copied: &[CopiedDisk],
        blocks: Option<&[BlockFacts]>,
    ) -> Result<(PathBuf, StartedForGuest), CommandError> {
        let recorded = Recorded::from_json(guest.command_line.as_bytes()).map_err(failed)?;
        let name: GuestName = guest.name.parse().map_err(failed)?;
        if self.root.ends_with_session() && !lingers() {
            let path = self.root.path().display();
            let text = format!(
                "{path}, with the guest's monitor, is removed at the end of this session: run `loginctl enable-linger` there"
            );
            return Err(CommandError::generic(text));
        }
        let settings =
            guest.settings.iter().map(|setting| setting.parse()).collect::<Result<_, _>>().map_err(failed)?;
        let own_directory = guest.working_directory.clone().filter(|path| guest.is_trusted && path.is_dir());
        let host = HostArguments {
            binary: program(guest.binary.as_deref().unwrap_or(Path::new(""))),
            working_directory: own_directory.or_else(|| std::env::current_dir().ok()),
            settings,
            ..HostArguments::default()
        };
        let host = host.for_guest(GuestIdentity { n: 0, name: name.as_str() }).map_err(failed)?;
        let allowed = if guest.is_trusted { recorded.trust(&host) } else { recorded.allow(&host) };
        let mut allowed = allowed.map_err(failed)?;
        let memory = blocks.map(|blocks| {
            let version = QemuVersion::of_binary(&host).map_err(failed)?;
            StandbyMemory::new(blocks, &mut allowed, version).map_err(failed)
        });
        let memory = memory.transpose()?;
        let directory = self.claim(&name).map_err(failed)?;
        let list = directory.path().join(NewDisks::FILE);
        std::fs::write(RunningGuest::waiting_path(&directory.qmp_path()), "").map_err(failed)?;
        let mut launcher = Launcher::new(directory);
        launcher.incoming = IncomingOption::Defer;
        launcher.lifetime = Lifetime::Detached;
        launcher.generations.clone_from(&guest.generations);
        let disks = NewDisks::make(copied, &allowed.whole(), &host, guest.protection.as_deref(), &list);
        let disks = disks.map_err(CommandError::generic)?;
        let qemu = launcher.start(&allowed, &host).map_err(failed)?;
        Ok((qemu.qmp_path(), StartedForGuest { qemu: Some(qemu), disks, memory }))
    }

    /// Takes the name, also from a QEMU that an agent which was killed has left without a guest, and removes the disks that it was given.
    fn claim(&self, name: &GuestName) -> Result<GuestDirectory, Error> {
        let taken = match self.root.claim(name) {
            Err(taken @ RuntimeError::Taken { .. }) => taken,
            claimed => return Ok(claimed?),
        };
        let left = self.root.find(name)?;
        let Some(left) = left.filter(|left| !has_owner(left)) else { return Err(taken.into()) };
        let status = Client::connect(&left.qmp, &qmp::Options::default())
            .and_then(|mut client| client.execute(&QueryStatus));
        match status {
            Ok(status) if status.status == RunState::INMIGRATE => {}
            // What it has is not known: QEMU 10.0 hangs if lanes are cut in a certain moment.
            Err(qmp::Error::Timeout { .. }) => {
                return Err(Error::Hanging { name: left.name, pid: left.pid });
            }
            _ => return Err(taken.into()),
        }
        tracing::info!(%name, pid = left.pid, "ending a QEMU that waits for a guest of an agent that has ended");
        let remove_disks = NewDisks::removal(&left.qmp.with_file_name(NewDisks::FILE));
        if !left.end(END_TIMEOUT, END_TIMEOUT) {
            return Err(taken.into());
        }
        remove_disks();
        Ok(self.root.claim(name)?)
    }

    fn receive(&self, request: &Receive) -> Result<Receiving, CommandError> {
        let mut state = lock(&self.state);
        let ready = state.take_prepared()?;
        let credentials = one_time_credentials(&request.certificate)?;
        let certificate = to_hex(credentials.own().certificate());
        let compression = compression_of(&request.compression, request.compression_level)?;
        let direct = request.direct.as_ref().map(direct_of).transpose()?;
        if let (Some(Direct { is_encrypted: false, .. }), Destination::Qmp(socket)) =
            (&direct, &ready.destination)
            && Qemu::inspect(socket, &qmp::Options::default()).map_err(failed)?.process().has_own_network()
        {
            return Err(failed(Error::OtherNetwork { what: "the QEMU there" }));
        }
        let is_direct = direct.is_some();
        let mut received = CopyRequest { compression, direct, ..received(request, credentials) };
        let disk_port = if ready.copies_disks { Some(listen_for_disks(&mut received)?) } else { None };
        let reception = AgentCopy {
            source: Source::Stream(free_port()),
            destination: ready.destination,
            request: received,
            frames: FrameReceiver::of(ready.cards),
            started: ready.started,
        };
        *state = State::Requested(AgentTask::Copy(Box::new(reception)));
        Ok(Receiving { certificate, disk_port, is_direct, recovers: ready.recovers })
    }

    fn stand_by(&self, request: StandbyRequest) -> Result<StandsBy, CommandError> {
        let mut state = lock(&self.state);
        let Ready { destination: Destination::Qmp(monitor), started: Some(started), cards, .. } =
            state.take_prepared()?
        else {
            return Err(CommandError::generic("no standby is prepared"));
        };
        let (standby, reply) = AgentStandby::new(request, monitor, &cards, started)?;
        *state = State::Requested(AgentTask::StandBy(Box::new(standby)));
        Ok(reply)
    }

    fn send(&self, request: &SendImage) -> Result<Sending, CommandError> {
        let mut state = lock(&self.state);
        let (source, facts) = match (&*state, &request.place) {
            (State::Begun, Place::File(path)) => {
                let facts = CheckEnd::Image(path.clone()).facts().map_err(failed)?;
                (Source::Image(path.clone()), Some(reply(&facts)?))
            }
            (State::Begun, Place::Store(location)) => {
                (Source::Store(location.parse().map_err(failed)?), None)
            }
            _ => return Err(CommandError::generic("only an image can be sent")),
        };
        let credentials = one_time_credentials(&request.certificate)?;
        let certificate = to_hex(credentials.own().certificate());
        let (multifd_channels, max_bandwidth) = (Some(request.lanes), request.max_bandwidth);
        let transfer = TransferOptions { multifd_channels, max_bandwidth, ..TransferOptions::default() };
        let task = Task::Copy { transfer, after: AfterCopy::default(), base: None };
        let request = CopyRequest {
            connects: ConnectingEnd::Destination,
            compression: compression_of(&request.compression, request.compression_level)?,
            verify: request.verify,
            tls: Some(Tls::OneTime(credentials)),
            accept_timeout: ACCEPT_TIMEOUT,
            peer_timeout: Duration::from_millis(request.peer_timeout_ms),
            ..CopyRequest::new(task)
        };
        *state = State::Requested(AgentTask::Copy(Box::new(AgentCopy {
            source,
            destination: Destination::Stream(free_port()),
            request,
            frames: FrameReceiver::default(),
            started: None,
        })));
        Ok(Sending { certificate, facts })
    }
}

impl State {
    /// The place that was prepared, against which this host has nothing.
    fn take_prepared(&mut self) -> Result<Ready, CommandError> {
        let Self::Prepared(ready) = std::mem::take(self) else {
            return Err(CommandError::generic("nothing is prepared"));
        };
        if !ready.refusals.is_empty() {
            return Err(CommandError::generic(ready.refusals.join("; ")));
        }
        Ok(*ready)
    }
}

/// Options of QEMUs that are connected to each other.
fn direct_of(request: &ReceiveDirect) -> Result<Direct, CommandError> {
    let is_known = |name| SHARED_CAPABILITIES.contains(name) || *name == Capability::POSTCOPY_RAM;
    if !request.capabilities.iter().all(is_known) {
        return Err(CommandError::generic("a capability is not one that both QEMUs need"));
    }
    Ok(Direct { is_encrypted: request.is_encrypted, capabilities: request.capabilities.clone() })
}

/// Has this copy receive disks first, however long they take. Returns the port.
fn listen_for_disks(request: &mut CopyRequest) -> Result<u16, CommandError> {
    let options = plan::listen_options(request).map_err(failed)?;
    let listener = Arc::new(Listener::bind_with(&free_port(), &options).map_err(failed)?);
    let Address::Tcp { port, .. } = *listener.local_address() else {
        return Err(CommandError::generic("no port for disks"));
    };
    (request.disks, request.accept_timeout) = (WritableDisks::Exported { listener }, DISKS_TIMEOUT);
    Ok(port)
}

/// Returns true while the towline that has started this QEMU lives.
fn has_owner(guest: &RunningGuest) -> bool {
    Path::new("/proc").join(guest.owner_pid.to_string()).exists()
}

/// The copy that brings the guest here.
fn received(request: &Receive, credentials: OneTimeCredentials) -> CopyRequest {
    let transfer = TransferOptions { multifd_channels: Some(request.lanes), ..TransferOptions::default() };
    let task = Task::Copy { transfer, after: AfterCopy::SourcePaused { run: request.run }, base: None };
    CopyRequest {
        tls: Some(Tls::OneTime(credentials)),
        overwrite: request.overwrite,
        accept_timeout: ACCEPT_TIMEOUT,
        peer_timeout: Duration::from_millis(request.peer_timeout_ms),
        recover_timeout: Duration::from_millis(
            request.direct.as_ref().map_or(0, |direct| direct.recover_timeout_ms),
        ),
        ..CopyRequest::new(task)
    }
}

/// Connects to a QEMU that waits for a guest, and that may just have been started.
fn waiting_qemu(socket: &Path) -> Result<Qemu, CommandError> {
    let cancel = towline_channel::Cancel::new().map_err(failed)?;
    wait_for_socket(socket, SOCKET_TIMEOUT, &cancel, &|_| {}).map_err(failed)?;
    Qemu::inspect(socket, &qmp::Options::default()).map_err(failed)
}

/// The program at this path, or else of this name in PATH.
fn program(path: &Path) -> PathBuf {
    if path.exists() { path.to_owned() } else { path.file_name().unwrap_or_default().into() }
}

/// Returns true if the runtime directory of this user outlives its sessions.
fn lingers() -> bool {
    std::env::var("LOGNAME").is_ok_and(|user| Path::new("/var/lib/systemd/linger").join(user).exists())
}

impl AgentCopy {
    /// Returns true if a QEMU was started for the guest.
    pub fn has_started(&self) -> bool {
        self.started.is_some()
    }

    /// Keeps the QEMU that was started for the guest, if that may be there.
    pub fn settle(&mut self, copied: &CopyResult) {
        let may_be_there =
            copied.as_ref().map_or_else(|failure| failure.guest.may_be_at_destination(), |_| true);
        if may_be_there && let Some(started) = &mut self.started {
            started.keep();
        }
        self.started = None;
    }
}

/// The first line of an agent.
pub fn greeting() -> String {
    let (host, kernel) = (of_kernel("hostname"), of_kernel("osrelease"));
    let session = json!({
        "session": SESSION, "host": host, "kernel": kernel, "address": own_address(), FRAMES_KEY: FRAMES,
    });
    Dialogue::greeting(Map::from_iter([(SESSION_KEY.to_owned(), session)]))
}

/// The line of an agent that listens at this address.
pub fn listening(address: &Address) -> Option<String> {
    let Address::Tcp { port, .. } = address else { return None };
    Some(Dialogue::event(LISTENING, Map::from_iter([("port".to_owned(), (*port).into())])))
}

/// The last line of an agent.
pub fn ended(ended: &Ended) -> String {
    let data = serde_json::to_value(ended).ok().and_then(|value| value.as_object().cloned());
    Dialogue::event(ENDED, data.unwrap_or_default())
}

/// The line of a notice.
pub fn notice(text: &str) -> String {
    Dialogue::event(super::NOTICE, Map::from_iter([("text".to_owned(), text.into())]))
}
