//! The engine that moves guests: it binds `towline_protocol` (bytes, no system calls) to `towline_channel`
//! (system calls, no protocol) and to a guest.
//!
//! ```text
//!                       Guest  ──►  outgoing::Outgoing ──► channels ──► incoming::Incoming  ──►  Sink
//!   (an image, live memory, …)      1 thread a lane                     1 thread a lane          (an image, memory, a relay …)
//!                                   + the caller's                      + the caller's
//! ```
//!
//! - [`Guest`] and [`Sink`] are the engine's interfaces to the owner of the guest; this crate supplies
//!   [`SourceMemory`] (a VMM's memory with its guest running in it), [`Memory`] (private or shared memory,
//!   either end) and [`Relay`] (a sink that forwards, so two QEMUs meet).
//! - [`GuestWithPresentBlocks`] and [`SinkWithPresentBlocks`] leave out memory that the destination already
//!   has: a mapped image, memory that two QEMUs share.
//! - [`ProcessMemory`] reads what a QEMU that maps an image has written.
//! - [`DirtyTracker`] tracks a live guest's writes: the kernel's write protection, or KVM's dirty log.
//! - [`convergence`] decides when a guest that writes is stopped, and when it is reported not to converge.
//! - [`Session`] ties the threads of one migration together: the lanes' barrier, and the first error, which
//!   wakes all.
//! - [`ZeroCopySend`]: selects MSG_ZEROCOPY for pages; each lane may measure whether it pays.
//! - [`Compression`] is for lanes only, and makes the only copy in the engine.
//! - [`checkpoints`] takes a running QEMU's state many times a second, by QEMU's COLO.
//! - [`Statistics`] count with QEMU's names, and how many calls moved how many pages.
//!
//! Out of scope: files, QMP and devices; it starts no QEMU. It never copies a page in userspace on its way
//! into a socket or file, unless it is compressed. Limits: postcopy of a guest that does not change only
//! ([`postcopy`]), live ones in passes; one target page size (4 KiB).

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod buffer;
pub mod checkpoints;
mod compression;
pub mod convergence;
mod dirty;
mod error;
mod gate;
mod guest;
mod heartbeat;
pub mod incoming;
mod limiter;
mod live;
pub mod memory;
pub mod outgoing;
pub mod parallel;
pub mod postcopy;
mod present;
mod relay;
mod session;
mod statistics;
mod sys;
pub mod tracker;
mod tuning;

use towline_channel::lock;

pub use compression::Compression;
pub use dirty::DirtyMap;
pub use error::{Error, Result};
pub use gate::{Commit, LinkState, SwitchoverGate, probe_link};
pub use guest::{BaseId, ChannelId, Extent, ExtentKind, Guest, Pages, ReturnPathWriter, Sink};
pub use heartbeat::{HEARTBEAT_INTERVAL, Heartbeat, silence_max};
pub use incoming::Incoming;
pub use live::{LiveBlock, SourceMemory};
pub use memory::{Memory, MemoryError};
pub use outgoing::{Outgoing, ZeroCopySend};
pub use postcopy::Postcopy;
pub use present::{Base, BasePresence, GuestWithPresentBlocks, SinkWithPresentBlocks};
pub use relay::Relay;
pub use session::Session;
pub use statistics::{LaneSends, SendMethod, SendReason, SendTotals, Snapshot, Statistics};
pub use sys::{ProcessMemory, RamMapping, Span};
pub use tracker::{DirtyTracker, TrackerError};
pub use tuning::Tuning;

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
