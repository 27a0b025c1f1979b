//! The fuzz targets' bodies, which are the protocol's own tests too.
#![allow(dead_code, reason = "each target uses one of them")]

#[path = "../../crates/protocol/tests/stream/harness.rs"]
pub mod harness;

pub mod command;
