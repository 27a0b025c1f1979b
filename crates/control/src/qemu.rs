//! One running or waiting QEMU: what it is, and how it is set for a migration.
//!
//! [`Qemu`] is a connected [`Client`] with the [`Facts`] asked for at the beginning; [`Settings`] changes capabilities
//! and parameters and puts them back. What to do with them, and in which order, is not decided here.

mod compatibility;
mod device_tree;
mod drives;
mod ram_block;
mod repair;
mod settings;
mod virtio;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use towline_qmp::commands::{
    Capability, Cont, HumanMonitorCommand, MigrationInfo, MigrationParameters, MigrationStatus, QomGet,
    QueryMigrate, QueryMigrateCapabilities, QueryMigrateParameters, QueryStatus, QueryUuid, QueryVersion,
    Quit, RunState, Status, Stop, Version,
};
use towline_qmp::{self as qmp, Client, Options, PeerCredentials};

use crate::journal::{self, Entry, Journal, Record};

pub use crate::process::{Process, ProcessState};
pub use ram_block::{RamBlock, RamBlockError};
pub use repair::Repaired;
pub use settings::{ApplyError, RestoreError, Settings, Wanted};

/// How long an answer is waited for that may not come for a while.
const SILENCE_MAX: Duration = Duration::from_millis(500);
/// What QEMU appends to a machine type's name to name its QOM type.
const MACHINE_SUFFIX: &str = "-machine";

/// Why something about a QEMU could not be learned or set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The monitor failed us.
    #[error(transparent)]
    Qmp(#[from] qmp::Error),
    /// `info ramblock` printed what we cannot read.
    #[error("QEMU {version} on {socket}: {source}")]
    RamBlocks {
        /// The socket.
        socket: String,
        /// QEMU's version.
        version: String,
        /// What could not be read.
        source: RamBlockError,
    },
    /// The machine's type is not text that ends in `-machine`.
    #[error("QEMU on {socket} names its machine {found}, expected text that ends in \"{MACHINE_SUFFIX}\"")]
    Machine {
        /// The socket.
        socket: String,
        /// What it said.
        found: Value,
    },
    /// Another process, or one that is not known, answers on the socket.
    #[error("another process answers on {socket} than the QEMU that did before")]
    OtherProcess {
        /// The socket.
        socket: String,
    },
    /// Another towline works on it, or its journal cannot be used.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// This QEMU has no such capability.
    #[error(
        "QEMU {version} on {socket} has no migration capability {capability}: use a QEMU that has it, or go without"
    )]
    UnknownCapability {
        /// Its name.
        capability: Capability,
        /// The socket.
        socket: String,
        /// QEMU's version.
        version: String,
    },
    /// This QEMU has no such parameter.
    #[error(
        "QEMU {version} on {socket} has no migration parameter {parameter}: use a QEMU that has it, or go without"
    )]
    UnknownParameter {
        /// Its name.
        parameter: String,
        /// The socket.
        socket: String,
        /// QEMU's version.
        version: String,
    },
}

/// What was known of a QEMU when it was last asked.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Facts {
    /// Its version.
    pub version: Version,
    /// Its machine type as the stream carries it, for example `pc-q35-10.0`.
    pub machine: String,
    /// What its guest does.
    pub status: Status,
    /// The guest's memory, also blocks that are not migrated.
    pub ram_blocks: Vec<RamBlock>,
    /// The guest's UUID; all zeroes if it has none.
    pub uuid: String,
    /// The migration capabilities that this QEMU knows, on or off.
    pub capabilities: BTreeMap<Capability, bool>,
    /// The migration parameters.
    pub parameters: MigrationParameters,
    /// The migration under way or the last one.
    pub migration: MigrationInfo,
    /// Whether it waits for a guest.
    pub incoming: Incoming,
    /// The process that listens on the monitor's socket, as the kernel says: QEMU or a proxy.
    pub peer: Option<PeerCredentials>,
}

impl Facts {
    /// Why QEMU refuses to migrate this guest; empty where it does not.
    #[must_use]
    pub fn blocked_reasons(&self) -> &[String] {
        &self.migration.blocked_reasons
    }

    /// Whether `migrate-incoming` is what this QEMU waits for.
    #[must_use]
    pub fn waits_for_migrate_incoming(&self) -> bool {
        self.incoming == Incoming::Deferred
    }

    /// The blocks that the stream carries.
    pub fn migrated_blocks(&self) -> impl Iterator<Item = &RamBlock> {
        self.ram_blocks.iter().filter(|block| block.is_migrated())
    }
}

/// Whether a QEMU waits for a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// It has a guest of its own.
    No,
    /// Started with `-incoming defer`, and not told yet where to listen. A 7.2 that was started with `-incoming exec:`
    /// or `fd:` looks the same, and refuses `migrate-incoming`.
    Deferred,
    /// It listens, and nobody came yet.
    Listening,
    /// A guest is coming in, or it failed to and QEMU stayed.
    Loading(MigrationStatus),
}

