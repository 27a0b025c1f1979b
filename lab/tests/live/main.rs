//! Guests that run, and write their memory, while towline moves them from QEMU to QEMU.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod converge;
mod footprint;
mod hosts;
mod kills;
mod moves;
mod run_states;
mod support;
