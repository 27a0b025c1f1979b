//! The device of one guest: its queues, its configuration, and its worker.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use towline_channel::ZeroCopySend;
use towline_vhost_user::{
    AdaptivePoller, BackendError, Device, Next, PollFlags, PollSet, ProtocolFeatures, Queues, Worker,
};

use crate::ablation::Ablation;
use crate::connection::ConnectionLimits;
use crate::engine::{Engine, TICK_INTERVAL};
use crate::host::{
    Host, HostConfig, HostListener, Listening, SocketEvent, UnfinishedSends, wait_for_completions,
};
use crate::local_guests::{AcceptQueue, IncomingConnection, LocalGuests};
use crate::lock::lock;
use crate::packet::{HOST_CID, SocketType};
use crate::report::SharedReport;
use crate::rules::{ForwardingRule, HostAddress};
use crate::sockets::{CloseMode, Readiness, Sockets as _};
use crate::state::State;
use crate::statistics::VsockReport;
use crate::table::PacketLimit;
use crate::transport_reset::TransportReset;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
/// `VIRTIO_VSOCK_F_SEQPACKET`.
const F_SEQPACKET: u64 = 1 << 1;
/// Number of queues, including the event queue, which QEMU handles itself and other frontends leave to the device.
pub const QUEUES: usize = 3;
/// Prefix of [`Device::migration_version`], before the CID: the format of the state.
const VERSION: &str = "vsock 1 seqpacket cid ";
/// Time limit of zero-copy sends when the device ends.
const COMPLETIONS_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of passes over sockets and rings in a row while the worker busy-polls, before its thread looks after everything
/// else.
const POLLED_PASSES_MAX: usize = 64;
/// Time limit of the kernel for releasing the memory of connections that were reset.
const RESET_TIMEOUT: Duration = Duration::from_millis(100);

/// Settings of a device.
#[derive(Debug, Clone)]
pub struct Settings {
    /// CID of the guest.
    pub cid: u64,
    /// Unix socket where clients send `CONNECT`. With `_PORT` appended, the destination of the guest's connections.
    pub uds: Option<PathBuf>,
    /// The same for `SOCK_SEQPACKET`.
    pub uds_seqpacket: Option<PathBuf>,
    /// Forwarding rules.
    pub rules: Vec<ForwardingRule>,
    /// Groups of the guest. Guests of the same process with a group in common reach each other by their CIDs.
    pub groups: Vec<String>,
    /// Limits of connections and memory.
    pub limits: ConnectionLimits,
    /// Zero-copy sends of packets of 16 KiB and more to TCP.
    pub zero_copy_send: ZeroCopySend,
    /// Maximum time of busy-polling with request/response traffic; 0 disables it.
    pub busy_poll: Duration,
    /// True if the guest must not be migrated with the device.
    pub unmigratable: bool,
    /// Ideas of the design that measurements turn off; the default has all.
    pub ablation: Ablation,
}

/// Error of the creation of a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// An address of a listener is not available.
    #[error("cannot listen on {address}: {source}; {}", listen_remedy(source))]
    Listen {
        /// The address.
        address: String,
        /// Error of the call.
        source: io::Error,
    },
    /// Another guest has the same CID.
    #[error("CID {cid} is used by another guest; give each guest its own CID")]
    Cid {
        /// The CID.
        cid: u64,
    },
    /// A resource of the system is exhausted, such as descriptors.
    #[error("cannot create the device: {0}")]
    Io(#[from] io::Error),
}

fn listen_remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "create its directory, or correct the path",
        io::ErrorKind::PermissionDenied => "choose an address that this user may listen on",
        _ => "stop the process that listens there, or choose another address",
    }
}

/// A vsock device.
#[derive(Debug)]
pub struct Vsock {
    cid: u64,
    limits: ConnectionLimits,
    busy_poll: Duration,
    unmigratable: bool,
    ablation: Ablation,
    config: Arc<HostConfig>,
    report: Arc<SharedReport>,
    updates: Arc<SessionUpdates>,
}

