//! Guests that a Pacemaker of three hosts runs by `towline ocf`.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod actions;
#[path = "../protect/bridges.rs"]
mod bridges;
#[path = "../protect/clients.rs"]
#[allow(dead_code, reason = "the tests of protected guests use the rest")]
mod clients;
mod configuration;
mod disturbed;
mod hosts;
mod lives;
#[path = "../net/support.rs"]
#[allow(dead_code, unused_imports, reason = "the tests of cards use the rest")]
mod network;
mod pacemaker;
mod protected;
