//! Guests and frontends that do what none may, with the whole backend: the ring that is broken ends with a line in the log,
//! and the other one goes on.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod backend;
mod frontends;
mod guests;
#[path = "../rings/harness.rs"]
mod harness;
mod refused;
mod resting;
