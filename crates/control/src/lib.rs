//! Drives the QEMUs of a migration over QMP, and connects the two ends of a copy.
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
//! This crate drives stock QEMU over its monitor with `towline_qmp`. `towline_migration` transfers the stream
//! and the memory between the two ends that a plan connects.

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
