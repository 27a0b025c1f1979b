//! What is asked for: a task with the options that it has, and how the guest travels.
//!
//! An option stands where it means something, so that most of what does not go together cannot be written down. What depends on the
//! two ends is in `validate`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towline_migration::{Compression, Tuning, ZeroCopySend};

/// A copy, a move, a snapshot, or a guest that runs before its memory has come. See the command line for what each option does.
#[derive(Debug, Clone)]
pub struct Request {
    /// What becomes of the guest.
    pub task: Task,
    /// How lanes are compressed; both ends alike. A relay decompresses and compresses again.
    pub compression: Compression,
    /// Whether the kernel reads the pages on lanes where they are, rather than copying them.
    pub zero_copy_send: ZeroCopySend,
    /// Streams are encrypted; `None`: they are not.
    pub tls: Option<Tls>,
    /// How long the guest may stand still.
    pub downtime_limit: Duration,
    /// Compare an image with its manifest while it is read.
    pub verify: bool,
    /// Whether streams have a return path. Without one nobody hears of a failure at the other end.
    pub return_path: bool,
    /// Stream an image even where QEMU could load the file itself.
    pub stream: bool,
    /// Replace an image of the same name.
    pub overwrite: bool,
    /// How long the other end may take to connect or to be reached.
    pub connect_timeout: Duration,
    /// Changes rate and downtime while it goes on.
    pub tuning: Tuning,
}

/// What becomes of the guest at both ends.
#[derive(Debug, Clone)]
pub enum Task {
    /// It is copied, and its source keeps it: paused, or as it was stored.
    Copy {
        /// How its memory goes.
        transfer: TransferOptions,
        /// Whether it runs at a `qmp:` destination; `None`: as it did.
        run: Option<bool>,
        /// Let a `qmp:` source run on afterwards, and begin with `cont` if it was copied before.
        resume: bool,
        /// Store only what differs from this image.
        base: Option<PathBuf>,
    },
    /// It is copied, and the QEMU at its source is ended when it is at its destination.
    Move {
        /// How its memory goes.
        transfer: TransferOptions,
        /// Whether it runs at a `qmp:` destination; `None`: as it did.
        run: Option<bool>,
        /// Take a vhost-user-vsock out of the guest before it is moved, and put it in again at its `qmp:` destination.
        detach_vsock: bool,
        /// See [`Devices`].
        devices: Devices,
    },
    /// An image of this instant is taken while the guest of a `qmp:` source runs on (QEMU's background-snapshot), on a single channel
    /// and as fast as it goes.
    Snapshot {
        /// Store only what differs from this image.
        base: Option<PathBuf>,
    },
    /// The destination runs the guest at once, and its memory follows.
    Postcopy {
        /// How its memory goes.
        transfer: TransferOptions,
        /// How it begins.
        start: PostcopyStart,
        /// Pages that are waited for go on a channel of their own.
        preempt: bool,
        /// Remembers beside the image what the guest needed at once, for the next time.
        record_working_set: bool,
    },
}

/// Devices of ours that serve the guest, by their control sockets: that at the source, and that at the destination. The move is refused
/// if one would not take the guest from the other.
pub type Devices = Vec<(PathBuf, PathBuf)>;

/// How a guest by postcopy begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PostcopyStart {
    /// Its source keeps it: paused, or as it was stored.
    Copy {
        /// Whether it runs; `None`: as it did.
        run: Option<bool>,
    },
    /// The QEMU at its source is ended.
    Move {
        /// Whether it runs; `None`: as it did.
        run: Option<bool>,
        /// See [`Devices`].
        devices: Devices,
    },
    /// It runs at its destination already, and its memory has stopped coming.
    Recover,
}

/// How memory goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransferOptions {
    /// Lanes at both ends; 0: none. `None`: 4 where QMP can set them, else none.
    pub multifd_channels: Option<usize>,
    /// Bytes per second; `None`: as fast as it goes.
    pub max_bandwidth: Option<u64>,
    /// Have a `qmp:` source slow its guest down if that writes too fast (QEMU's auto-converge).
    pub throttle: bool,
}

