//! Bodies of the fuzz targets, shared with the tests of the crates.
#![allow(dead_code, reason = "each target uses one of them")]

#[path = "../../crates/protocol/tests/stream/harness.rs"]
pub mod harness;

#[path = "../../crates/vhost-user/tests/rings/harness.rs"]
pub mod vhost_user;

#[path = "../../crates/vsock/tests/simulation/packets.rs"]
pub mod vsock;

#[path = "../../crates/vsock/tests/simulation/device_fuzz.rs"]
pub mod vsock_device;

#[path = "../../crates/vsock/tests/simulation/pipes.rs"]
mod pipes;

#[path = "../../crates/net/tests/segments/hostile.rs"]
pub mod segments;

#[path = "../../crates/net/tests/hostile/device.rs"]
pub mod net_device;

#[path = "../../crates/compat/tests/hostile.rs"]
pub mod compat;

pub mod command;
pub mod sys;
