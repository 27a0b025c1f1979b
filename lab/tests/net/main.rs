//! `towline net` with stock QEMUs: a Linux guest whose network card is ours, on a tap in a network of its own.
//!
//! ```text
//!   guest  eth0 10.7.0.2, fd07::2 ── QEMU ── socket ── towline net ── tap0 10.7.0.1, fd07::1   a network of this test
//!          an echo, and one who talks to ours                                 an echo, and one who talks to the guest's
//! ```
//! Every byte that comes back is compared. Guests are emulated, so nothing is asserted of speed.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod af_xdp;
mod moves;
mod pairs;
mod queues;
mod restarts;
mod service_manager;
mod support;
mod testpmd;
mod traffic;
mod watched;
