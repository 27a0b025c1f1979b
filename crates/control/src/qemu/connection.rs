//! A QEMU whose monitor is connected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_compat::facts::QemuFacts;
use towline_qmp::commands::{
    Capability, Cont, CpuFast, MigrationInfo, MigrationParameters, QueryCpusFast, QueryMigrate,
    QueryMigrateCapabilities, QueryMigrateParameters, QueryStatus, Quit, Status, Stop,
};
use towline_qmp::{self as qmp, Client, CommandReply, CommandRequest, Options};

use super::error::{Error, RepairReport};
use super::facts::{self, QemuState};
use crate::journal::{self, Journal, JournalEntry, UndoRecord};
use crate::process::{Process, ProcessState};
use crate::procfs::VcpuThreads;

/// Commands without a reply with which no further query is made: QEMU must still read what is executed out of band.
const UNANSWERED_MAX: usize = 4;
/// Time for which replies to them are read at a time.
const READ_TIME: Duration = Duration::from_millis(20);
/// Timeout of a query to which QEMU may not reply at once.
const QUERY_TIMEOUT: Duration = Duration::from_millis(500);

/// A QEMU whose monitor is connected.
#[derive(Debug)]
pub struct Qemu {
    /// Declared first to be unlocked first: QEMU accepts the next towline as soon as `client` closes.
    pub(super) journal: Option<Journal>,
    pub(super) client: Client,
    pub(super) process: Arc<Process>,
    pub(super) facts: QemuState,
    /// The vCPUs; `None` if QEMU does not report them.
    pub(super) cpus: Option<Vec<CpuFast>>,
    /// Facts for an image that were queried ahead.
    pub(super) image_facts: Option<QemuFacts>,
    /// True if the facts' settings are current: this process started QEMU and has held its monitor since.
    pub(super) has_current_settings: bool,
    /// True if the journal has a time at which the migration was in progress.
    pub(super) has_seen_migration: bool,
    pub(super) repaired: Option<RepairReport>,
}

impl Qemu {
    /// Connects to the monitor at `path` for changes: opens its journal, undoes the changes of a killed
    /// towline ([`Qemu::repaired`]), and queries the facts.
    ///
    /// A journal that cannot be written is logged, and the QEMU is used without one.
    ///
    /// # Errors
    /// As [`Qemu::inspect`]; [`journal::Error::InUse`] while another towline works on this QEMU.
    pub fn connect(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        let path = path.as_ref();
        Self::inspect(path, options)?.with_journal(path)
    }

    /// Opens the journal of this QEMU, whose monitor is at `path`.
    pub(super) fn with_journal(self, path: &Path) -> Result<Self, Error> {
        let mut qemu = self;
        match qemu.take_journal(path) {
            Ok(()) => {}
            Err(error @ Error::Journal(journal::Error::InUse { .. })) => return Err(error),
            Err(Error::Journal(error)) => {
                let socket = qemu.socket();
                tracing::warn!(
                    "if this process is killed, the settings of QEMU on {socket} are not restored: {error}"
                );
            }
            Err(error) => return Err(error),
        }
        Ok(qemu)
    }

    /// Connects to the monitor at `path` and queries the facts. Changes nothing.
    ///
    /// # Errors
    /// As [`Client::connect`] and [`Qemu::refresh`].
    pub fn inspect(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        Self::new(Client::connect(path, options)?)
    }

    /// Queries the facts over an existing connection. Changes are not recorded in a journal.
    ///
    /// # Errors
    /// Those of [`Qemu::refresh`].
    pub fn new(mut client: Client) -> Result<Self, Error> {
        let mut requests = vec![CommandRequest::new(&QueryCpusFast)?];
        requests.extend(facts::requests()?);
        let replies = client.execute_all(&requests)?;
        let listener = client.peer_credentials().map_or(0, |peer| peer.pid);
        Self::of_replies(client, replies, listener)
    }

