//! Drives the QEMUs of a migration over QMP, and connects the two ends of a copy.
//!
//! ```text
//! status_server   QMP server of one copy
//! device          QMP server of devices; statistics: metrics in QEMU's format
//! check           preflight check: the facts of both ends
//! plan            copies a guest from a source to a destination, with rollback
//! run             starts QEMUs for the guests of an image, and supervises them
//! record          an image of a running guest at each interval
//! protect         another host goes on with a running guest when this one is lost
//! remote          another host, whose towline is driven over OpenSSH
//! upgrade         replaces the QEMU of a running guest, with the memory left where it is
//! qemu            one QEMU: facts, process, settings that are restored afterwards
//! generations     which place may continue a guest that several hosts run in turn
//! moves           records of undecided moves, which are listed and finished later
//! arbiter         which of two hosts may go on with a guest
//! journal         changes of a QEMU, in a file that outlives a killed towline
//! ```
//!
//! This crate drives stock QEMU over its monitor with `towline_qmp`. `towline_migration` transfers the stream
//! and the memory between the two ends that a plan connects.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod arbiter;
mod cards;
pub mod check;
pub mod device;
mod durable;
#[cfg(test)]
mod explore;
pub mod generations;
mod hex;
pub mod in_place;
pub mod journal;
pub mod moves;
mod nbd;
pub mod plan;
mod process;
mod procfs;
pub mod protect;
pub mod qemu;
pub mod record;
pub mod remote;
pub mod run;
pub mod statistics;
pub mod status_server;
mod switchover;
mod temporary_names;
pub mod upgrade;
mod waits;

use towline_channel::lock;

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
