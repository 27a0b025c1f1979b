//! The device of one guest: its queues, its context, and the thread that serves them.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use towline_channel::ZeroCopySend;
use towline_vhost_user::{
    AdaptivePoller, BackendError, Device, Next, PollFlags, PollSet, ProtocolFeatures, Queues, Worker,
};

use crate::connection::Limits;
use crate::engine::{Engine, News};
use crate::gate::Gate;
use crate::host::{Ears, Event, Host, HostSocket, Listening, wait_for_freed};
use crate::packet::{HOST_CID, Kind};
use crate::report::{Desk, Report};
use crate::rules::{Place, Rule};
use crate::siblings::{Mailbox, Siblings};
use crate::sockets::Sockets as _;
use crate::state::State;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
/// `VIRTIO_VSOCK_F_SEQPACKET`.
const F_SEQPACKET: u64 = 1 << 1;
/// Queues of a device: with the event queue, which QEMU keeps to itself and others leave to the device.
pub const QUEUES: usize = 3;
/// Before the context in [`Device::migration_version`]: what a state of this form is called.
const VERSION: &str = "vsock 1 seqpacket cid ";
/// How long what is lent may take when the device ends, and, when its connections have been reset, until nothing is read.
const LOANS_WITHIN: Duration = Duration::from_secs(1);
const RESET_WITHIN: Duration = Duration::from_millis(100);
/// What a device is made of.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The guest's context.
    pub cid: u64,
    /// Where whoever connects says `CONNECT`, and, with `_PORT`, where the guest's connections go.
    pub uds: Option<PathBuf>,
    /// The same for messages.
    pub uds_seqpacket: Option<PathBuf>,
    /// Whom else it may be connected with.
    pub rules: Vec<Rule>,
    /// Guests of the same process with a group in common reach each other by their contexts.
    pub groups: Vec<String>,
    /// What it may take.
    pub limits: Limits,
    /// Whether packets of 16 KiB and more to TCP are sent without a copy.
    pub zero_copy_send: ZeroCopySend,
    /// How long its thread waits awake where requests and answers alternate; 0: never.
    pub poll: Duration,
    /// Its guest cannot be migrated with it, and its frontend is told so.
    pub unmigratable: bool,
}

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A place to listen at that cannot be had.
    #[error("nobody can listen at {place}: {source}; end who listens there, or choose another place")]
    Listen {
        /// The place.
        place: String,
        /// Why.
        source: io::Error,
    },
    /// Two guests with one context.
    #[error("the context {cid} is another guest's already; each needs one of its own")]
    Cid {
        /// The context.
        cid: u64,
    },
    /// No descriptor left, or so.
    #[error("the device cannot be made: {0}")]
    Io(#[from] io::Error),
}

/// A vsock device.
#[derive(Debug)]
pub struct Vsock {
    cid: u64,
    limits: Limits,
    poll: Duration,
    unmigratable: bool,
    ears: Arc<Ears>,
    desk: Arc<Desk>,
    passage: Arc<Passage>,
}

/// What the thread that answers the frontend tells the one that serves the queues.
#[derive(Debug, Default)]
struct Passage {
    /// A state that has come and was not taken over yet.
    arrived: Mutex<Option<State>>,
    config_read: AtomicBool,
}

impl Vsock {
    /// Makes a device and listens at its places; whoever connects waits until there is a guest.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(settings: Settings, siblings: &Arc<Siblings>) -> Result<Self, DeviceError> {
        let Settings { cid, uds, uds_seqpacket, rules, groups, limits, zero_copy_send, poll, unmigratable } =
            settings;
        let mut listening = Vec::new();
        let mut add = |name: String, made: io::Result<Listening>, port| match made {
            Ok(made) => {
                listening.push((made, port));
                Ok(())
            }
            Err(source) => Err(DeviceError::Listen { place: name, source }),
        };
        for (path, kind) in [(&uds, Kind::Stream), (&uds_seqpacket, Kind::Seqpacket)] {
            if let Some(path) = path {
                add(path.display().to_string(), Listening::unix(path, kind), None)?;
            }
        }
        for rule in &rules {
            if let Rule::In { from, port } = rule {
                let name = match from {
                    Place::Tcp(address) => address.to_string(),
                    Place::Unix(path) => path.display().to_string(),
                    Place::Vsock { port, .. } => format!("port {port} of the host's own vsock"),
                };
                add(name, Listening::place(from), Some(*port))?;
            }
        }
        let mailbox = Arc::new(Mailbox::new(limits.handshakes)?);
        if !siblings.add(cid, groups, Arc::clone(&mailbox)) {
            return Err(DeviceError::Cid { cid });
        }
        // The guest's messages go where its bytes go, unless only messages have a place.
        let uds = uds.or(uds_seqpacket);
        let siblings = Arc::clone(siblings);
        let greetings_max = limits.handshakes;
        let ears =
            Arc::new(Ears { listening, uds, rules, zero_copy_send, cid, siblings, mailbox, greetings_max });
        Ok(Self { cid, limits, poll, unmigratable, ears, desk: Arc::default(), passage: Arc::default() })
    }

    /// What it has done so far.
    pub fn report(&self) -> Report {
        self.desk.ask(|| self.ears.mailbox.wake())
    }
}

