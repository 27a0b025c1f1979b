//! Requests: a task with its options, and the options of the transfer.
//!
//! Each option belongs to the tasks that have it, so most impossible combinations cannot be expressed.
//! `validate` checks what depends on the two ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use towline_channel::{Address, Listener, OneTimeCredentials, TlsClient, TlsServer};
use towline_migration::{Compression, Tuning, ZeroCopySend};
use towline_qmp::commands::Capability;

use crate::in_place::PreparedDisks;

/// A copy, a move, a snapshot or a postcopy. The help of the command line describes the options.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// The task.
    pub task: Task,
    /// Compression of lanes, the same at both ends. A relay decompresses and compresses again.
    pub compression: Compression,
    /// Use of `MSG_ZEROCOPY` on lanes.
    pub zero_copy_send: ZeroCopySend,
    /// TLS on streams; `None` for none.
    pub tls: Option<Tls>,
    /// Name of the other end of the stream in records, if its address is not what its user has given.
    pub peer_name: Option<String>,
    /// The end of the stream that connects to the other one.
    pub connects: ConnectingEnd,
    /// Maximum downtime.
    pub downtime_limit: Duration,
    /// Compare an image with its manifest while it is read.
    pub verify: bool,
    /// Streams have a return path. Without one a failure at the other end is not noticed.
    pub return_path: bool,
    /// Stream an image even if QEMU could load the file itself.
    pub stream: bool,
    /// Refuse a destination that does not map the image's memory already, or a source that is stored while it runs on and does not run on
    /// an image, instead of sending it.
    pub requires_mapped_memory: bool,
    /// The QEMUs of two hosts are connected to each other; `None`: the guest goes through both towlines.
    pub direct: Option<Direct>,
    /// Disks that the guest writes to.
    pub disks: WritableDisks,
    /// Replace an existing image of the same name.
    pub overwrite: bool,
    /// Timeout for the other end to connect, or to be connected to.
    pub connect_timeout: Duration,
    /// Timeout for a source to connect where this process listens.
    pub accept_timeout: Duration,
    /// Silence of the other end of a `tcp:` stream after which it is taken for lost.
    pub peer_timeout: Duration,
    /// Time for which the ends of a guest that runs before all of its memory is there are connected again after they were lost.
    pub recover_timeout: Duration,
    /// Use of the generations of a guest that several hosts run in turn.
    pub generations: GenerationUse,
    /// Changes of rate and downtime while the copy runs.
    pub tuning: Tuning,
}

/// Capabilities that the source's user may have set, which the destination needs then as well.
pub(crate) const SHARED_CAPABILITIES: [Capability; 2] =
    [Capability::DIRTY_BITMAPS, Capability::SWITCHOVER_ACK];

/// Options of a guest that goes from QEMU to QEMU, the same at both ends.
#[derive(Debug, Clone)]
pub struct Direct {
    /// Encrypted, the stream is forwarded by both towlines; else the QEMUs are connected to each other.
    pub is_encrypted: bool,
    /// Capabilities that the source has set, and that its destination needs as well.
    pub capabilities: Vec<Capability>,
}

impl Direct {
    /// Returns true if the guest may be switched to postcopy.
    pub(crate) fn permits_postcopy(&self) -> bool {
        self.capabilities.contains(&Capability::POSTCOPY_RAM)
    }
}

/// The end of a stream that connects; the other one listens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ConnectingEnd {
    /// As QEMU's source does.
    #[default]
    Source,
    /// The destination; both ends are towlines.
    Destination,
}

/// Use of the generations of a source that has some. Others need none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GenerationUse {
    /// Its guest stays: what looks after it would start it a second time.
    #[default]
    Refused,
    /// The source has the highest one, and its guest runs elsewhere only in the next.
    TakesPart,
    /// Its guest is stored by what looks after it.
    Stored,
}

/// Task of a command.
#[derive(Debug, Clone)]
pub enum Task {
    /// The guest is copied and stays at its source: paused, or stored.
    Copy {
        /// Options of the transfer.
        transfer: TransferOptions,
        /// The guest at both ends afterwards.
        after: AfterCopy,
        /// Store only the difference to this image.
        base: Option<PathBuf>,
    },
    /// The guest is copied, and the QEMU at its source is ended when it is at its destination.
    Move {
        /// Options of the transfer.
        transfer: TransferOptions,
        /// Run state at a `qmp:` destination; `None` keeps the guest's.
        run: Option<bool>,
        /// Detach a vhost-user-vsock before the move, and attach it again at the `qmp:` destination.
        detach_vsock: bool,
        /// Devices to compare first; see [`Devices`].
        devices: Devices,
    },
    /// The guest continues in another QEMU of this host, in the same memory, and the QEMU at its source is
    /// ended.
    Upgrade {
        /// Detach a vhost-user-vsock before, and attach it again in the new QEMU.
        detach_vsock: bool,
        /// Memory that both QEMUs cannot map.
        memory: UpgradeMemory,
    },
    /// An image of this instant is stored while the guest of a `qmp:` source runs (QEMU's
    /// background-snapshot), over a single channel without a rate limit.
    Snapshot {
        /// Store only the difference to this image.
        base: Option<PathBuf>,
    },
    /// Postcopy: the destination runs the guest at once, and its memory follows.
    Postcopy {
        /// Options of the transfer.
        transfer: TransferOptions,
        /// Beginning of the postcopy.
        start: PostcopyStart,
        /// Channel of requested pages.
        requested_pages: RequestedPages,
    },
}