    /// A QEMU that has replied to `query-cpus-fast` and to the requests of facts. `listener`: the process
    /// that listens on its monitor's socket.
    pub(super) fn of_replies(
        mut client: Client,
        replies: impl IntoIterator<Item = CommandReply>,
        listener: i32,
    ) -> Result<Self, Error> {
        let mut replies = replies.into_iter();
        let cpus = replies.next().expect("one reply for each request").of::<QueryCpusFast>();
        let cpus = cpus.map_err(|error| error.to_string());
        let known = cpus.as_deref().map_err(String::as_str);
        let process = Arc::new(Process::of_cpus(&mut client, known, listener)?);
        let facts = facts::of_replies(&client, replies)?;
        Ok(Self {
            client,
            process,
            facts,
            cpus: cpus.ok(),
            image_facts: None,
            has_current_settings: false,
            journal: None,
            has_seen_migration: false,
            repaired: None,
        })
    }

    /// Changes of an earlier towline that [`Qemu::connect`] repaired, if any.
    pub fn repaired(&self) -> Option<&RepairReport> {
        self.repaired.as_ref()
    }

    /// Records how to undo a change, before it is made. Returns `None` without a journal; one that cannot be
    /// written is logged.
    pub fn record(&self, record: &UndoRecord) -> Option<JournalEntry> {
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
    pub fn facts(&self) -> &QemuState {
        &self.facts
    }

    /// Queries the facts again.
    ///
    /// # Errors
    /// [`Error::Qmp`]; [`Error::RamBlocks`] and [`Error::Machine`] for replies that no known QEMU sends.
    pub fn refresh(&mut self) -> Result<&QemuState, Error> {
        self.facts = facts::facts(&mut self.client)?;
        Ok(&self.facts)
    }

    /// The monitor's client, for all other commands and for events.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// The monitor's socket.
    pub fn socket(&self) -> &str {
        self.client.socket()
    }

    /// Absolute path of the monitor's socket.
    pub(crate) fn socket_path(&self) -> PathBuf {
        let socket = Path::new(self.socket());
        std::path::absolute(socket).unwrap_or_else(|_| socket.into())
    }

    /// QEMU's version with its package, for messages: `10.0.2 (Debian 1:10.0.2+ds-2)`.
    pub fn version_text(&self) -> String {
        facts::version_text(&self.facts.version)
    }

    /// Queries the guest's run state.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn status(&mut self) -> Result<Status, Error> {
        Ok(self.client.execute(&QueryStatus)?)
    }

