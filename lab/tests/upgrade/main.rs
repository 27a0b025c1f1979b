//! `towline upgrade`: another QEMU under a running guest, on the same memory.
//!
//! ```text
//!   versions   guests of each QEMU continue in others, with their memory, drives and sockets
//!   refused    what is refused before anything changes, and new QEMUs that fail: the guest continues in the old one
//!   kinds      what is carried and what is refused: drives, confinement, what was plugged in
//!   aborted    memory after a load that is given up at each section's boundary
//!   kills      processes killed at any moment of an upgrade
//!   series     many upgrades in a row: times, and bytes
//!   cards      guests with a card of `towline net` in traffic
//!   cpr        QEMU's own replacement of itself, for its times
//!   vsocks     guests with a vhost-user-vsock
//! ```
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod aborted;
mod cards;
mod cpr;
mod kills;
mod kinds;
#[path = "../net/support.rs"]
#[allow(dead_code, unused_imports, reason = "the tests of cards use the rest")]
mod network;
mod refused;
mod scene;
mod series;
mod support;
mod versions;
#[path = "../vsock/support.rs"]
#[allow(dead_code, reason = "the tests of vsocks use the rest")]
mod vsock;
mod vsocks;
