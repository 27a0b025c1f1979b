//! The switchover against stock QEMU: whatever happens from the last byte of the stream on, at most one guest runs, and what towline
//! says of it is so.
//!
//! The state machine itself is explored in `towline-control`; here are its ends: QEMU's own behaviour, processes, sockets, signals.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod cancelled;
mod cuts;
mod monitors;
mod operators;
mod records;
mod refused;
mod silence;
mod support;