/// The guest at the ends of a copy afterwards: it runs at one of them at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterCopy {
    /// A `qmp:` source stays paused.
    SourcePaused {
        /// Run state at a `qmp:` destination; `None` keeps the guest's.
        run: Option<bool>,
    },
    /// A `qmp:` source is resumed; also before, if an earlier copy left it paused. A `qmp:` destination stays
    /// paused.
    SourceResumed,
}

/// Disks that a guest writes to when it is stored and runs on, or goes to another host.
#[derive(Debug, Clone, Default)]
pub enum WritableDisks {
    /// They do not go with it: a guest that is stored and runs on is refused, since its image could be run on a disk of another instant.
    #[default]
    Refused,
    /// They are not part of the image.
    LeftOut,
    /// They stay as they are at the guest's instant, and it continues in these overlays.
    Kept(PreparedDisks),
    /// They are copied to a towline that listens for them, with the keys of the stream, while the guest runs.
    Mirrored {
        /// Where it listens.
        to: Address,
        /// True if they are compared with their copies.
        compare: bool,
    },
    /// They are written by what connects to a listener, until the guest has arrived.
    Exported {
        /// The listener.
        listener: Arc<Listener>,
    },
}

/// Memory of a guest whose QEMU is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpgradeMemory {
    /// Memory stays in place: both QEMUs map it.
    InPlace,
    /// Memory is copied.
    Copied,
}

/// towline's devices that serve the guest, by their control sockets: at the source and at the destination.
/// The move is refused if a destination's device could not continue with the source's state.
pub type Devices = Vec<(PathBuf, PathBuf)>;

/// Beginning of a postcopy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PostcopyStart {
    /// The guest stays at its source: paused, or stored.
    Copy {
        /// Run state at the destination; `None` keeps the guest's.
        run: Option<bool>,
    },
    /// The QEMU at its source is ended.
    Move {
        /// Run state at the destination; `None` keeps the guest's.
        run: Option<bool>,
        /// Devices to compare first; see [`Devices`].
        devices: Devices,
        /// Moment of the switch.
        switch: PostcopySwitch,
    },
    /// The guest already runs at its destination, and its postcopy was interrupted.
    Recover,
}

/// Moment at which a running guest is switched to postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostcopySwitch {
    /// After one pass over its memory.
    FirstPass,
    /// Once it was found not to converge.
    IfNotConverging,
}

/// Channel of the pages that the destination of a postcopy requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedPages {
    /// Among the other pages.
    MainChannel,
    /// A separate channel (QEMU's postcopy-preempt).
    PreemptChannel,
}

/// Options of the transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferOptions {
    /// Number of lanes; 0 disables them. `None`: 4 if QMP can set them at both ends, else 0.
    pub multifd_channels: Option<usize>,
    /// Maximum rate in bytes per second; `None` for unlimited.
    pub max_bandwidth: Option<u64>,
    /// Use of a `qmp:` source's auto-converge.
    pub throttling: Throttling,
}

/// Throttling of a guest that writes too fast (QEMU's auto-converge).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Throttling {
    /// None but QEMU's own setting.
    #[default]
    Unchanged,
    /// Once it was found not to converge.
    IfNotConverging,
    /// Whenever it writes half as fast as it is sent.
    Always,
}

/// TLS on streams.
#[derive(Debug, Clone)]
pub enum Tls {
    /// With certificates of this host.
    Files {
        /// Directory with the file names of QEMU's `tls-creds-x509`.
        credentials: PathBuf,
        /// Host name in the server's certificate; `None` for the host of its address.
        hostname: Option<String>,
    },
    /// With keys that both ends made for this copy.
    OneTime(OneTimeCredentials),
}

impl Tls {
    /// Credentials for a listener.
    pub(crate) fn server(&self) -> towline_channel::Result<TlsServer> {
        match self {
            Self::Files { credentials, .. } => TlsServer::load(credentials),
            Self::OneTime(credentials) => TlsServer::one_time(credentials),
        }
    }

    /// Credentials for a connection.
    pub(crate) fn client(&self) -> towline_channel::Result<TlsClient> {
        match self {
            Self::Files { credentials, hostname } => TlsClient::load(credentials, hostname.as_deref()),
            Self::OneTime(credentials) => TlsClient::one_time(credentials),
        }
    }

    /// Host name that was given for the server's certificate.
    pub(crate) fn hostname(&self) -> Option<&str> {
        match self {
            Self::Files { hostname, .. } => hostname.as_deref(),
            Self::OneTime(_) => None,
        }
    }
}

/// Options of a postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PostcopyOptions {
    pub(crate) requested_pages: RequestedPages,
    pub(crate) recover: bool,
    pub(crate) switch: PostcopySwitch,
}