/// Updates of the vhost-user session for the worker.
#[derive(Debug, Default)]
struct SessionUpdates {
    /// State of a migrated guest that was loaded and not applied yet.
    loaded: Mutex<Option<State>>,
    /// The driver has read its CID.
    config_read: AtomicBool,
    /// The driver has accepted `VIRTIO_VSOCK_F_SEQPACKET`.
    has_seqpacket: AtomicBool,
    /// Of former connections of the frontend.
    unfinished_sends: UnfinishedSends,
}

impl Vsock {
    /// Creates a device and its listeners. Clients wait in their backlogs until the guest is connected.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(settings: Settings, local_guests: &Arc<LocalGuests>) -> Result<Self, DeviceError> {
        let Settings { cid, limits, busy_poll, unmigratable, zero_copy_send, ablation, .. } = settings;
        let listeners = listeners(&settings)?;
        let accept_queue = Arc::new(AcceptQueue::new(limits.handshakes)?);
        if !local_guests.register(cid, settings.groups, Arc::clone(&accept_queue)) {
            return Err(DeviceError::Cid { cid });
        }
        let config = Arc::new(HostConfig {
            listeners,
            // Connections of both types lead there, unless there is a path for messages only.
            uds: settings.uds.or(settings.uds_seqpacket),
            rules: settings.rules,
            zero_copy_send,
            cid,
            local_guests: Arc::clone(local_guests),
            accept_queue,
            handshakes_max: limits.handshakes,
        });
        let (report, updates) = (Arc::default(), Arc::default());
        Ok(Self { cid, limits, busy_poll, unmigratable, ablation, config, report, updates })
    }

    /// Returns the statistics so far.
    pub fn report(&self) -> VsockReport {
        self.report.request(|| self.config.accept_queue.wake())
    }

    /// Returns true if a frontend is connected.
    pub fn is_served(&self) -> bool {
        self.report.has_worker()
    }
}

/// Opens the listeners of a device.
fn listeners(settings: &Settings) -> Result<Vec<Listening>, DeviceError> {
    let mut listeners = Vec::new();
    let mut add = |address: String, bound: io::Result<HostListener>, port| {
        let listener = bound.map_err(|source| DeviceError::Listen { address, source })?;
        listeners.push(Listening { listener, port });
        Ok::<_, DeviceError>(())
    };
    for (path, kind) in
        [(&settings.uds, SocketType::Stream), (&settings.uds_seqpacket, SocketType::Seqpacket)]
    {
        if let Some(path) = path {
            add(path.display().to_string(), HostListener::bind_unix(path, kind), None)?;
        }
    }
    for rule in &settings.rules {
        if let ForwardingRule::Listen { from, port } = rule {
            let address = match from {
                HostAddress::Tcp(address) => address.to_string(),
                HostAddress::Unix(path) => path.display().to_string(),
                HostAddress::Vsock { port, .. } => format!("AF_VSOCK port {port}"),
            };
            add(address, HostListener::bind(from), Some(*port))?;
        }
    }
    Ok(listeners)
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

    fn acknowledge(&self, features: u64) -> Result<(), BackendError> {
        self.updates.has_seqpacket.store(features & F_SEQPACKET != 0, Ordering::Relaxed);
        Ok(())
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::CONFIG | ProtocolFeatures::DEVICE_STATE
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        // The restarted ring may contain their chains again, which would be completed while the kernel still reads them.
        let unfinished = self.updates.unfinished_sends.pending();
        if unfinished > 0 {
            return Err(BackendError::temporary(format!(
                "the kernel still sends data of {unfinished} connections of the former session from the guest's memory; check the \
                 network to their peers"
            )));
        }
        let host = Host::new(Arc::clone(&self.config))?;
        self.report.add_worker();
        Ok(Box::new(VsockWorker {
            engine: Engine::new(self.cid, self.limits, port_seed(), host).with_ablation(self.ablation),
            limits: self.limits,
            report: Arc::clone(&self.report),
            updates: Arc::clone(&self.updates),
            transport_reset: TransportReset::default(),
            deferred: VecDeque::new(),
            queue_starts: [QueueStart::default(); 2],
            poller: AdaptivePoller::new(self.busy_poll),
            host_is_ready: true,
        }))
    }

    fn config(&self) -> Vec<u8> {
        self.updates.config_read.store(true, Ordering::Relaxed);
        self.cid.to_le_bytes().to_vec()
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        // An earlier report would omit connections, which would then hang at the destination.
        let report = self.report.request_current(|| self.config.accept_queue.wake());
        let report = report.ok_or_else(|| {
            BackendError::new("the device's thread is blocked and does not report its connections; try again")
        })?;
        let VsockReport { keys, next_port, .. } = report;
        Ok(State { cid: self.cid, next_port, connections: keys }.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), BackendError> {
        let state = State::decode(state, self.cid)?;
        *lock(&self.updates.loaded) = Some(state);
        Ok(())
    }

    fn is_migratable(&self) -> bool {
        !self.unmigratable
    }

    fn migration_version(&self) -> Result<String, BackendError> {
        if self.unmigratable {
            return Err(BackendError::new(
                "the device was started with --unmigratable: it cannot be migrated",
            ));
        }
        Ok(format!("{VERSION}{}", self.cid))
    }

    fn accepts(&self, source: &str) -> Result<(), BackendError> {
        let cid = source.strip_prefix(VERSION);
        let cid =
            cid.ok_or_else(|| BackendError::new(format!("`{source}`: expected `{VERSION}` and a CID")))?;
        if cid.parse() == Ok(self.cid) {
            return Ok(());
        }
        let own = self.cid;
        Err(BackendError::new(format!(
            "the guest has CID {cid}, this device has CID {own}; give both the same --cid"
        )))
    }
}

/// Raises the process's limit of descriptors to the hard limit: each connection needs one. Returns the limit.
pub fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%errno, "cannot raise the limit of descriptors");
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the first ephemeral port, which differs from process to process so that no port is reused at once.
fn port_seed() -> u32 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32
}

