//! Rings against a driver that behaves, in any order of events, and against drivers that do not.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod driver;
mod harness;
mod hostile;
mod model;
mod seeds;
mod served;
mod sockets;
