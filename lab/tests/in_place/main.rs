//! Guests whose memory is mapped where it is needed, and not copied.
//!
//! ```text
//!   clones        guests that run on the memory of their image, copy-on-write
//!   differences   guests that arrive in a QEMU that maps an image
//!   refused       memory that is not what it seems: its pages are sent, or the copy is refused
//! ```
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod clones;
mod differences;
mod refused;
mod support;
