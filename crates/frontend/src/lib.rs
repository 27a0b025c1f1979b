//! The other side of a vhost-user backend: a frontend with drivers of its own, over shared memory and without a guest.
//!
//! ```text
//!   Frontend ── socket ──► any backend          what QEMU says: features, memory, rings, eventfds, the log
//!   Queue ─── memfd, kick, call ──► its rings   what a guest's driver does: chains out, used entries in, wake-ups
//!     ├─ net::Card      virtio-net: frames out and in, with merged buffers
//!     └─ vsock::Guest   virtio-vsock: packets, and streams with credit
//! ```
//! What it is for: tests that look into a backend closer than a guest can, drivers that do what none may, and benches in
//! which the backend is what is measured. It shares no code with the backend side, so that the two can disagree; what it
//! speaks is checked against backends that are not ours.
//!
//! What it is not: part of what is shipped, or fit to drive real guests. Split rings only.

mod frontend;
mod memory;
pub mod net;
mod queue;
mod sys;
pub mod vsock;
pub mod wire;

pub use frontend::{Frontend, Negotiated};
pub use memory::{GUEST_BASE, Memory, USER_BASE};
pub use queue::{Buffer, Queue, QueueOptions, QueueStatistics, RingAddresses, Used, needs_event, wait_any};

/// Why a backend cannot be driven.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The backend hung up.
    #[error("the backend hung up when it was told {request}")]
    Disconnected {
        /// The request.
        request: &'static str,
    },
    /// It answered something else, or with an error.
    #[error("the backend answers {request} with {found}, expected {expected}")]
    Reply {
        /// The request.
        request: &'static str,
        /// What came.
        found: String,
        /// What should have.
        expected: String,
    },
    /// A feature that this driver cannot do without.
    #[error("the backend lacks {missing:#x} of the {what} {wanted:#x} (it offers {offered:#x})")]
    Features {
        /// Which features.
        what: &'static str,
        /// What was wanted.
        wanted: u64,
        /// What is not there.
        missing: u64,
        /// What is.
        offered: u64,
    },
    /// A used ring that says what cannot be.
    #[error("ring {ring}: {what}")]
    Used {
        /// Which ring.
        ring: u32,
        /// What is wrong.
        what: String,
    },
    /// Nothing happened for too long.
    #[error("{what} did not come within {seconds} s")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        seconds: u64,
    },
}

/// What comes of it.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Error {
    move |errno| Error::System { what, source: errno.into() }
}
