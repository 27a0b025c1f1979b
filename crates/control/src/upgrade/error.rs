//! Reasons for which a QEMU is not replaced. All of them are found before the guest stops.

use std::fmt;
use std::path::PathBuf;

use towline_launch::{LaunchError, MemoryFileError, ParseError, Refused, RuntimeError};

use crate::generations;
use crate::in_place;
use crate::qemu;

/// An option of the old QEMU that the new one cannot have unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncompatibleSetting {
    /// Key of the setting that changes it, as `netdev.net0`.
    pub setting: String,
    /// Value of the setting.
    pub found: String,
    /// The reason, and the remedy.
    pub reason: String,
}

impl fmt::Display for IncompatibleSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, found, reason } = self;
        write!(f, "{setting}")?;
        if !found.is_empty() {
            write!(f, "={found}")?;
        }
        write!(f, ": {reason}")
    }
}

/// Reason for which a QEMU is not replaced; its guest was not touched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The old QEMU could not be queried.
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    /// A cluster would miss its guest.
    #[error("{0}")]
    Generation(#[from] generations::Error),
    /// Memory that the exit of a QEMU would discard.
    #[error("{0}")]
    InPlace(#[source] in_place::Error),
    /// The process of the old QEMU is not known.
    #[error(
        "process of QEMU on {socket} is not known: {reason}; upgrade it on its own host, as its user and outside of containers"
    )]
    UnknownProcess { socket: String, reason: String },
    /// The user of the new QEMU would differ from that of the old one.
    #[error(
        "QEMU's process {pid} belongs to user {found}, towline runs as user {expected}; run towline as that user"
    )]
    OtherUser {
        pid: i32,
        found: u32,
        /// Effective user of this process.
        expected: u32,
    },
    /// The network, files or processes of the new QEMU would differ from those of the old one.
    #[error(
        "QEMU's process {pid} is in another {namespace} namespace; run towline there (`nsenter --target {pid} --all`)"
    )]
    OtherNamespace { pid: i32, namespace: &'static str },
    /// A file of `/proc` cannot be read.
    #[error("{}: {source}; towline needs QEMU's user", path.display())]
    Proc { path: PathBuf, source: std::io::Error },
    /// The old QEMU has an option that is not known.
    #[error(
        "command line of QEMU's process {pid}: {source}; move the guest to a QEMU that you start: towline move"
    )]
    CommandLine { pid: i32, source: ParseError },
    /// The program of the old QEMU cannot be started again by its name.
    #[error("program of QEMU's process {pid} is {found}, which is not a QEMU")]
    NoBinary { pid: i32, found: String },
    /// The new QEMU's confinement would differ, and towline may not change that.
    #[error(
        "the new QEMU would not be confined as the old one:\n  {}\nrun towline so confined, as the old QEMU was started, or change what \
         differs of the old QEMU; the control group of a service ends with it, so put the old QEMU into another one (cgroup.procs)",
        .0.join("\n  ")
    )]
    Confinement(Vec<String>),
    /// Options that the new QEMU cannot have unchanged.
    #[error("QEMU cannot be replaced with these options:\n  {}", list(.0))]
    Refused(Vec<IncompatibleSetting>),
    /// A setting or an argument of the user is at fault.
    #[error("{0}")]
    Arguments(#[from] Refused),
    /// A card that only one QEMU can have.
    #[error(
        "the process at {}, which has a network card, does not reply to a second QEMU: {source}", path.display()
    )]
    OneFrontend { path: PathBuf, source: Box<towline_channel::Error> },
    /// Memory that no other process can map.
    #[error(
        "memory backend {backend:?} ({kind}) cannot be mapped by another QEMU: {reason}. Its guest keeps it for as long as its QEMU \
         runs; start the next one with -object memory-backend-memfd,share=on and -machine memory-backend="
    )]
    PrivateMemory { backend: String, kind: String, reason: in_place::TransferReason },
    /// Memory of a file that the old QEMU maps privately, and that is not the guest's image.
    #[error(
        "memory backend {backend:?} maps {path} privately, and a new QEMU would begin with that file's content, which is not \
         known: {reason}; such a guest can only be moved to a QEMU that is started by hand (`towline move`)"
    )]
    PrivateFile {
        backend: String,
        path: String,
        /// Reason for which it is not an image that both QEMUs can map.
        reason: String,
    },
    /// The new QEMU cannot show which memory it maps.
    #[error(
        "QEMU {found} does not report which memory it maps, so the guest's cannot stay in place: expected 8.2 or later"
    )]
    OldTarget { found: towline_launch::QemuVersion },
    /// The memory cannot be mapped.
    #[error("{0}")]
    Memory(#[from] MemoryFileError),
    /// The directory of the new QEMU cannot be used.
    #[error("{0}")]
    Runtime(#[from] RuntimeError),
    /// The new QEMU did not start.
    #[error("{0}")]
    Launch(#[from] LaunchError),
}

impl From<in_place::Error> for Error {
    fn from(error: in_place::Error) -> Self {
        match error {
            // As for any query: the old QEMU may have ended.
            in_place::Error::Qemu(error) => Self::Qemu(error),
            error => Self::InPlace(error),
        }
    }
}

impl From<towline_qmp::Error> for Error {
    fn from(error: towline_qmp::Error) -> Self {
        Self::Qemu(error.into())
    }
}

fn list(refusals: &[IncompatibleSetting]) -> String {
    refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
}
