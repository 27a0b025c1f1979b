//! The other side of a vhost-user backend: a frontend with drivers, over shared memory and without a guest.
//!
//! ```text
//! Frontend ── socket ──► any backend          QEMU's requests: features, memory, rings, eventfds, the log
//!   Queue ─── memfd, kick, call ──► its rings   what a guest's driver does: chains out, used entries in, wake-ups
//!     ├─ net::Card      virtio-net: frames out and in, with merged buffers
//!     └─ vsock::VsockGuest   virtio-vsock: packets, and streams with credit
//! ```
//! For tests that inspect a backend more closely than a guest can, drivers that break the rules, and benches
//! that measure the backend. It shares no code with the backend side, so the two can disagree; its protocol
//! is tested against independent backends.
//!
//! Not part of the product, and not fit to drive real guests. Split rings only.

mod error;
mod frontend;
mod memory;
pub mod net;
mod queue;
mod sys;
pub mod vsock;
pub mod wire;

pub(crate) use error::system;
pub use error::{Error, Result};
pub use frontend::{Frontend, Negotiated};
pub use memory::{GUEST_BASE, MemoryArena, USER_BASE};
pub use queue::{
    Queue, QueueBuffer, QueueOptions, QueueStatistics, RingAddresses, Used, needs_event, wait_any,
};

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
