//! How towline talks to the QEMU that owns a guest, and what a copy of a guest consists of.
//!
//! ```text
//! monitor   one copy as QMP shows it
//! device    devices as QMP shows them; statistics: what is counted, in QEMU's shape
//! check     would it run there? the facts of both ends
//! plan      copy a guest from somewhere to somewhere, with undo
//! qemu      what one QEMU is and waits for; its process; settings that are put back afterwards
//! moves     moves that reached the point of decision, recorded, listed and finished later
//! journal   what is changed in a QEMU, in a file that outlives a towline that is killed
//! ```
//!
//! This crate drives stock QEMU over its control socket, with `towline_qmp`. The stream and the memory are `towline_migration`'s, which the
//! plans set to work between two ends.

#![deny(unsafe_code)]

pub mod check;
pub mod device;
pub mod journal;

pub mod moves;
pub mod plan;
mod private_dirs;
mod process;
pub mod qemu;
pub mod statistics;
pub mod status_server;
mod switchover;