    /// Makes a query to which QEMU does not reply while it completes or loads a migration, or its main loop
    /// waits for a page. Returns `None` if there was no reply.
    ///
    /// # Errors
    /// Those of `query` except a timeout.
    pub fn try_query<T>(
        &mut self,
        query: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let until = Instant::now() + QUERY_TIMEOUT;
        while self.client.unanswered() >= UNANSWERED_MAX {
            if Instant::now() >= until {
                return Ok(None);
            }
            // Reads replies.
            match self.client.wait_event(|_| false, READ_TIME) {
                Err(qmp::Error::NoEvent { .. }) | Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.try_now(query)
    }

    /// As [`Self::try_query`], also if earlier commands have no reply.
    ///
    /// # Errors
    /// As [`Self::try_query`].
    pub(crate) fn try_now<T>(
        &mut self,
        query: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let deadline = self.client.deadline();
        self.client.set_deadline(QUERY_TIMEOUT);
        let reply = query(self);
        self.client.set_deadline(deadline);
        match reply {
            Ok(reply) => Ok(Some(reply)),
            Err(Error::Qmp(qmp::Error::Timeout { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// As [`Self::try_query`]; a cancellation ends the wait for the reply, too.
    ///
    /// # Errors
    /// As [`Self::try_query`].
    pub(crate) fn try_query_until<T>(
        &mut self,
        cancel: &Cancel,
        query: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        self.client.set_interrupt((!cancel.is_cancelled()).then(|| cancel.descriptor()));
        let reply = self.try_query(query);
        self.client.set_interrupt(None);
        match reply {
            Err(Error::Qmp(qmp::Error::Cancelled { .. })) => Ok(None),
            reply => reply,
        }
    }

    /// Waits for replies even after a cancellation ([`Options::interrupt`]): the settings of a changed QEMU
    /// must be restored.
    pub(crate) fn wait_for_replies(&mut self) {
        self.client.set_interrupt(None);
    }

    /// Queries the migration.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn migration(&mut self) -> Result<MigrationInfo, Error> {
        Ok(self.client.execute(&QueryMigrate)?)
    }

    /// Queries the migration and the guest's run state with one round trip.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn migration_and_status(&mut self) -> Result<(MigrationInfo, Status), Error> {
        Ok(facts::execute_both(&mut self.client, &QueryMigrate, &QueryStatus)?)
    }

    /// Pauses the guest; a QEMU that waits for a guest leaves it paused.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn stop(&mut self) -> Result<(), Error> {
        self.client.execute(&Stop)?;
        Ok(())
    }

    /// Starts or resumes the guest.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn cont(&mut self) -> Result<(), Error> {
        self.client.execute(&Cont)?;
        Ok(())
    }

    /// Starts or resumes the guest, and queries its run state with the same round trip.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn cont_and_status(&mut self) -> Result<Status, Error> {
        let (_, status) = facts::execute_both(&mut self.client, &Cont, &QueryStatus)?;
        Ok(status)
    }

    /// The process, identified when the monitor was connected.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// The process, beyond this connection.
    pub(crate) fn shared_process(&self) -> Arc<Process> {
        Arc::clone(&self.process)
    }

    /// The threads of its vCPUs.
    pub(crate) fn vcpu_threads(&self) -> VcpuThreads {
        VcpuThreads::of(self.process.pid(), self.cpus.as_deref().unwrap_or_default())
    }

    /// Connects to the monitor's socket again, where another listener may have replaced a proxy that has
    /// exited.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Error::OtherProcess`] unless it is proven to be the same QEMU.
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

    /// Returns true if QEMU's process is known and exits within this time. False for a process that is not
    /// known.
    pub fn has_exited(&self, within: Duration) -> bool {
        self.process.state_within(within) == ProcessState::Exited
    }

    /// Ends QEMU and waits until it has closed the monitor and, if its process is known, has exited. A QEMU
    /// that has already exited is not an error.
    ///
    /// # Errors
    /// [`Error::Qmp`], with a timeout if that takes longer than the client's deadline.
    pub fn quit(&mut self) -> Result<(), Error> {
        let started = Instant::now();
        let (deadline, socket) = (self.client.deadline(), self.socket().to_owned());
        let left = || deadline.saturating_sub(started.elapsed());
        let timeout = |step: &str| {
            let (command, socket) = (format!("quit ({step})"), socket.clone());
            qmp::Error::Timeout { command, socket, waited: started.elapsed() }
        };
        let mut result = self.client.execute(&Quit).map(drop);
        while result.is_ok() {
            if left() == Duration::ZERO {
                return Err(timeout("closing the monitor").into());
            }
            result = self.client.next_event(left()).map(drop);
        }
        if let Err(error) = result
            && !error.is_disconnected()
        {
            return Err(error.into());
        }
        if self.process.is_known() && !self.has_exited(left()) {
            return Err(timeout("its process's end").into());
        }
        if let Some(journal) = &self.journal {
            journal.clear();
        }
        Ok(())
    }

    /// Queries all capabilities and parameters with one round trip, unless those of the facts are current.
    pub(super) fn settings_now(
        &mut self,
    ) -> Result<(BTreeMap<Capability, bool>, MigrationParameters), Error> {
        if std::mem::take(&mut self.has_current_settings) {
            return Ok((self.facts.capabilities.clone(), self.facts.parameters.clone()));
        }
        let (states, parameters) =
            facts::execute_both(&mut self.client, &QueryMigrateCapabilities, &QueryMigrateParameters)?;
        Ok((facts::by_name(states), parameters))
    }

    pub(super) fn parameters_now(&mut self) -> Result<MigrationParameters, Error> {
        Ok(self.client.execute(&QueryMigrateParameters)?)
    }
}
