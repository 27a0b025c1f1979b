//! The device of one guest: its queues, its configuration, and its worker.

mod unconnected;
mod worker;

use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use towline_channel::Cancel;
use towline_vhost_user::{BackendError, Device, ProtocolFeatures, Worker};

use self::worker::{SessionUpdates, VsockWorker};
use crate::connection::ConnectionLimits;
use crate::engine::Engine;
use crate::host::{Host, HostConfig, HostListener, Listening};
use crate::local_guests::{AcceptQueue, LocalGuests};
use crate::lock::lock;
use crate::packet::SocketType;
use crate::report::SharedReport;
use crate::rules::{ForwardingRule, HostAddress};
use crate::state::State;
use crate::statistics::VsockReport;

/// `VIRTIO_VSOCK_F_SEQPACKET`.
const F_SEQPACKET: u64 = 1 << 1;
/// Number of queues, including the event queue, which QEMU handles itself and other frontends leave to the
/// device.
pub const QUEUES: usize = 3;
/// Time limit of the worker to report the connections of a guest that is migrated: without them the migration
/// fails, and the thread of a busy host may be late.
const SAVE_TIMEOUT: Duration = Duration::from_secs(4);
/// Prefix of [`Device::migration_version`], before the CID: the format of the state.
const VERSION: &str = "vsock 1 seqpacket cid ";

/// Settings of a device.
#[derive(Debug, Clone)]
pub struct Settings {
    /// CID of the guest.
    pub cid: u64,
    /// Unix socket where clients send `CONNECT`. With `_PORT` appended, the destination of the guest's
    /// connections.
    pub uds: Option<PathBuf>,
    /// The same for `SOCK_SEQPACKET`.
    pub uds_seqpacket: Option<PathBuf>,
    /// Forwarding rules.
    pub rules: Vec<ForwardingRule>,
    /// Groups of the guest. Guests of the same process with a group in common reach each other by their CIDs.
    pub groups: Vec<String>,
    /// Limits of connections and memory.
    pub limits: ConnectionLimits,
    /// Maximum time of busy-polling with request/response traffic; 0 disables it.
    pub busy_poll: Duration,
}

/// Error of the creation of a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// An address of a listener is not available.
    #[error("cannot listen on {address}: {source}; {}", listen_remedy(source))]
    Listen { address: String, source: io::Error },
    /// Another guest has the same CID.
    #[error("CID {cid} is used by another guest; give each guest its own CID")]
    Cid { cid: u64 },
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
    config: Arc<HostConfig>,
    report: Arc<SharedReport>,
    updates: Arc<SessionUpdates>,
}

impl Vsock {
    /// Creates a device and its listeners. Clients wait in their backlogs until the guest is connected.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(settings: Settings, local_guests: &Arc<LocalGuests>) -> Result<Self, DeviceError> {
        let Settings { cid, limits, busy_poll, .. } = settings;
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
            cid,
            local_guests: Arc::clone(local_guests),
            accept_queue,
            handshakes_max: limits.handshakes,
        });
        let report = Arc::default();
        let updates = Arc::new(SessionUpdates::new()?);
        Ok(Self { cid, limits, busy_poll, config, report, updates })
    }

    /// Returns the statistics so far.
    pub fn report(&self) -> VsockReport {
        self.report.request(|| self.config.accept_queue.wake())
    }

    /// Serves the host's clients while no frontend is connected, until cancelled: they wait for the guest as
    /// they do afterwards, for [`CONNECT_TIMEOUT_MS`](crate::CONNECT_TIMEOUT_MS) at most.
    ///
    /// While the process has no descriptors for that, the clients wait in the backlogs of the listeners.
    ///
    /// # Errors
    /// Those of `poll`.
    pub fn serve_unconnected(&self, cancel: &Cancel) -> io::Result<()> {
        let create = || {
            let worker = self.new_worker()?;
            let events = worker.as_fd().try_clone_to_owned()?;
            Ok((worker, events))
        };
        let failed = |error: io::Error| {
            tracing::warn!(%error, cid = self.cid, "clients that come before a frontend wait; trying again every second");
        };
        self.updates.unconnected.serve(cancel, create, VsockWorker::run_unconnected, failed)
    }

    fn new_worker(&self) -> io::Result<VsockWorker> {
        let host = Host::new(Arc::clone(&self.config))?;
        let engine = Engine::new(self.cid, self.limits, port_seed(), host);
        let (report, updates) = (Arc::clone(&self.report), Arc::clone(&self.updates));
        Ok(VsockWorker::new(engine, self.limits, self.busy_poll, report, updates))
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
        // A former frontend may have loaded a state and ended before its guest ran.
        *lock(&self.updates.loaded) = None;
        let worker = match self.updates.unconnected.take() {
            Some(worker) => worker,
            None => self.new_worker()?,
        };
        Ok(Box::new(worker.connected()))
    }

    fn config(&self) -> Vec<u8> {
        self.updates.config_read.store(true, Ordering::Relaxed);
        self.cid.to_le_bytes().to_vec()
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        // An earlier report would omit connections, which would then hang at the destination.
        let report = self.report.request_current(SAVE_TIMEOUT, || self.config.accept_queue.wake());
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

    fn migration_version(&self) -> Result<String, BackendError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> Vsock {
        let settings = Settings {
            cid: 7,
            uds: None,
            uds_seqpacket: None,
            rules: Vec::new(),
            groups: Vec::new(),
            limits: ConnectionLimits::default(),
            busy_poll: Duration::ZERO,
        };
        Vsock::new(settings, &Arc::default()).unwrap()
    }

    #[test]
    fn a_state_is_saved_although_the_worker_is_late() {
        let vsock = device();
        vsock.report.add_worker();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !vsock.report.accept_request() {
                    std::thread::yield_now();
                }
                // Longer than a report that is only read may take.
                std::thread::sleep(Duration::from_millis(1500));
                vsock.report.publish(VsockReport::default());
            });
            let state = vsock.save().unwrap();
            assert!(State::decode(&state, 7).unwrap().connections.is_empty());
        });
    }

    #[test]
    fn a_state_that_was_loaded_is_not_that_of_the_next_frontends_guest() {
        let vsock = device();
        drop(vsock.worker(0).unwrap());
        let state = State { cid: 7, next_port: 1 << 30, connections: Vec::new() };
        vsock.load(&state.encode()).unwrap();
        let mut worker = vsock.worker(0).unwrap();
        vsock.load(&state.encode()).unwrap();
        worker.started(0, false);
        assert!(lock(&vsock.updates.loaded).is_none(), "its own frontend took its state");
        vsock.load(&state.encode()).unwrap();
        drop(worker);
        let _worker = vsock.worker(0).unwrap();
        assert!(lock(&vsock.updates.loaded).is_none(), "that of the former frontend");
    }
}