/// Start of a data queue, as far as it shows whether the driver is another one.
#[derive(Debug, Clone, Copy, Default)]
struct QueueStart {
    /// The queue was started before.
    was_started: bool,
    /// A new driver has started the queue, and not the other one yet.
    is_first_of_driver: bool,
}

struct VsockWorker {
    engine: Engine<Host>,
    limits: ConnectionLimits,
    report: Arc<SharedReport>,
    updates: Arc<SessionUpdates>,
    transport_reset: TransportReset,
    /// Connections that are opened after the transport reset.
    deferred: VecDeque<IncomingConnection>,
    /// Of the receive and the transmit queue.
    queue_starts: [QueueStart; 2],
    poller: AdaptivePoller,
    /// epoll has events of the host's side.
    host_is_ready: bool,
}

impl Drop for VsockWorker {
    fn drop(&mut self) {
        if let Err(reason) = self.finish_zero_copy(Instant::now() + COMPLETIONS_TIMEOUT) {
            tracing::error!(%reason, "device ends with zero-copy sends in flight");
            self.updates.unfinished_sends.add(self.engine.take_lingering());
        }
        self.publish_report();
        self.report.remove_worker();
    }
}

impl VsockWorker {
    fn publish_report(&self) {
        self.report.publish(VsockReport {
            statistics: self.engine.statistics(),
            buffered_bytes: self.engine.buffered_bytes(),
            keys: self.engine.keys(),
            next_port: self.engine.table().next_port(),
            connections: self.engine.connections().collect(),
        });
    }

    /// Opens a connection that a peer requests, or defers it until the transport reset is done.
    fn admit(&mut self, incoming: IncomingConnection) {
        if self.transport_reset.is_done() {
            self.open(incoming);
        } else if self.deferred.len() < self.limits.handshakes {
            self.deferred.push_back(incoming);
        }
    }

    fn open(&mut self, IncomingConnection { port, kind, cid, socket }: IncomingConnection) {
        let connections = self.limits.connections;
        let share = || self.engine.sockets().share_of_peer(connections);
        if cid != HOST_CID && self.engine.table().connections_initiated_by(cid) >= share() {
            self.engine.refuse(socket);
            return;
        }
        if let Err(socket) = self.engine.open(port, kind, cid, socket) {
            self.engine.sockets_mut().close(socket, CloseMode::Reset);
        }
    }

    /// Advances a transport reset, and opens the deferred connections when it is done.
    fn advance_transport_reset(&mut self, queues: &mut Queues<'_>) {
        if self.transport_reset.is_done() {
            return;
        }
        let now_ms = self.engine.sockets().now_ms();
        self.transport_reset.advance(queues.ring(EVENT), &self.updates.config_read, now_ms);
        if self.transport_reset.is_done() {
            for incoming in std::mem::take(&mut self.deferred) {
                self.open(incoming);
            }
        }
    }

