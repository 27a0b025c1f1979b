//! A virtio network card behind vhost-user, between a guest and a tap of this host; QEMU migrates a guest
//! that has one.
//!
//! ```text
//!   guest ── ring 1, 3, … ─► Transmitter ── a call per batch ──► queue of the tap ─► the host's stack, a bridge
//!         ◄─ ring 0, 2, … ── Receiver ◄──── one readv per frame ───┘
//!            (a QueuePair, a thread and a queue of the tap for each pair of rings)
//! ```
//! Frames go from guest memory into the kernel and back without a copy in this process, super-frames of 64
//! KiB as well: the virtio header is the tap's own, so segmentation and checksums are left to the kernel, or
//! to the network card that it leads to. The offloads of the tap follow the features that the guest's driver
//! negotiated, here and at a migration's destination.
//!
//! The feature `af-xdp` adds `Xdp`, which sends frames by AF_XDP sockets instead.
//!
//! Out of scope: switching (a bridge does that), a control queue (QEMU has it), address filters, traffic
//! shaping.
//!
//! Limits: [`PAIRS_MAX`] queue pairs, frames of [`FRAME_BYTES_MAX`] bytes. Chains are used in the order of
//! the available ring, so a process that dies loses frames in flight and no descriptor: its successor
//! continues at the used index. See `docs/net.md`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod chains;
mod device;
mod features;
mod hold;
mod pause;
mod rarp;
mod receive;
#[cfg(feature = "af-xdp")]
pub mod segment;
mod state;
mod statistics;
mod sys;
mod tap;
mod timer;
mod transmit;
#[cfg(feature = "af-xdp")]
mod xdp;
#[cfg(not(feature = "af-xdp"))]
#[path = "xdp_absent.rs"]
mod xdp;

use towline_channel::lock;

pub use device::{Net, Options};
pub use features::feature_names;
pub use hold::{HoldError, HoldStatus};
pub use pause::{PassError, PassedFrames};
pub use state::{STATE_VERSION, STATE_VERSION_MIN};
pub use statistics::{CopyReason, DropReason, QueueStatistics, TransmitMode};
pub use tap::{TapError, TapQueue, Taps};
#[cfg(feature = "af-xdp")]
pub use xdp::{Xdp, XdpError};

/// Maximum number of queue pairs: vhost-user names a ring by one byte, and a pair has two.
pub const PAIRS_MAX: usize = towline_vhost_user::QUEUES_MAX / 2;
/// Maximum length of a frame with its virtio header: a super-frame of 64 KiB and its headers.
pub const FRAME_BYTES_MAX: usize = 68 << 10;
/// Bytes after which a batch is published before it is complete, so the guest and the device work at the same
/// time.
const PUBLISHED_BYTES: u64 = 64 << 10;

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
