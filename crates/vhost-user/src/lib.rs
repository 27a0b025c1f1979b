//! The backend side of vhost-user: a virtio device in a separate process, whose guest QEMU can migrate.
//!
//! ```text
//!   frontend (QEMU) ── socket ── server ─► connection ─► session ── commands ──► workers (a thread for each queue or pair)
//!                                                          │                      │  Worker::run: pop, complete
//!          guest memory ◄── memory ────────────────────────┴───────── ring, log ──┘
//! ```
//! The crate provides the session with everything that stock QEMU needs to migrate a device, guest memory by
//! both kinds of addresses, split virtqueues that are processed in batches, the dirty log, and threads. A
//! device is a [`Device`] with its [`Worker`]s; `examples/rng.rs` is a complete one.
//!
//! Out of scope: devices and frontends. Packed virtqueues, `IOMMU`, in-band notifications and polled rings
//! are not supported and are refused by name.
//!
//! Limits: [`QUEUES_MAX`] queues, [`REGIONS_MAX`] regions of memory, rings of [`RING_SIZE_MAX`] entries,
//! chains as [`ring`] bounds them. Linux on a little-endian machine. `SIGPIPE` must be ignored, as in all
//! programs whose `main` is Rust's, because a frontend may send descriptors without a reader. The
//! documentation is `docs/vhost-user.md`.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adaptive_poll;
mod backend_error;
mod connection;
#[cfg(test)]
mod crash_point;
pub mod device;
mod eventfd;
pub mod features;
mod hangup;
mod kick;
pub mod log;
mod mailbox;
pub mod memory;
pub mod message;
mod orphaned_threads;
mod poll;
mod record;
pub mod ring;
mod serve_error;
mod server;
mod session;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod worker;

pub use adaptive_poll::{AdaptivePoller, AnswerablePackets};
pub use device::{BackendError, ConfigSource, Device, Next, Worker};
pub use features::ProtocolFeatures;
pub use memory::{GUEST_BYTES_MAX, GuestMemory, GuestRange, MemoryTableError, REGIONS_MAX, Region};
pub use poll::{PollFlags, PollSet};
pub use record::{DeviceWord, InFlightRecord, RECORD_FD_NAME, RecordError};
pub use ring::{Batch, Chain, ChainHead, RING_SIZE_MAX, Ring, RingFault, RingSetup, RingStatistics};
pub use serve_error::ServeError;
pub use server::{FrontendSource, Service, serve};
pub use session::{QUEUES_MAX, SessionError};
pub use towline_channel::{Address, Cancel, Listener};
pub use worker::Queues;

// Tests in this crate share their driver with the integration tests, which name the crate.
#[cfg(test)]
extern crate self as towline_vhost_user;
