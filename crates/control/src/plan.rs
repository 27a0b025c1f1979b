//! The plans: what a copy of a guest consists of, from the first question to a guest that is safe.
//!
//! ```text
//!   prepare source ─► prepare destination ─► fits? ─► start ─► watch (engine in threads) ─► cut over ─► release
//!        │undo               │undo                      │undo        │undo                     │
//!        └───────────────────┴──────────────────────────┴────────────┘      from here on the destination may run
//! ```
//!
//! Whatever fails before the cut-over leaves the guest where it was: the source runs on if it ran. A `qmp:` destination is
//! told `stop` while it waits, so that it loads and stays paused, and gets `cont` only when its source says `completed`
//! (an image has no say: it gets it when everything is loaded). So there are never two guests that run.
//!
//! What it is not: it reads no command line and prints nothing; [`Observer`] hears how it goes.

mod blame;
mod clones;
mod compression;
mod converge;
mod copy;
mod destination;
mod error;
mod fit;
mod hand_over;
mod local;
mod memory;
mod postcopy;
mod private_dir;
mod receive;
mod restore;
mod source;
#[cfg(feature = "store")]
mod store;
mod supervise;
mod survey;
mod target;
mod tls;
mod vsock;
mod zero_copy;

use std::path::PathBuf;
use std::time::Duration;

use towline_channel::Address;
use towline_image::{Increment, Uploaded};
use towline_migration::{Compression, LaneSends, Snapshot, Tuning, ZeroCopySend, synthetic};

pub use clones::{CLONES_AT_ONCE, CLONES_MAX, Outcome, Recipient, copy_to_all};
pub use copy::{copy, survey};
pub use error::{Error, Failure, GuestState};
pub use memory::MemoryRoom;
pub use postcopy::{PostcopyOptions, PostcopyReport};
pub use survey::{Seen, Survey};
pub use tls::Tls;

/// Where a guest comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A running QEMU, by its QMP socket.
    Qmp(PathBuf),
    /// Somebody's QEMU runs `migrate` to us, who listen there.
    Stream(Address),
    /// An image.
    Image(PathBuf),
    /// An image in an object store.
    #[cfg(feature = "store")]
    Store(towline_image::store::Location),
    /// A synthetic guest of this process.
    Memory(synthetic::Shape),
}

/// Where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A QEMU that waits with `-incoming defer`, by its QMP socket.
    Qmp(PathBuf),
    /// A QEMU or towline that listens there.
    Stream(Address),
    /// An image to be made.
    Image(PathBuf),
    /// An image to be made in an object store.
    #[cfg(feature = "store")]
    Store(towline_image::store::Location),
    /// Memory of this process, where it is verified (or hashed) and then dropped.
    Memory(MemoryRoom),
    /// Nowhere: counts and drops. The source is told that it failed, so its guest runs on.
    Null,
}

impl Source {
    /// Whether it is a stored guest.
    pub fn is_image(&self) -> bool {
        match self {
            Self::Image(_) => true,
            #[cfg(feature = "store")]
            Self::Store(_) => true,
            Self::Qmp(_) | Self::Stream(_) | Self::Memory(_) => false,
        }
    }
}

impl Destination {
    /// Whether it becomes a stored guest.
    pub fn is_image(&self) -> bool {
        match self {
            Self::Image(_) => true,
            #[cfg(feature = "store")]
            Self::Store(_) => true,
            Self::Qmp(_) | Self::Stream(_) | Self::Memory(_) | Self::Null => false,
        }
    }
}

