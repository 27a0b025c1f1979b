//! Images beyond saving and restoring one guest once.
//!
//! ```text
//!   clones     one image, several QEMUs at once; a failure at one does not affect the others
//!   chains     incremental images: size, depth, damage in each file, a missing or wrong base
//!   instant    background snapshots: the guest keeps running, the image is of one instant
//! ```
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod chains;
mod clones;
mod instant;
#[allow(dead_code, reason = "shared with another target, which uses all of it")]
#[path = "../faults/support.rs"]
mod support;
