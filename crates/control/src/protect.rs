//! Protection of a running guest: another host has its state, checkpoint after checkpoint, and goes on with it when this host is lost. What
//! the network has seen of the guest, the other host's copy has done.
//!
//! ```text
//!   this host                                                            the other host
//!   keeper: monitor, session, arbiter ─────────── ssh ─────────────────► towline agent: standby ── arbiter
//!     └─► ferry ◄── COLO ── QEMU                                            ▲        └─► memory ◄── mapped ── a QEMU that waits
//!           │   └────────── checkpoints, over TLS ─────────────────────────┘
//!           └─► mark, release: cards (`towline net`)                        cards, which hold
//! ```
//! Two processes on this host, because a guest that is stopped for a checkpoint runs on only by a command at its monitor: the keeper gives it
//! when the ferry dies or hangs, and the ferry goes on when the keeper dies.
//!
//! | lost | |
//! |---|---|
//! | this host, or the QEMU | the standby claims the next generation, and runs the guest |
//! | the standby, the way to it, or the ferry | the keeper claims the next generation, and lets the output go; it protects the guest again |
//! | a claim | the keeper ends its QEMU, whose output was never sent; the standby ends its own |
//!
//! Out of scope: cards of others, whose output is not held.

mod cost;
mod disks;
mod ferry;
mod keeper;
mod memory;
mod messages;
#[cfg(test)]
mod model;
mod standby;

use crate::remote::DiskPolicy;

pub use cost::{CostRequest, EpochCost, Forecast, foresee};
pub use ferry::ferry;
pub use keeper::{Checkpoints, Error, ProtectEnd, ProtectObserver, ProtectRequest, Times, protect};
pub(crate) use memory::StandbyMemory;
pub use standby::StandbyControl;
pub(crate) use standby::{Standby, StandbyRequest};
pub use standby::{StandbyEnd, StandbyError, Takeover};

/// Treatment of a protected guest's disks.
pub const DISKS: DiskPolicy = DiskPolicy::Copied;