/// How to copy. See the command line for what each does.
#[derive(Debug, Clone)]
pub struct Options {
    /// Lanes at both ends; 0: none. `None`: 4 where QMP can set them, else none.
    pub multifd_channels: Option<usize>,
    /// How lanes are compressed; both ends alike. A relay decompresses and compresses again.
    pub compression: Compression,
    /// Whether the kernel reads the pages on lanes where they are, rather than copying them.
    pub zero_copy_send: ZeroCopySend,
    /// Streams are encrypted; `None`: they are not.
    pub tls: Option<Tls>,
    /// Bytes per second; `None`: as fast as it goes.
    pub max_bandwidth: Option<u64>,
    /// How long the guest may stand still.
    pub downtime_limit: Duration,
    /// Have a `qmp:` source slow its guest down if that writes too fast (QEMU's auto-converge).
    pub throttle: bool,
    /// Compare an image with its manifest while it is read.
    pub verify: bool,
    /// Let a `qmp:` source run on afterwards, and begin with `cont` if it was copied before.
    pub resume: bool,
    /// End a `qmp:` source once the guest is at its destination: a move.
    pub end_source: bool,
    /// Take a vhost-user-vsock out of the guest before it is moved, and put it in again at its `qmp:` destination.
    pub detach_vsock: bool,
    /// Devices of ours that serve the guest, by their control sockets: that at the source, and that at the destination. The copy
    /// is refused if one would not take the guest from the other.
    pub devices: Vec<(PathBuf, PathBuf)>,
    /// Whether a `qmp:` destination runs; `None`: as the guest did.
    pub run: Option<bool>,
    /// Whether streams have a return path. Without one nobody hears of a failure at the other end.
    pub return_path: bool,
    /// Stream an image even where QEMU could load the file itself.
    pub stream: bool,
    /// Replace an image of the same name.
    pub overwrite: bool,
    /// Store only what differs from this image.
    pub base: Option<PathBuf>,
    /// Have a `qmp:` source run on while an image of this instant is taken (QEMU's background-snapshot).
    pub live: bool,
    /// The destination runs the guest at once, and its memory follows; `None`: it runs when everything is there.
    pub postcopy: Option<PostcopyOptions>,
    /// How long the other end may take to connect or to be reached.
    pub connect_timeout: Duration,
    /// Changes rate and downtime while it goes on.
    pub tuning: Tuning,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            multifd_channels: None,
            compression: Compression::None,
            zero_copy_send: ZeroCopySend::Auto,
            tls: None,
            max_bandwidth: None,
            downtime_limit: Duration::from_millis(300),
            throttle: false,
            verify: false,
            resume: false,
            end_source: false,
            detach_vsock: false,
            devices: Vec::new(),
            run: None,
            return_path: true,
            stream: false,
            overwrite: false,
            base: None,
            live: false,
            postcopy: None,
            connect_timeout: Duration::from_secs(10),
            tuning: Tuning::default(),
        }
    }
}

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Both ends are asked and set.
    Prepare,
    /// Somebody is waited for, or reached.
    Connect,
    /// Memory moves, while the guest runs.
    Transfer,
    /// A guest that comes in was stopped at its source: the rest of its memory and its device state follow.
    Switchover,
    /// The destination has everything; the source hears it next.
    Loaded,
    /// The guest is there and its source was told so.
    Release,
    /// The source says that it is done with the guest, or has ended: it may run at the destination.
    CutOver,
    /// The destination was told to run it, and does.
    Running,
}

/// Hears how a copy goes. Called from the plan's thread, and within a transfer from the engine's, which waits, with the guest
/// stopped: no call may block.
pub trait Observer: Sync {
    /// The next phase begins.
    fn phase(&self, phase: Phase) {
        let _ = phase;
    }

    /// Called several times a second while memory moves.
    fn progress(&self, progress: &Progress) {
        let _ = progress;
    }

    /// Whoever connects there from now on is heard: the source is waited for.
    fn listening(&self, address: &Address) {
        let _ = address;
    }

    /// How each lane to the destination has sent so far; called with [`Observer::progress`].
    fn lanes(&self, lanes: &[LaneSends]) {
        let _ = lanes;
    }

    /// Something the user should know, though nothing failed.
    fn notice(&self, text: &str) {
        let _ = text;
    }
}

/// Two that hear the same.
impl<A: Observer + ?Sized, B: Observer + ?Sized> Observer for (&A, &B) {
    fn phase(&self, phase: Phase) {
        self.0.phase(phase);
        self.1.phase(phase);
    }

