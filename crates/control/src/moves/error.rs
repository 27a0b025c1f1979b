//! Error of a record, or of a move that cannot be finished.

use std::io;
use std::path::PathBuf;

use super::record::{self, Id};
use crate::journal::RuntimeDirectoryError;
use crate::qemu;

/// Error of a record, or of a move that cannot be finished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No directory for records.
    #[error("{0}")]
    Directory(#[from] RuntimeDirectoryError),
    /// The record cannot be read or written.
    #[error("record {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a record of this version.
    #[error(
        "record {path}: expected a record of version {} of this user, found another ({reason}): use the towline that wrote it; or look at both \
         QEMUs, run the guest at one of them only (`cont`), and remove the file",
        record::VERSION
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// A towline works on the move.
    #[error("another towline (process {pid}) works on move {id}: wait until it has ended, or end it first")]
    InUse {
        /// The move.
        id: Id,
        /// The process of that towline.
        pid: i32,
    },
    /// No record has this id.
    #[error("no move {id} is recorded on this host for this user; `towline moves` lists those that are")]
    Unknown {
        /// The id as given.
        id: String,
    },
    /// Several records have this id.
    #[error("{id} is the beginning of several moves: {}; give more of its digits", shown(.found))]
    Ambiguous {
        /// The id as given.
        id: String,
        /// Ids that it may mean.
        found: Vec<Id>,
    },
    /// A QEMU failed.
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    /// The guest should have been started, and does not run.
    #[error("QEMU on {socket} got `cont`, and its status is `{status}`; its own log says why")]
    NotRunning {
        /// The monitor's socket.
        socket: String,
        /// Run state of the guest.
        status: String,
    },
    /// The choice contradicts the state of the QEMUs.
    #[error("refused: {text}")]
    Refused {
        /// The state of the move, and what can be done.
        text: String,
    },
    /// The guest of this source was sent elsewhere, or was paused, when it was copied.
    #[error("{text}")]
    Left {
        /// The record, and what can be done.
        text: String,
    },
}

fn shown(ids: &[Id]) -> String {
    ids.iter().map(Id::as_str).collect::<Vec<_>>().join(", ")
}