impl Vsock {
    /// Whether a frontend is connected.
    pub fn is_served(&self) -> bool {
        self.desk.is_open()
    }
}

impl Device for Vsock {
    fn name(&self) -> &str {
        "vsock"
    }

    fn queue_count(&self) -> usize {
        QUEUES
    }

    fn queues_per_worker(&self) -> usize {
        QUEUES
    }

    fn features(&self) -> u64 {
        F_SEQPACKET
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::CONFIG | ProtocolFeatures::DEVICE_STATE
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        let host = Host::new(Arc::clone(&self.ears))?;
        let engine = Engine::new(self.cid, self.limits, seed(), host);
        let (desk, passage) = (Arc::clone(&self.desk), Arc::clone(&self.passage));
        let (gate, waiting) = (Gate::default(), VecDeque::new());
        desk.open();
        let (pulse, news) = (AdaptivePoller::new(self.poll), true);
        Ok(Box::new(Server {
            engine,
            limits: self.limits,
            desk,
            passage,
            gate,
            fresh: [false; 2],
            served: [false; 2],
            waiting,
            pulse,
            news,
        }))
    }

    fn config(&self) -> Vec<u8> {
        self.passage.config_read.store(true, Ordering::Relaxed);
        self.cid.to_le_bytes().to_vec()
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        let Report { names, next_port, .. } = self.report();
        Ok(State { cid: self.cid, next_port, connections: names }.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), BackendError> {
        let state = State::decode(state, self.cid)?;
        *self.passage.arrived.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        Ok(())
    }

    fn is_migratable(&self) -> bool {
        !self.unmigratable
    }

    fn migration_version(&self) -> Result<String, BackendError> {
        if self.unmigratable {
            return Err(BackendError::new("it was started so that it cannot be migrated"));
        }
        Ok(format!("{VERSION}{}", self.cid))
    }

    fn accepts(&self, source: &str) -> Result<(), BackendError> {
        let cid = source.strip_prefix(VERSION);
        let cid =
            cid.ok_or_else(|| BackendError::new(format!("`{source}`: expected `{VERSION}` and a context")))?;
        if cid.parse() == Ok(self.cid) {
            return Ok(());
        }
        let own = self.cid;
        Err(BackendError::new(format!(
            "the guest has the context {cid}, and this is for {own}; give both the same --cid"
        )))
    }
}

/// Lets this process have as many descriptors as it may: each connection is one. Returns how many it has then.
pub fn allow_descriptors() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%errno, "the limit of open descriptors stays as it is");
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Where the host's ports begin: elsewhere with every process, so that none is used again at once.
fn seed() -> u32 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32
}

struct Server {
    engine: Engine<Host>,
    limits: Limits,
    desk: Arc<Desk>,
    passage: Arc<Passage>,
    gate: Gate,
    /// Whether this queue began anew, and the other one did not yet.
    fresh: [bool; 2],
    /// Whether this queue was started before.
    served: [bool; 2],
    waiting: VecDeque<(u32, Kind, u64, HostSocket)>,
    pulse: AdaptivePoller,
    /// Sockets have something to tell.
    news: bool,
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(reason) = self.await_loans(Instant::now() + LOANS_WITHIN) {
            tracing::error!(%reason, "the device ends");
        }
        self.write_down();
        self.desk.close();
    }
}

impl Server {
    fn write_down(&self) {
        let connections = self.engine.connections().collect();
        self.desk.write(Report {
            statistics: self.engine.statistics(),
            kept: self.engine.kept(),
            names: self.engine.names(),
            next_port: self.engine.table().next_port(),
            connections,
        });
    }

    fn open(&mut self, port: u32, kind: Kind, cid: u64, socket: HostSocket) {
        let connections = self.limits.connections;
        if cid != HOST_CID
            && self.engine.table().incoming(cid) >= self.engine.sockets().sibling_share(connections)
        {
            self.engine.refuse(socket);
            return;
        }
        if let Err(socket) = self.engine.open(port, kind, cid, socket) {
            self.engine.sockets_mut().close(socket, true);
        }
    }

    /// Lets those in who waited, when the guest knows that it came from elsewhere.
    fn pass(&mut self, queues: &mut Queues<'_>) {
        if self.gate == Gate::Open {
            return;
        }
        let now = self.engine.sockets().now_ms();
        self.gate.pass(queues.ring(EVENT), &self.passage.config_read, now);
        if self.gate == Gate::Open {
            for (port, kind, cid, socket) in std::mem::take(&mut self.waiting) {
                self.open(port, kind, cid, socket);
            }
        }
    }