    fn begin_transport_reset(&mut self) {
        let since_ms = self.engine.sockets_mut().read_clock();
        self.transport_reset = TransportReset::Pending { since_ms };
    }

    fn process_host_events(&mut self) {
        let now_ms = self.engine.sockets_mut().read_clock();
        self.engine.tick(now_ms);
        if std::mem::take(&mut self.host_is_ready) {
            self.engine.sockets_mut().poll();
        }
        while let Some(event) = self.engine.sockets_mut().next_event() {
            match event {
                SocketEvent::Readable(id, readiness) => self.engine.readable(id, readiness),
                SocketEvent::Writable(id) => self.engine.writable(id),
                SocketEvent::Connected(id, socket) => self.engine.connected(id, socket),
                SocketEvent::Error(id) => {
                    if !self.engine.reap_zero_copy_completions(id) {
                        self.engine.readable(id, Readiness::Closed);
                    }
                }
                SocketEvent::Incoming(incoming) => self.admit(incoming),
            }
        }
    }

    /// Waits until all zero-copy sends have completed. Connections whose peers have not acknowledged their data by the
    /// deadline are reset, because the guest may overwrite memory that the kernel would have to send again.
    ///
    /// # Errors
    /// The kernel still reads guest memory.
    fn finish_zero_copy(&mut self, deadline: Instant) -> Result<(), BackendError> {
        // A part of a retained chain may have been sent without a copy.
        self.engine.complete_retained(None);
        if self.wait_for_zero_copy(deadline) {
            return Ok(());
        }
        let connections = self.engine.abort_zero_copy();
        tracing::warn!(connections, "reset connections with unacknowledged zero-copy sends");
        if self.wait_for_zero_copy(deadline + RESET_TIMEOUT) {
            return Ok(());
        }
        let packets = self.engine.zero_copy_in_flight();
        Err(BackendError::new(format!(
            "the kernel still reads {packets} packets of connections that were reset"
        )))
    }

    /// Returns true if all zero-copy sends have completed by the deadline.
    fn wait_for_zero_copy(&mut self, deadline: Instant) -> bool {
        loop {
            let ids: Vec<_> = self.engine.zero_copy_sockets().map(|(id, _)| id).collect();
            for id in ids {
                self.engine.reap_zero_copy_completions(id);
            }
            if self.engine.zero_copy_in_flight() == 0 {
                return true;
            }
            let sockets = self.engine.zero_copy_sockets().map(|(_, socket)| socket);
            if !wait_for_completions(sockets, deadline) {
                return false;
            }
        }
    }
}

/// Next step of a worker after a pass over its sockets and rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterPass {
    /// It returns to its thread.
    Return(Next),
    /// It busy-polls: another pass.
    Poll,
}

impl VsockWorker {
    /// While the worker busy-polls for the guest's response, looks for it in the ring first, which takes no system call. Returns
    /// true if there was one; then it is the host's turn in the next pass.
    fn has_response(&mut self, queues: &mut Queues<'_>) -> bool {
        if !self.poller.awaits_guest() {
            return false;
        }
        let packets = self.engine.traffic().from_guest;
        if let Some(ring) = queues.ring(TRANSMIT) {
            self.engine.process_tx(ring);
        }
        self.engine.traffic().from_guest != packets
    }

    /// Processes events of the host and both rings once.
    fn pass(&mut self, queues: &mut Queues<'_>) -> AfterPass {
        if !self.has_response(queues) {
            self.process_host_events();
        }
        self.advance_transport_reset(queues);
        let is_reset_done = self.transport_reset.is_done();
        let mut again = false;
        if let Some(ring) = queues.ring(EVENT) {
            // New buffers matter only while an event is to be sent.
            ring.set_notification(!is_reset_done);
        }
        if let Some(ring) = queues.ring(TRANSMIT) {
            again |= self.engine.process_tx(ring) == Next::Again;
        }
        let was_full = !self.engine.table().accepts_packets();
        if let Some(ring) = queues.ring(RECEIVE) {
            again |= self.engine.process_rx(ring) == Next::Again;
        }
        // Packets that waited for space for resets can be processed now.
        again |= was_full && self.engine.table().accepts_packets();
        if self.report.accept_request() {
            self.publish_report();
        }
        let interval = self.engine.tick_interval().or((!is_reset_done).then_some(TICK_INTERVAL));
        self.engine.sockets_mut().set_timer(interval);
        let polls = self.poller.should_poll(self.engine.traffic(), Instant::now);
        if polls && !again {
            return AfterPass::Poll;
        }
        self.engine.sockets_mut().watch_handshakes();
        AfterPass::Return(if again { Next::Again } else { Next::Wait })
    }

