//! The backend side of vhost-user: a virtio device in a process of its own, whose guest QEMU can migrate.
//!
//! ```text
//!   frontend (QEMU) ── socket ── server ─► session ── orders ──► workers (a thread for each queue or pair)
//!                                            │                      │  Worker::run: pop, complete
//!          guest memory ◄── memory ──────────┴───────── ring, log ──┘
//! ```
//! What it is: the session with all that stock QEMU needs to migrate a device, guest memory by both kinds of addresses,
//! split rings that are taken and given back in batches, the dirty log, and threads. A device is a [`Device`] with its
//! [`Worker`]s; `examples/rng.rs` is one.
//!
//! What it is not: no device, no frontend. Packed rings, `IOMMU`, in-band notifications and
//! polled rings are left out and refused by name.
//!
//! Limits: [`QUEUES_MAX`] queues, [`REGIONS_MAX`] regions of memory, rings of [`RING_SIZE_MAX`] entries, chains as
//! [`ring`] bounds them. Linux on a little-endian machine. `SIGPIPE` has to be ignored, as it is in programs whose `main` is Rust's:
//! a frontend may give descriptors that nobody reads. Where it is written down: `docs/vhost-user.md`.

mod conversation;
pub mod device;
pub mod features;
#[cfg(test)]
mod fuse;
mod hand_over;
mod hangup;
mod kick;
pub mod log;
mod mailbox;
pub mod memory;
pub mod message;
mod pulse;
mod record;
pub mod ring;
mod server;
mod session;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod worker;

pub use device::{Device, Next, Refusal, Worker};
pub use features::ProtocolFeatures;
pub use hand_over::{HandOverError, Left, Offer, hand_over};
pub use memory::{Memory, MemoryError, Place, REGIONS_MAX, Region};
pub use pulse::{Pulse, Traffic};
pub use record::{Record, RecordError, STORED as STORED_RECORD, VERSION as RECORD_VERSION};
pub use ring::{Batch, Chain, Head, RING_SIZE_MAX, Ring, RingFault, RingSetup, RingStatistics};
pub use rustix::event::{PollFd, PollFlags};
pub use server::{Frontends, ServeError, Service, serve};
pub use session::{QUEUES_MAX, SessionError};
pub use towline_channel::{Address, Cancel, Listener};
pub use worker::Queues;

// Tests share their driver with those outside of the crate.
#[cfg(test)]
extern crate self as towline_vhost_user;
