//! Errors of queries to a QEMU and of its settings.

use std::fmt;

use serde_json::Value;
use towline_qmp as qmp;
use towline_qmp::commands::Capability;

use super::ram_block::RamBlockError;
use crate::journal;

/// Error of a query to a QEMU, or of its settings.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The monitor failed.
    #[error("{0}")]
    Qmp(#[from] qmp::Error),
    /// The output of `info ramblock` cannot be parsed.
    #[error("QEMU {version} on {socket}: {source}")]
    RamBlocks { socket: String, version: String, source: RamBlockError },
    /// The machine's type does not end in `-machine`.
    #[error("QEMU on {socket} names its machine {found}, expected text that ends in \"-machine\"")]
    Machine { socket: String, found: Value },
    /// Another or an unknown process listens on the socket.
    #[error("{socket} belongs to another process than the QEMU that was connected before")]
    OtherProcess { socket: String },
    /// A job of towline does not end.
    #[error("job {job} of QEMU on {socket} does not end; end it there (`block-job-cancel` with force)")]
    JobRuns { socket: String, job: String },
    /// Another host has its guest.
    #[error(
        "the guest of QEMU on {socket} goes on at the host that protected it, as generation {generation}: it was ended here"
    )]
    GoesOnElsewhere { socket: String, generation: u64 },
    /// Another towline works on it, or its journal cannot be used.
    #[error("{0}")]
    Journal(#[from] journal::Error),
    /// The QEMU has no such capability.
    #[error(
        "QEMU {version} on {socket} has no migration capability {capability}: use a QEMU that has it, or go without"
    )]
    UnknownCapability { capability: Capability, socket: String, version: String },
    /// The QEMU has no such parameter.
    #[error(
        "QEMU {version} on {socket} has no migration parameter {parameter}: use a QEMU that has it, or go without"
    )]
    UnknownParameter { parameter: String, socket: String, version: String },
}

impl Error {
    /// Returns true if no process listens at the monitor's socket.
    pub(crate) fn has_no_listener(&self) -> bool {
        matches!(self, Self::Qmp(qmp::Error::Missing { .. } | qmp::Error::Refused { .. }))
    }
}

/// Returns true if QEMU (7.2 to 11.1) says with these words that it may not use userfaultfd, which is a matter of rights on every kernel
/// that it supports.
pub fn lacks_userfaultfd(words: &str) -> bool {
    let known = [
        "Background-snapshot is not supported by host kernel",
        "Userfaultfd not available",
        "userfault",
        "Postcopy is not supported",
    ];
    known.iter().any(|known| words.contains(known))
}

/// Changes of a killed towline that were undone, and those that were not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairReport {
    /// The monitor's socket.
    pub socket: String,
    /// Process of the killed towline.
    pub owner: i32,
    /// Changes that were undone, as texts.
    pub done: Vec<String>,
    /// Changes that remain, with the reason. They stay in the journal.
    pub left: Vec<String>,
}

impl fmt::Display for RepairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { socket, owner, done, left } = self;
        write!(f, "QEMU on {socket} was left changed by a towline process that has exited (pid {owner})")?;
        if !done.is_empty() {
            write!(f, "; repaired: {}", done.join(", "))?;
        }
        if !left.is_empty() {
            write!(f, "; not repaired: {}", left.join(", "))?;
        }
        Ok(())
    }
}

/// Result of undoing one change: undone or obsolete, as these texts describe, or not undone, for this reason.
pub(super) type RecordOutcome = Result<Vec<String>, String>;