impl Default for CopyRequest {
    fn default() -> Self {
        Self::new(Task::default())
    }
}

impl Default for AfterCopy {
    fn default() -> Self {
        Self::SourcePaused { run: None }
    }
}

impl Default for Task {
    fn default() -> Self {
        Self::Copy { transfer: TransferOptions::default(), after: AfterCopy::default(), base: None }
    }
}

impl CopyRequest {
    /// A request for this task, with the defaults of the command line.
    pub fn new(task: Task) -> Self {
        Self {
            task,
            compression: Compression::None,
            zero_copy_send: ZeroCopySend::Auto,
            tls: None,
            peer_name: None,
            connects: ConnectingEnd::Source,
            downtime_limit: Duration::from_millis(300),
            verify: false,
            return_path: true,
            stream: false,
            requires_mapped_memory: false,
            direct: None,
            disks: WritableDisks::default(),
            overwrite: false,
            connect_timeout: Duration::from_secs(10),
            accept_timeout: Duration::from_secs(600),
            peer_timeout: towline_channel::PEER_TIMEOUT,
            recover_timeout: Duration::from_secs(300),
            generations: GenerationUse::default(),
            tuning: Tuning::default(),
        }
    }

    /// Options of the transfer; a background snapshot has none.
    pub(crate) fn transfer_options(&self) -> TransferOptions {
        match &self.task {
            Task::Copy { transfer, .. } | Task::Move { transfer, .. } | Task::Postcopy { transfer, .. } => {
                *transfer
            }
            // What is left to be sent is little.
            Task::Upgrade { .. } => {
                TransferOptions { multifd_channels: Some(0), ..TransferOptions::default() }
            }
            Task::Snapshot { .. } => TransferOptions::default(),
        }
    }

    /// Requested run state at the destination; `None` keeps the guest's.
    pub(crate) fn run(&self) -> Option<bool> {
        match &self.task {
            Task::Copy { after: AfterCopy::SourceResumed, .. } => Some(false),
            Task::Copy { after: AfterCopy::SourcePaused { run }, .. }
            | Task::Move { run, .. }
            | Task::Postcopy {
                start: PostcopyStart::Copy { run } | PostcopyStart::Move { run, .. }, ..
            } => *run,
            Task::Postcopy { start: PostcopyStart::Recover, .. }
            | Task::Snapshot { .. }
            | Task::Upgrade { .. } => None,
        }
    }

    /// Returns true if a guest that an earlier copy paused is resumed, before and after this copy.
    pub fn resumes(&self) -> bool {
        matches!(self.task, Task::Copy { after: AfterCopy::SourceResumed, .. })
    }

    /// Returns true if the QEMU at the source is ended.
    pub(crate) fn ends_source(&self) -> bool {
        matches!(
            self.task,
            Task::Move { .. }
                | Task::Upgrade { .. }
                | Task::Postcopy { start: PostcopyStart::Move { .. }, .. }
        )
    }

    /// Returns true if the source leaves out memory that is shared, and the destination has it.
    pub(crate) fn leaves_out_shared_memory(&self) -> bool {
        matches!(self.task, Task::Upgrade { memory: UpgradeMemory::InPlace, .. })
    }

    /// Returns true if the guest's QEMU is replaced.
    pub(crate) fn is_upgrade(&self) -> bool {
        matches!(self.task, Task::Upgrade { .. })
    }

    /// Returns true if devices that QEMU does not migrate are detached.
    pub(crate) fn detaches_vsock(&self) -> bool {
        matches!(self.task, Task::Move { detach_vsock: true, .. } | Task::Upgrade { detach_vsock: true, .. })
    }

    /// Returns true for an image of this instant.
    pub(crate) fn is_snapshot(&self) -> bool {
        matches!(self.task, Task::Snapshot { .. })
    }

    /// Devices that are compared first.
    pub(crate) fn devices(&self) -> &[(PathBuf, PathBuf)] {
        match &self.task {
            Task::Move { devices, .. }
            | Task::Postcopy { start: PostcopyStart::Move { devices, .. }, .. } => devices,
            _ => &[],
        }
    }

    /// The base image of an incremental image.
    pub fn base(&self) -> Option<&Path> {
        match &self.task {
            Task::Copy { base, .. } | Task::Snapshot { base } => base.as_deref(),
            Task::Move { .. } | Task::Upgrade { .. } | Task::Postcopy { .. } => None,
        }
    }

    /// Returns true if the guest runs before its memory has arrived.
    pub fn is_postcopy(&self) -> bool {
        matches!(self.task, Task::Postcopy { .. })
    }

    /// Options of a postcopy; `None` for other tasks.
    pub(crate) fn postcopy(&self) -> Option<PostcopyOptions> {
        match &self.task {
            Task::Postcopy { start, requested_pages, .. } => Some(PostcopyOptions {
                requested_pages: *requested_pages,
                recover: *start == PostcopyStart::Recover,
                switch: match start {
                    PostcopyStart::Move { switch, .. } => *switch,
                    _ => PostcopySwitch::FirstPass,
                },
            }),
            _ => None,
        }
    }
}