    fn hear(&mut self) {
        let now = self.engine.sockets_mut().look_at_clock();
        self.engine.tick(now);
        if std::mem::take(&mut self.news) {
            self.engine.sockets_mut().look();
        }
        while let Some(event) = self.engine.sockets_mut().next_event() {
            match event {
                Event::Readable(id, news) => self.engine.readable(id, news),
                Event::Writable(id) => self.engine.writable(id),
                Event::Connected(id, socket) => self.engine.connected(id, socket),
                Event::Error(id) => {
                    if !self.engine.freed(id) {
                        self.engine.readable(id, News::HungUp);
                    }
                }
                Event::Open { port, kind, cid, socket } => {
                    if self.gate == Gate::Open {
                        self.open(port, kind, cid, socket);
                    } else if self.waiting.len() < self.limits.handshakes {
                        self.waiting.push_back((port, kind, cid, socket));
                    }
                }
                // The time is looked at with every turn.
                Event::Tick => {}
            }
        }
    }
}

impl Server {
    /// Waits until the kernel reads nothing of the guest's memory any more. Who has not acknowledged by the deadline what
    /// the kernel may have to send again is reset.
    ///
    /// # Errors
    /// That the kernel still reads something.
    fn await_loans(&mut self, deadline: Instant) -> Result<(), BackendError> {
        // Of what is held, a part may have been lent.
        self.engine.let_go(None);
        if self.all_free(deadline) {
            return Ok(());
        }
        let connections = self.engine.take_back();
        tracing::warn!(connections, "reset: what was sent on them was not acknowledged, and the ring stops");
        if self.all_free(deadline + RESET_WITHIN) {
            return Ok(());
        }
        let packets = self.engine.lent();
        Err(BackendError::new(format!(
            "the kernel still sends {packets} of its packets, whose connections were reset"
        )))
    }

    fn all_free(&mut self, deadline: Instant) -> bool {
        loop {
            let lenders: Vec<_> = self.engine.lenders().map(|(id, _)| id).collect();
            for id in &lenders {
                self.engine.freed(*id);
            }
            if self.engine.lent() == 0 {
                return true;
            }
            if !wait_for_freed(self.engine.lenders().map(|(_, socket)| socket), deadline) {
                return false;
            }
        }
    }
}

impl Worker for Server {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        self.hear();
        self.pass(queues);
        let mut again = false;
        if let Some(ring) = queues.ring(EVENT) {
            // Its buffers are of use only for an event.
            ring.set_notification(self.gate != Gate::Open);
        }
        if let Some(ring) = queues.ring(TRANSMIT) {
            again |= self.engine.take(ring);
        }
        let full = !self.engine.table().takes();
        if let Some(ring) = queues.ring(RECEIVE) {
            again |= self.engine.fill(ring);
        }
        // What the guest could not say because it heard nothing can be said now.
        again |= full && self.engine.table().takes();
        if self.desk.is_wanted() {
            self.write_down();
        }
        let wanted = self.engine.needs_time() || self.gate != Gate::Open;
        self.engine.sockets_mut().keep_time(wanted);
        again |= self.pulse.should_poll(self.engine.traffic(), Instant::now);
        if again { Next::Again } else { Next::Wait }
    }

    fn started(&mut self, queue: usize, fresh: bool) {
        let arrived = self.passage.arrived.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(State { next_port, connections, .. }) = arrived {
            tracing::info!(connections = connections.len(), "the guest has come from elsewhere");
            self.engine.arrive(next_port, &connections);
            self.gate = Gate::Tell(self.engine.sockets_mut().look_at_clock());
            return;
        }
        if queue != RECEIVE && queue != TRANSMIT {
            return;
        }
        // A driver that goes on where another device left it has connections that do not exist any more.
        let begins = !std::mem::replace(&mut self.served[queue], true);
        if begins && !fresh && self.gate == Gate::Open {
            self.gate = Gate::Tell(self.engine.sockets_mut().look_at_clock());
        }
        // Both queues of a new driver begin anew, one after the other; what is made between the two is its own.
        let other = std::mem::take(&mut self.fresh[TRANSMIT - queue]);
        self.fresh[queue] = fresh && !other;
        if fresh && !other && !self.engine.table().is_empty() {
            tracing::info!("the guest's driver begins anew; its connections are gone");
            self.engine.restart();
        }
    }

    fn poll<'w>(&'w self, fds: &mut PollSet<'w>) {
        fds.add(self.engine.sockets(), PollFlags::IN);
    }

    fn on_ready(&mut self, events: &[PollFlags]) {
        self.news = events.iter().any(|events| !events.is_empty());
    }

    fn drain(
        &mut self,
        queue: usize,
        queues: &mut Queues<'_>,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        if queue == TRANSMIT {
            self.await_loans(deadline)?;
            self.engine.let_go(queues.ring(TRANSMIT));
        }
        Ok(())
    }

    fn release(&mut self, queues: &mut Queues<'_>, _: Instant) -> Result<(), BackendError> {
        // What is lent is pinned by the kernel, page by page, and needs no mapping of ours.
        self.engine.let_go(queues.started_ring(TRANSMIT));
        self.engine.clear_idle();
        Ok(())
    }
}
