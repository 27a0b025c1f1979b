//! Bad input and faults, end to end: whatever breaks, the source's guest survives, and the message names the thing, the
//! values and the way out. Every test asserts the exit code, what the guest does afterwards, and that nothing is left.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod busy;
mod damage;
mod disk;
mod endpoints;
mod fit;
mod hostile;
mod kills;
mod lanes;
mod outputs;
mod signals;
mod streams;
mod support;