impl Incoming {
    fn of(status: &Status, migration: &MigrationInfo) -> Self {
        if status.status != RunState::INMIGRATE {
            return Self::No;
        }
        match &migration.status {
            Some(status) if *status == MigrationStatus::SETUP => Self::Listening,
            Some(status) if *status != MigrationStatus::NONE => Self::Loading(status.clone()),
            // 7.2 gives no status before the first connection, only the address.
            _ if !migration.socket_address.is_empty() => Self::Listening,
            _ => Self::Deferred,
        }
    }
}

/// A QEMU that we hold a monitor of.
#[derive(Debug)]
pub struct Qemu {
    client: Client,
    process: Arc<Process>,
    facts: Facts,
    journal: Option<Journal>,
    repaired: Option<Repaired>,
}

impl Qemu {
    /// Connects to the monitor at `path`, to change something: takes its journal, puts back what a towline that was killed left changed
    /// ([`Qemu::repaired`]), and asks for the facts.
    ///
    /// A journal that cannot be kept is logged, and the QEMU used without one.
    ///
    /// # Errors
    /// As [`Qemu::inspect`]; [`journal::Error::InUse`] while another towline works on this QEMU.
    pub fn connect(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        let path = path.as_ref();
        let mut qemu = Self::inspect(path, options)?;
        match qemu.take_journal(path) {
            Ok(()) => {}
            Err(error @ Error::Journal(journal::Error::InUse { .. })) => return Err(error),
            Err(Error::Journal(error)) => {
                let socket = qemu.socket();
                tracing::warn!(
                    "if this process is killed, the settings of QEMU on {socket} are not put back: {error}"
                );
            }
            Err(error) => return Err(error),
        }
        Ok(qemu)
    }

    /// Connects to the monitor at `path` and asks for the facts. Changes nothing.
    ///
    /// # Errors
    /// Those of [`Client::connect`] and of [`Qemu::refresh`].
    pub fn inspect(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        Self::new(Client::connect(path, options)?)
    }

    /// Asks for the facts on a connection that is there. What is changed is recorded in no journal.
    ///
    /// # Errors
    /// Those of [`Qemu::refresh`].
    pub fn new(mut client: Client) -> Result<Self, Error> {
        // Before the facts: they prove that QEMU still ran after its process was identified.
        let process = Arc::new(Process::identify(&mut client)?);
        let facts = facts(&mut client)?;
        Ok(Self { client, process, facts, journal: None, repaired: None })
    }

    /// What of an earlier towline was put back by [`Qemu::connect`]; `None`: there was nothing.
    #[must_use]
    pub fn repaired(&self) -> Option<&Repaired> {
        self.repaired.as_ref()
    }

    /// Records in the journal what undoes a change, before it is made. `None` without a journal; one that cannot be written is logged.
    pub fn record(&self, record: &Record) -> Option<Entry> {
        match self.journal.as_ref()?.write(record) {
            Ok(entry) => Some(entry),
            Err(error) => {
                let socket = self.socket();
                tracing::warn!(
                    "if this process is killed, a change of QEMU on {socket} is not undone: {error}"
                );
                None
            }
        }
    }

    /// The facts as of [`Qemu::new`] or the last [`Qemu::refresh`].
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Asks for the facts again.
    ///
    /// # Errors
    /// [`Error::Qmp`]; [`Error::RamBlocks`] and [`Error::Machine`] from a QEMU that says what none we know does.
    pub fn refresh(&mut self) -> Result<&Facts, Error> {
        self.facts = facts(&mut self.client)?;
        Ok(&self.facts)
    }

    /// The monitor, for all other commands and for events.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// The monitor's socket.
    #[must_use]
    pub fn socket(&self) -> &str {
        self.client.socket()
    }

    /// QEMU's version with its package, for messages: `10.0.2 (Debian 1:10.0.2+ds-2)`.
    #[must_use]
    pub fn version_text(&self) -> String {
        version_text(&self.facts.version)
    }

