//! What images are good for beyond one guest saved and restored once.
//!
//! ```text
//!   clones     one image, several QEMUs at once; what goes wrong at one is its own
//!   chains     incremental images: size, depth, damage in each file, a base that is gone or another one
//!   instant    background snapshots: the guest runs on, the image is of one instant
//! ```
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod chains;
mod clones;
mod instant;
#[allow(dead_code, reason = "shared with another target, which uses all of it")]
#[path = "../faults/support.rs"]
mod support;
