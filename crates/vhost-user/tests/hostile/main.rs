//! Guests and frontends that violate the specifications, with the whole backend: the ring with the fault ends
//! with a line in the log, and the other one continues.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod backend;
mod blocked;
mod descriptors;
mod frontends;
mod guests;
#[path = "../rings/harness.rs"]
mod harness;
mod refused;
mod resting;
mod standby;
