//! Why a session does not do what it is asked.

use crate::device::Refusal;
use crate::features::ProtocolFeatures;
use crate::memory::MemoryError;
use crate::message::MessageError;

/// A request that was refused, or a device that cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// What came is no request.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Memory or log that cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Features that were not offered.
    #[error("SET_FEATURES takes {unknown:#x}, which was not offered (offered: {offered:#x})")]
    Features {
        /// What was not offered.
        unknown: u64,
        /// What was.
        offered: u64,
    },
    /// Other features than those which a ring runs with.
    #[error(
        "SET_FEATURES changes the driver's features while ring {ring} runs; stop it with GET_VRING_BASE first"
    )]
    FeaturesWhileRunning {
        /// A ring that runs.
        ring: usize,
    },
    /// Protocol features that were not offered.
    #[error("SET_PROTOCOL_FEATURES takes {unknown:#x}, which was not offered (offered: {offered:#x})")]
    ProtocolFeatures {
        /// What was not offered.
        unknown: u64,
        /// What was.
        offered: u64,
    },
    /// A request of a feature that was not taken.
    #[error("{request} came, but {needed:?} was not negotiated")]
    NotAgreed {
        /// The request.
        request: &'static str,
        /// What it needs.
        needed: ProtocolFeatures,
    },
    /// A ring that the device does not have.
    #[error("{request} names ring {index}, but the device has {count}")]
    NoRing {
        /// The request.
        request: &'static str,
        /// The ring.
        index: u64,
        /// How many there are.
        count: usize,
    },
    /// A ring is to be started or changed at the wrong moment.
    #[error("{request} for ring {index}: {why}")]
    Ring {
        /// The request.
        request: &'static str,
        /// The ring.
        index: usize,
        /// What is wrong.
        why: &'static str,
    },
    /// A number out of range.
    #[error("{request} for ring {index} says {found}, expected {expected}")]
    Value {
        /// The request.
        request: &'static str,
        /// The ring.
        index: usize,
        /// The number.
        found: u32,
        /// What it may be.
        expected: &'static str,
    },
    /// An MTU that none is.
    #[error("NET_SET_MTU says {found}, expected at most 65535")]
    Mtu {
        /// The number.
        found: u64,
    },
    /// The device says no.
    #[error("{request}: the device refuses: {reason}")]
    Refused {
        /// The request.
        request: &'static str,
        /// The device's words.
        reason: Refusal,
    },
    /// A worker could not be made.
    #[error("worker {index} of the device cannot be made: {reason}")]
    Worker {
        /// Which.
        index: usize,
        /// The device's words.
        reason: Refusal,
    },
    /// A thread could not be had.
    #[error("worker {index} has no thread: {source}; is the limit of processes (ulimit -u) reached?")]
    Thread {
        /// Which.
        index: usize,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The process is to end, and a worker does not answer.
    #[error(
        "worker {index} does not answer, and the process is to end; it waits for memory that the frontend has to provide"
    )]
    Cancelled {
        /// Which.
        index: usize,
    },
    /// The kernel has no descriptor left.
    #[error("no descriptor can be had for it: {source}; raise the limit of open files (ulimit -n)")]
    Descriptor {
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The guest's memory cannot be accessed any more.
    #[error(
        "the guest's memory or its dirty log cannot be accessed any more (SIGBUS): its file was truncated, or has no page to give (huge pages?)"
    )]
    MemoryLost,
    /// Chains that cannot go back to the guest.
    #[error(
        "ring {ring} cannot be stopped: {reason}; its chains stay in flight, and the connection ends so that the frontend does not take their memory for free"
    )]
    InUse {
        /// The ring.
        ring: usize,
        /// The device's words.
        reason: Refusal,
    },
    /// A worker's thread ended, which is a bug of the device.
    #[error("worker {index} panicked; its message is on standard error")]
    Gone {
        /// Which.
        index: usize,
    },
}

impl SessionError {
    /// Whether it may pass when others give descriptors, memory or threads back.
    pub(crate) fn is_exhausted(&self) -> bool {
        match self {
            Self::Worker { reason, .. } => reason.is_exhausted(),
            // EAGAIN: the limit of threads.
            Self::Thread { source, .. } => {
                source.kind() == std::io::ErrorKind::WouldBlock || crate::device::is_exhausted(source)
            }
            Self::Descriptor { source } => crate::device::is_exhausted(source),
            _ => false,
        }
    }

    /// Whether the device serves a connection later, and not this one.
    pub(crate) fn passes(&self) -> bool {
        matches!(self, Self::Worker { reason, .. } if reason.passes())
    }

    /// Whether the connection ends, also for a frontend that takes refusals as answers.
    pub(crate) fn is_the_end(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::Cancelled { .. } | Self::InUse { .. })
    }

    pub(crate) fn refused(request: &'static str, reason: Refusal) -> Self {
        Self::Refused { request, reason }
    }
}
