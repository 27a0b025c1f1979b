//! Bad input and faults, end to end: the source's guest survives all of them, and the message names the
//! cause, the values and the remedy. Every test asserts the exit status, the guest's state afterwards, and
//! that no files are left.
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
mod users;
