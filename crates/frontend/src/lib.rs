//! The other side of a vhost-user backend: a frontend with drivers of its own, over shared memory and without a guest.
//!
//! ```text
//! Frontend ── socket ──► any backend          QEMU's requests: features, memory, rings, eventfds, the log
//!   Queue ─── memfd, kick, call ──► its rings   what a guest's driver does: chains out, used entries in, wake-ups
//!     ├─ net::Card      virtio-net: frames out and in, with merged buffers
//!     └─ vsock::VsockGuest   virtio-vsock: packets, and streams with credit
//! ```
//! For tests that inspect a backend more closely than a guest can, drivers that break the rules, and benches that
//! measure the backend. It shares no code with the backend side, so that the two can disagree; its protocol is tested
//! against independent backends.
//!
//! Not part of the product, and not fit to drive real guests. Split rings only.

mod frontend;
mod memory;
pub mod net;
mod queue;
mod sys;
pub mod vsock;
pub mod wire;

pub use frontend::{Frontend, Negotiated};
pub use memory::{GUEST_BASE, MemoryArena, USER_BASE};
pub use queue::{
    Queue, QueueBuffer, QueueOptions, QueueStatistics, RingAddresses, Used, needs_event, wait_any,
};

/// Error of a frontend or driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The backend hung up.
    #[error("the backend disconnected after {request}")]
    Disconnected {
        /// The request.
        request: &'static str,
    },
    /// It answered something else, or with an error.
    #[error("the backend replies to {request} with {found}, expected {expected}")]
    Reply {
        /// The request.
        request: &'static str,
        /// The reply.
        found: String,
        /// The expected reply.
        expected: String,
    },
    /// A feature that this driver cannot do without.
    #[error("the backend lacks {missing:#x} of the {what} {wanted:#x} (it offers {offered:#x})")]
    Features {
        /// The kind of features.
        what: &'static str,
        /// The required features.
        wanted: u64,
        /// The missing ones.
        missing: u64,
        /// The offered ones.
        offered: u64,
    },
    /// An invalid used ring.
    #[error("ring {ring}: {what}")]
    Used {
        /// The ring.
        ring: u32,
        /// The fault.
        what: String,
    },
    /// Nothing happened for too long.
    #[error("{what} did not come within {seconds} s")]
    Timeout {
        /// The event.
        what: &'static str,
        /// The time waited.
        seconds: u64,
    },
}

/// Result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Error {
    move |errno| Error::System { what, source: errno.into() }
}

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
