//! The switchover with stock QEMU: after any fault from the last byte of the stream on, at most one guest
//! runs, and towline's report of it is true.
//!
//! The state machine itself is explored in `towline-control`; these tests cover its environment: QEMU's own
//! behaviour, processes, sockets, signals.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod cancelled;
mod cuts;
mod drives;
mod evidence;
mod monitors;
mod operators;
mod records;
mod refused;
mod silence;
mod support;