    fn progress(&self, progress: &Progress) {
        self.0.progress(progress);
        self.1.progress(progress);
    }

    fn listening(&self, address: &Address) {
        self.0.listening(address);
        self.1.listening(address);
    }

    fn lanes(&self, lanes: &[LaneSends]) {
        self.0.lanes(lanes);
        self.1.lanes(lanes);
    }

    fn notice(&self, text: &str) {
        self.0.notice(text);
        self.1.notice(text);
    }
}

/// How far the memory is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// What this side has counted.
    pub moved: Snapshot,
    /// Passes over the memory that the source's QEMU has begun; this and all below only if one says so.
    pub pass: Option<u64>,
    /// How fast the source sends, in bytes per second.
    pub rate: Option<u64>,
    /// How fast the source's guest writes its memory, in bytes per second.
    pub dirty_rate: Option<u64>,
    /// What is left, in bytes.
    pub remaining: Option<u64>,
    /// How far the guest is slowed down, in percent.
    pub throttle_percent: Option<u64>,
    /// How long the guest would stand still if it were stopped now.
    pub expected_downtime: Option<Duration>,
    /// What a guest that runs already waited for.
    pub faults: Option<towline_migration::postcopy::FaultCounts>,
}

impl Progress {
    /// How long what is left takes while the guest writes on; `None` if that is not known, or does not end.
    pub fn expected_time(&self) -> Option<Duration> {
        let (remaining, rate) = (self.remaining?, self.rate?);
        let gains = rate.checked_sub(self.dirty_rate.unwrap_or(0)).filter(|&gains| gains > 0)?;
        Duration::try_from_secs_f64(remaining as f64 / gains as f64).ok()
    }
}

/// What was done.
#[derive(Debug, Clone)]
pub struct Report {
    /// What moved.
    pub moved: Snapshot,
    /// From the first question to the guest's being safe.
    pub total_time: Duration,
    /// How long the guest stood still, as the source's QEMU has it, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// Lanes used.
    pub multifd_channels: usize,
    /// How they were compressed.
    pub compression: Compression,
    /// What was asked of lanes to the destination.
    pub zero_copy_send: ZeroCopySend,
    /// How each lane to the destination sent its pages; none if there is no stream to it.
    pub lane_sends: Vec<LaneSends>,
    /// QEMU loaded the image itself.
    pub handed_over: bool,
    /// The source's guest now.
    pub source: SourceState,
    /// The destination's guest now.
    pub destination: DestinationState,
    /// What was sent to an object store.
    pub uploaded: Option<Uploaded>,
    /// What arrived in memory of this process.
    pub memory: Option<synthetic::Outcome>,
    /// How much an incremental image holds itself.
    pub increment: Option<Increment>,
    /// How its memory followed a guest that ran at once.
    pub postcopy: Option<PostcopyReport>,
}

impl Report {
    /// How many bytes of pages went as one byte over compressed lanes, their headers counted; `None` if nothing did.
    pub fn compression_ratio(&self) -> Option<f64> {
        let moved = &self.moved;
        let is_compressed = self.compression != Compression::None && moved.multifd_bytes > 0;
        is_compressed.then(|| moved.normal_bytes as f64 / moved.multifd_bytes as f64)
    }
}

/// The guest at its source after a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// Runs on (`--resume`).
    Running,
    /// Paused in QEMU's `postmigrate`.
    Paused,
    /// Its QEMU has ended.
    Ended,
    /// Not ours to say: a stream, or an image as it was.
    Unchanged,
}

/// The guest at its destination after a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DestinationState {
    /// Runs.
    Running,
    /// Loaded, paused.
    Paused,
    /// Stored.
    Stored,
    /// Loaded by somebody else, who decides.
    Loaded,
    /// Received into memory, looked through, and dropped with it.
    Received,
    /// Counted and dropped.
    Dropped,
}
