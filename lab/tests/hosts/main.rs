//! Guests that go to another host over OpenSSH.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod all;
mod beside_qemu;
mod direct;
mod disks;
mod faults;
mod kills;
mod moves;
mod postcopy;
mod support;
mod ways;