    /// Publishes what a pass has completed. The guest is not interrupted for the ends of connections alone: while the worker
    /// busy-polls, a packet that a program waits for follows at once, or the thread notifies the guest.
    fn publish(queues: &mut Queues<'_>, awaited: Awaited) {
        if let Some(ring) = queues.ring(TRANSMIT) {
            ring.publish();
        }
        if let Some(ring) = queues.ring(RECEIVE) {
            match awaited {
                Awaited::Yes => {
                    ring.publish();
                }
                Awaited::No => ring.publish_quietly(),
            }
        }
    }
}

/// Urgency of the packets of a pass: programs of the guest may wait for them, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Yes,
    No,
}

impl Worker for VsockWorker {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        for _ in 0..POLLED_PASSES_MAX {
            let packets = self.engine.traffic().to_guest;
            if let AfterPass::Return(next) = self.pass(queues) {
                return next;
            }
            let awaited = if self.engine.traffic().to_guest == packets { Awaited::No } else { Awaited::Yes };
            Self::publish(queues, awaited);
            // A call to epoll costs less than the thread's own wait for all descriptors.
            self.host_is_ready = true;
        }
        self.engine.sockets_mut().watch_handshakes();
        Next::Again
    }

    fn started(&mut self, queue: usize, fresh: bool) {
        let loaded = lock(&self.updates.loaded).take();
        if let Some(State { next_port, connections, .. }) = loaded {
            tracing::info!(connections = connections.len(), "took over a migrated guest");
            self.engine.reset_all_connections(next_port, &connections);
            self.begin_transport_reset();
            return;
        }
        if queue != RECEIVE && queue != TRANSMIT {
            return;
        }
        // A driver that continues where another device has stopped has connections that do not exist any more.
        let was_started = std::mem::replace(&mut self.queue_starts[queue].was_started, true);
        if fresh || !was_started {
            // Linux has had seqpacket for longer than a limit of packets, and without it some frontends do not offer it.
            let has_seqpacket = self.updates.has_seqpacket.load(Ordering::Relaxed);
            self.engine.set_packet_limit(if has_seqpacket { PacketLimit::Kept } else { PacketLimit::Probed });
        }
        if !was_started && !fresh && self.transport_reset.is_done() {
            self.begin_transport_reset();
        }
        // A new driver starts both queues, one after the other; connections that are opened in between are its own.
        let other = &mut self.queue_starts[TRANSMIT - queue];
        let is_second = std::mem::take(&mut other.is_first_of_driver);
        let is_first = fresh && !is_second;
        self.queue_starts[queue].is_first_of_driver = is_first;
        if is_first && !self.engine.table().is_empty() {
            tracing::info!("closed all connections: the guest has a new driver");
            self.engine.drop_all_connections();
        }
    }

    fn poll<'w>(&'w self, fds: &mut PollSet<'w>) {
        fds.add(self.engine.sockets(), PollFlags::IN);
    }

    fn on_ready(&mut self, events: &[PollFlags]) {
        self.host_is_ready = events.iter().any(|events| !events.is_empty());
    }

    fn drain(
        &mut self,
        queue: usize,
        queues: &mut Queues<'_>,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        if queue == TRANSMIT {
            self.finish_zero_copy(deadline)?;
            self.engine.complete_retained(queues.ring(TRANSMIT));
        }
        Ok(())
    }

    fn release(&mut self, queues: &mut Queues<'_>, _: Instant) -> Result<(), BackendError> {
        // The kernel has pinned the pages of zero-copy sends, so they need no mapping.
        self.engine.complete_retained(queues.started_ring(TRANSMIT));
        self.engine.drop_idle_batches();
        Ok(())
    }
}
