//! `towline net` with stock QEMUs: a Linux guest with our network card, on a tap in a network namespace.
//!
//! ```text
//!   guest  eth0 10.7.0.2, fd07::2 ── QEMU ── socket ── towline net ── tap0 10.7.0.1, fd07::1   a network of this test
//!          an echo, and a client of the host's                                an echo, and a client of the guest's
//! ```
//! Every byte that comes back is compared. Guests are emulated, so speed is not asserted.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod af_xdp;
mod commits;
mod managers;
mod moves;
mod pairs;
mod pauses;
mod queues;
mod restarts;
mod service_manager;
mod support;
mod testpmd;
mod traffic;
mod watched;
mod zero_copy;