    /// What the guest does now.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn status(&mut self) -> Result<Status, Error> {
        Ok(self.client.execute(&QueryStatus)?)
    }

    /// Asks something that is not answered while QEMU completes or loads a migration, or its machine waits for a page; `None`: no
    /// answer yet.
    ///
    /// # Errors
    /// Those of `ask` but a timeout.
    pub fn patiently<T>(
        &mut self,
        ask: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let deadline = self.client.deadline();
        self.client.set_deadline(SILENCE_MAX);
        let answer = ask(self);
        self.client.set_deadline(deadline);
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(Error::Qmp(qmp::Error::Timeout { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// How the migration goes now.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn migration(&mut self) -> Result<MigrationInfo, Error> {
        Ok(self.client.execute(&QueryMigrate)?)
    }

    /// Pauses the guest; a QEMU that waits for one will leave it paused.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn stop(&mut self) -> Result<(), Error> {
        self.client.execute(&Stop)?;
        Ok(())
    }

    /// Runs the guest.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn cont(&mut self) -> Result<(), Error> {
        self.client.execute(&Cont)?;
        Ok(())
    }

    /// The process, as it was identified when the monitor was connected.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Connects to the monitor's socket again, where another listener may be in place of a proxy that has ended.
    ///
    /// # Errors
    /// Those of [`Client::connect`]; [`Error::OtherProcess`] where it is not proven to be the same QEMU.
    pub fn reconnect(&mut self) -> Result<(), Error> {
        let options = Options { deadline: self.client.deadline(), ..Options::default() };
        let mut client = Client::connect(self.client.socket(), &options)?;
        let process = Process::identify(&mut client)?;
        if !self.process.is_same(&process) {
            return Err(Error::OtherProcess { socket: client.socket().to_owned() });
        }
        self.client = client;
        Ok(())
    }

    /// Whether QEMU's process is known and has exited, or does `within` this time. False for a process that is not known.
    #[must_use]
    pub fn has_ended(&self, within: Duration) -> bool {
        self.process.state_within(within) == ProcessState::Exited
    }

    /// Ends QEMU and waits until it closed the monitor and, if its process is known, has exited. That it is gone already is no error.
    ///
    /// # Errors
    /// [`Error::Qmp`], with a timeout if that takes longer than the client's deadline.
    pub fn quit(&mut self) -> Result<(), Error> {
        let started = Instant::now();
        let mut result = self.client.execute(&Quit).map(|_| ());
        while result.is_ok() {
            let left = self.client.deadline().saturating_sub(started.elapsed());
            if left == Duration::ZERO {
                let socket = self.client.socket().to_owned();
                let command = "quit (closing the monitor)".to_owned();
                return Err(qmp::Error::Timeout { command, socket, waited: started.elapsed() }.into());
            }
            result = self.client.next_event(left).map(|_| ());
        }
        match result {
            Err(error) if !error.is_disconnected() => return Err(error.into()),
            _ => {}
        }
        let left = self.client.deadline().saturating_sub(started.elapsed());
        if self.process.is_known() && !self.has_ended(left) {
            let socket = self.client.socket().to_owned();
            let command = "quit (its process's end)".to_owned();
            return Err(qmp::Error::Timeout { command, socket, waited: started.elapsed() }.into());
        }
        if let Some(journal) = &self.journal {
            journal.clear();
        }
        Ok(())
    }

    fn capabilities_now(&mut self) -> Result<BTreeMap<Capability, bool>, Error> {
        capabilities(&mut self.client)
    }

    fn parameters_now(&mut self) -> Result<MigrationParameters, Error> {
        Ok(self.client.execute(&QueryMigrateParameters)?)
    }
}

fn facts(client: &mut Client) -> Result<Facts, Error> {
    let version = client.execute(&QueryVersion)?;
    let status = client.execute(&QueryStatus)?;
    let migration = client.execute(&QueryMigrate)?;
    Ok(Facts {
        machine: machine(client)?,
        ram_blocks: ram_blocks(client, &version)?,
        uuid: client.execute(&QueryUuid)?.uuid,
        capabilities: capabilities(client)?,
        parameters: client.execute(&QueryMigrateParameters)?,
        incoming: Incoming::of(&status, &migration),
        peer: client.peer_credentials().ok(),
        version,
        status,
        migration,
    })
}

fn machine(client: &mut Client) -> Result<String, Error> {
    let found = client.execute(&QomGet { path: "/machine".into(), property: "type".into() })?;
    match found.as_str().and_then(|text| text.strip_suffix(MACHINE_SUFFIX)) {
        Some(name) => Ok(name.to_owned()),
        None => Err(Error::Machine { socket: client.socket().to_owned(), found }),
    }
}

fn ram_blocks(client: &mut Client, version: &Version) -> Result<Vec<RamBlock>, Error> {
    let text = client.execute(&HumanMonitorCommand { command_line: "info ramblock".into() })?;
    ram_block::parse(&text).map_err(|source| Error::RamBlocks {
        socket: client.socket().to_owned(),
        version: version_text(version),
        source,
    })
}

fn capabilities(client: &mut Client) -> Result<BTreeMap<Capability, bool>, Error> {
    let states = client.execute(&QueryMigrateCapabilities)?;
    Ok(states.into_iter().map(|state| (state.capability, state.state)).collect())
}

fn version_text(version: &Version) -> String {
    match version.package.as_str() {
        "" => version.qemu.to_string(),
        package => format!("{} ({package})", version.qemu),
    }
}
