//! Memory that stock QEMU maps, and proofs that it is what it should be.
//!
//! ```text
//!   stored     of an image, or of a reflink
//!   running    of another QEMU
//!   content    of a file that has other content
//! ```

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

#[path = "../../../qmp/tests/common/mod.rs"]
mod common;
mod content;
mod running;
mod stored;
mod support;
