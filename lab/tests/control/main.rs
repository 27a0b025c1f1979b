//! The control socket and the metrics of copies, and of devices without a guest. Those of devices in use are
//! in the tests of `net` and `vsock`.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod copies;
mod devices;
mod latency;
