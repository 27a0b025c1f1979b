//! The device of one guest: its queues, its context, and the thread that serves them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use towline_vhost_user::{Device, Next, ProtocolFeatures, Queues, Refusal, Worker};

use crate::engine::Engine;
use crate::host::{Ears, Event, Host, Listening};
use crate::packet::Kind;
use crate::report::{Desk, Report};
use crate::rules::{Place, Rule};
use crate::siblings::{Mailbox, Siblings};
use crate::sockets::Sockets as _;
use crate::table::Limits;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// `VIRTIO_VSOCK_F_SEQPACKET`.
const F_SEQPACKET: u64 = 1 << 1;
/// With the event queue, which QEMU keeps to itself and others leave to the device.
const QUEUES: usize = 3;

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
}

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A place to listen at that cannot be had.
    #[error("nobody can listen at {place}: {source}")]
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
    ears: Arc<Ears>,
    desk: Arc<Desk>,
}

impl Vsock {
    /// Makes a device and listens at its places; whoever connects waits until there is a guest.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(settings: Settings, siblings: &Arc<Siblings>) -> Result<Self, DeviceError> {
        let Settings { cid, uds, uds_seqpacket, rules, groups, limits } = settings;
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
                };
                add(name, Listening::place(from), Some(*port))?;
            }
        }
        let mailbox = Arc::new(Mailbox::new()?);
        if !siblings.add(cid, groups, Arc::clone(&mailbox)) {
            return Err(DeviceError::Cid { cid });
        }
        // The guest's messages go where its bytes go, unless only messages have a place.
        let uds = uds.or(uds_seqpacket);
        let siblings = Arc::clone(siblings);
        let ears = Arc::new(Ears { listening, uds, rules, cid, siblings, mailbox });
        Ok(Self { cid, limits, ears, desk: Arc::default() })
    }

    /// What it has done so far.
    pub fn report(&self) -> Report {
        self.desk.ask(|| self.ears.mailbox.wake())
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
        ProtocolFeatures::CONFIG
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, Refusal> {
        let host = Host::new(Arc::clone(&self.ears))?;
        let engine = Engine::new(self.cid, self.limits, seed(), host);
        Ok(Box::new(Server { engine, desk: Arc::clone(&self.desk) }))
    }

    fn config(&self) -> Vec<u8> {
        self.cid.to_le_bytes().to_vec()
    }
}

/// Lets this process have as many descriptors as it may: each connection is one.
pub fn allow_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%errno, "the limit of open descriptors stays as it is");
    }
}

/// Where the host's ports begin: elsewhere with every process, so that none is used again at once.
fn seed() -> u32 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32
}

struct Server {
    engine: Engine<Host>,
    desk: Arc<Desk>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.write_down();
    }
}

impl Server {
    fn write_down(&self) {
        let connections = self.engine.connections().collect();
        self.desk.write(Report {
            statistics: self.engine.statistics(),
            kept: self.engine.kept(),
            connections,
        });
    }

    fn hear(&mut self) {
        self.engine.sockets_mut().look();
        while let Some(event) = self.engine.sockets_mut().next_event() {
            match event {
                Event::Readable(id, news) => self.engine.readable(id, news),
                Event::Writable(id) => self.engine.writable(id),
                Event::Connected(id, socket) => self.engine.connected(id, socket),
                Event::Open { port, kind, cid, socket } => {
                    if let Err(socket) = self.engine.open(port, kind, cid, socket) {
                        self.engine.sockets_mut().close(socket, true);
                    }
                }
                Event::Tick => {
                    let now = self.engine.sockets().now_ms();
                    self.engine.tick(now);
                }
            }
        }
    }
}

impl Worker for Server {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        self.hear();
        let mut again = false;
        if let Some(ring) = queues.ring(TRANSMIT) {
            again |= self.engine.take(ring);
        }
        if let Some(ring) = queues.ring(RECEIVE) {
            again |= self.engine.fill(ring);
        }
        if self.desk.is_wanted() {
            self.write_down();
        }
        let wanted = self.engine.needs_time();
        self.engine.sockets_mut().keep_time(wanted);
        if again { Next::Again } else { Next::Wait }
    }

    fn started(&mut self, queue: usize, fresh: bool) {
        if fresh && (queue == RECEIVE || queue == TRANSMIT) && !self.engine.table().is_empty() {
            tracing::info!("the guest's driver begins anew; its connections are gone");
            self.engine.restart();
        }
    }

    fn poll<'w>(&'w self, fds: &mut Vec<PollFd<'w>>) {
        fds.push(PollFd::new(self.engine.sockets(), PollFlags::IN));
    }

    fn drain(&mut self, queue: usize, queues: &mut Queues<'_>, _: std::time::Instant) {
        if queue == TRANSMIT {
            self.engine.let_go(queues.ring(TRANSMIT));
        }
    }
}
