//! Rings with a conforming driver, in any order of events, and with hostile drivers.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod driver;
mod harness;
mod hostile;
mod model;
mod seeds;
mod served;
mod sockets;
