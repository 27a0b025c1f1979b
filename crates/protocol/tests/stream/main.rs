//! The protocol against streams that stock QEMU wrote (`tests/golden`), and against invalid ones.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod colo;
mod device_state;
mod errors;
mod goldens;
mod harness;
mod hostile;
mod lane_errors;
mod mapped;
mod pieces;
mod postcopy;
mod properties;
mod seeds;
mod shared;
mod support;
