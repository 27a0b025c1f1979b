//! A virtio network card behind vhost-user, between a guest and a tap of this host; QEMU migrates a guest that has one.
//!
//! ```text
//!   guest ── ring 1, 3, … ─► Transmitter ── one writev a frame ─► queue of the tap ─► the host's stack, a bridge
//!         ◄─ ring 0, 2, … ── Receiver ◄──── one readv a frame ───┘      (a Pair, a thread, a queue each)
//! ```
//! Frames go from guest memory into the kernel and back without a copy in this process, super-frames of 64 KiB as well:
//! the virtio header is the tap's own, so segmentation and checksums are the kernel's, or the real card's behind it.
//! What the tap may hand over follows what the guest's driver took, here and at a migration's destination.
//!
//! What it is not: no switch (a bridge does that), no control queue (QEMU keeps it), no address filter, no shaping.
//!
//! Limits: [`PAIRS_MAX`] queue pairs, frames of [`FRAME_BYTES_MAX`] bytes. Chains are completed in the ring's order, so a
//! process that dies loses frames that were under way and no descriptor: the next one begins where the used ring ends.
//! Where it is written down: `docs/net.md`.

mod device;
mod features;
mod pair;
mod rarp;
mod receive;
pub mod segment;
mod state;
mod statistics;
mod sys;
mod tap;
mod transmit;
mod xdp;

pub use device::{Net, Options};
pub use features::feature_names;
pub use state::{STATE_VERSION, STATE_VERSION_MIN};
pub use statistics::{DropReason, QueueStatistics};
pub use tap::{Tap, TapError, Taps};
pub use xdp::{Mode, Xdp, XdpError};

/// The most queue pairs: what one byte names on the wire, two queues each.
pub const PAIRS_MAX: usize = towline_vhost_user::QUEUES_MAX / 2;
/// The longest frame, with its virtio header: a super-frame of 64 KiB with room for its headers.
pub const FRAME_BYTES_MAX: usize = 68 << 10;
/// After so many bytes the guest sees what was done, while the rest of the batch is: both sides work at once.
const BYTES_A_BATCH: u64 = 64 << 10;
