//! `towline upgrade`: another QEMU under a running guest, on the same memory.
//!
//! ```text
//!   versions   guests of each QEMU go on in others, with their memory, drives and sockets
//!   refused    what is refused before anything changes, and new QEMUs that fail: the guest goes on in the old one
//!   aborted    memory after a load that is given up at each section's boundary
//!   kills      processes killed at any moment of an upgrade
//!   series     many upgrades in a row: times, and bytes
//! ```
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod aborted;
mod kills;
mod refused;
mod series;
mod support;
mod versions;