/// How streams are encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// A directory with the file names of QEMU's `tls-creds-x509`.
    pub credentials: PathBuf,
    /// What the certificate of a server must be for; `None`: the host of its address.
    pub hostname: Option<String>,
}

/// How a copy by postcopy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PostcopyOptions {
    pub(crate) preempt: bool,
    pub(crate) recover: bool,
    pub(crate) record_working_set: bool,
}

impl Default for Request {
    fn default() -> Self {
        Self::new(Task::default())
    }
}

impl Default for Task {
    fn default() -> Self {
        Self::Copy { transfer: TransferOptions::default(), run: None, resume: false, base: None }
    }
}

impl Request {
    /// This task, with what the command line has where it names no option.
    pub fn new(task: Task) -> Self {
        Self {
            task,
            compression: Compression::None,
            zero_copy_send: ZeroCopySend::Auto,
            tls: None,
            downtime_limit: Duration::from_millis(300),
            verify: false,
            return_path: true,
            stream: false,
            overwrite: false,
            connect_timeout: Duration::from_secs(10),
            tuning: Tuning::default(),
        }
    }

    /// How memory goes; a background snapshot has no choice.
    pub(crate) fn transfer_options(&self) -> TransferOptions {
        match &self.task {
            Task::Copy { transfer, .. } | Task::Move { transfer, .. } | Task::Postcopy { transfer, .. } => {
                *transfer
            }
            Task::Snapshot { .. } => TransferOptions::default(),
        }
    }

    /// Whether the guest is to run at its destination; `None`: as it did.
    pub(crate) fn run(&self) -> Option<bool> {
        match &self.task {
            Task::Copy { run, .. } | Task::Move { run, .. } => *run,
            Task::Postcopy {
                start: PostcopyStart::Copy { run } | PostcopyStart::Move { run, .. }, ..
            } => *run,
            Task::Postcopy { start: PostcopyStart::Recover, .. } | Task::Snapshot { .. } => None,
        }
    }

    /// Whether a guest that was paused by an earlier copy runs on, and after this one too.
    pub(crate) fn resumes(&self) -> bool {
        matches!(self.task, Task::Copy { resume: true, .. })
    }

    /// Whether the QEMU at the source is ended.
    pub(crate) fn ends_source(&self) -> bool {
        matches!(self.task, Task::Move { .. } | Task::Postcopy { start: PostcopyStart::Move { .. }, .. })
    }

    /// Whether devices that QEMU does not migrate are taken out of the guest.
    pub(crate) fn detaches_vsock(&self) -> bool {
        matches!(self.task, Task::Move { detach_vsock: true, .. })
    }

    /// Whether it is an image of this instant.
    pub(crate) fn is_snapshot(&self) -> bool {
        matches!(self.task, Task::Snapshot { .. })
    }

    /// Devices that are compared beforehand.
    pub(crate) fn devices(&self) -> &[(PathBuf, PathBuf)] {
        match &self.task {
            Task::Move { devices, .. }
            | Task::Postcopy { start: PostcopyStart::Move { devices, .. }, .. } => devices,
            _ => &[],
        }
    }

    /// The image from which only what differs is stored.
    pub fn base(&self) -> Option<&Path> {
        match &self.task {
            Task::Copy { base, .. } | Task::Snapshot { base } => base.as_deref(),
            Task::Move { .. } | Task::Postcopy { .. } => None,
        }
    }

    /// Whether the guest runs before its memory has come.
    pub fn is_postcopy(&self) -> bool {
        matches!(self.task, Task::Postcopy { .. })
    }

    /// How it does.
    pub(crate) fn postcopy(&self) -> Option<PostcopyOptions> {
        match &self.task {
            Task::Postcopy { start, preempt, record_working_set, .. } => Some(PostcopyOptions {
                preempt: *preempt,
                recover: *start == PostcopyStart::Recover,
                record_working_set: *record_working_set,
            }),
            _ => None,
        }
    }

    /// The same, with a guest that stays paused at a `qmp:` destination.
    pub(crate) fn paused(mut self) -> Self {
        if let Task::Copy { run, .. } = &mut self.task {
            *run = Some(false);
        }
        self
    }
}
