//! Errors of a session.

use std::time::Duration;

use crate::backend_error::{BackendError, Persistence};
use crate::features::ProtocolFeatures;
use crate::memory::MemoryTableError;
use crate::message::MessageError;

/// A refused request, or a failure of the device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The message is not a valid request.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Memory or log cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryTableError),
    /// A descriptor of a file on FUSE or a network file system.
    #[error(
        "a descriptor refers to a file that another process or host serves (FUSE, NFS), which may never answer; back the guest's \
         memory with a memfd, hugetlbfs, /dev/shm or a local disk"
    )]
    RemoteFile,
    /// Features that were not offered.
    #[error("SET_FEATURES accepts {unknown:#x}, which was not offered (offered: {offered:#x})")]
    Features {
        /// Features that were not offered.
        unknown: u64,
        /// Features that were offered.
        offered: u64,
    },
    /// Other features than a running ring was started with.
    #[error(
        "SET_FEATURES changes the driver's features while ring {ring} runs; stop it with GET_VRING_BASE first"
    )]
    FeaturesWhileRunning {
        /// A running ring.
        ring: usize,
    },
    /// Protocol features that were not offered.
    #[error("SET_PROTOCOL_FEATURES accepts {unknown:#x}, which was not offered (offered: {offered:#x})")]
    ProtocolFeatures {
        /// Features that were not offered.
        unknown: u64,
        /// Features that were offered.
        offered: u64,
    },
    /// A request of a protocol feature that was not negotiated.
    #[error("{request} requires {needed:?}, which was not negotiated")]
    NotNegotiated {
        /// The request.
        request: &'static str,
        /// The protocol feature.
        needed: ProtocolFeatures,
    },
    /// A ring that the device does not have.
    #[error("{request} is for ring {index}, but the device has {count}")]
    NoSuchRing {
        /// The request.
        request: &'static str,
        /// The ring.
        index: u64,
        /// Number of rings.
        count: usize,
    },
    /// A request that the ring's state does not permit.
    #[error("{request} for ring {index}: {why}")]
    RingState {
        /// The request.
        request: &'static str,
        /// The ring.
        index: usize,
        /// The conflict.
        why: &'static str,
    },
    /// A number out of range.
    #[error("{request} for ring {index} has {found}, expected {expected}")]
    Value {
        /// The request.
        request: &'static str,
        /// The ring.
        index: usize,
        /// The number.
        found: u32,
        /// The range.
        expected: &'static str,
    },
    /// Rings of which one's completions would be the other's available chains: the device would never rest.
    #[error("{request}: the used ring of ring {ring} overlaps the available ring of ring {other}")]
    RingOverlap {
        /// The request.
        request: &'static str,
        /// The ring with this used ring.
        ring: usize,
        /// The ring with this available ring.
        other: usize,
    },
    /// The device belongs to another frontend.
    #[error("the rings of another frontend run; stop its guest, or end it, before this one has the device")]
    OtherFrontend,
    /// An MTU out of range.
    #[error("NET_SET_MTU has {found}, expected at most 65535")]
    Mtu {
        /// The number.
        found: u64,
    },
    /// The device refused.
    #[error("{request}: the device refuses: {reason}")]
    Refused {
        /// The request.
        request: &'static str,
        /// Error of the device.
        reason: BackendError,
    },
    /// A worker could not be created.
    #[error("worker {index} of the device cannot be created: {reason}")]
    Worker {
        /// Number of the worker.
        index: usize,
        /// Error of the device.
        reason: BackendError,
    },
    /// A thread could not be created.
    #[error("worker {index} has no thread: {source}; is the limit of processes (ulimit -u) reached?")]
    Thread {
        /// Number of the worker.
        index: usize,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// Threads of the previous connection still wait for its frontend.
    #[error(
        "{count} threads of the previous connection have not ended: they wait for memory of its frontend, or block on one of its \
         descriptors; end that frontend"
    )]
    OrphanedThreads {
        /// Number of threads.
        count: usize,
    },
    /// The process is ending, and a worker does not reply.
    #[error(
        "worker {index} does not reply, and the process is to end; it waits for memory that the frontend has to provide"
    )]
    Cancelled {
        /// Number of the worker.
        index: usize,
    },
    /// The frontend has sent only a part of a message: for too long, or until the process ends.
    #[error("the rest of a message did not arrive within {:.1} s", after.as_secs_f64())]
    IncompleteMessage {
        /// Time since its first byte.
        after: Duration,
    },
    /// The kernel has no descriptor left.
    #[error("no descriptor for the connection: {source}; raise the limit of open files (ulimit -n)")]
    Descriptor {
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The guest's memory is no longer accessible.
    #[error(
        "the guest's memory or its dirty log can no longer be accessed (SIGBUS): its file was truncated, or the kernel has no page for it (huge pages?)"
    )]
    MemoryLost,
    /// Chains that must not return to the guest.
    #[error(
        "ring {ring} cannot be stopped: {reason}; its chains stay in flight, and the connection ends so that the frontend does not reuse their memory"
    )]
    ChainsInUse {
        /// The ring.
        ring: usize,
        /// Error of the device.
        reason: BackendError,
    },
    /// A worker's thread ended, which is a bug of the device.
    #[error("worker {index} panicked; its message is on standard error")]
    WorkerPanicked {
        /// Number of the worker.
        index: usize,
    },
}

impl SessionError {
    /// Conditions under which the failure ends.
    pub(crate) fn persistence(&self) -> Persistence {
        match self {
            Self::Worker { reason, .. } => reason.persistence(),
            // The limit of threads (EAGAIN).
            Self::Thread { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock => {
                Persistence::Exhausted
            }
            Self::Thread { source, .. } | Self::Descriptor { source } => Persistence::of(source),
            Self::OrphanedThreads { .. } => Persistence::Temporary,
            _ => Persistence::Permanent,
        }
    }

    /// Returns true if the connection ends even if the frontend requested an acknowledgement.
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::WorkerPanicked { .. }
                | Self::Cancelled { .. }
                | Self::ChainsInUse { .. }
                | Self::RemoteFile
        )
    }

    pub(crate) fn refused(request: &'static str, reason: BackendError) -> Self {
        Self::Refused { request, reason }
    }
}
