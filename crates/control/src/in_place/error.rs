//! Reasons for which a copy is refused.

use std::path::PathBuf;

use super::transfer_reason::TransferReason;
use crate::{generations, qemu};

/// Reason for which a copy, or an upgrade, is refused: it would damage memory that is in use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A QEMU could not be asked.
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    /// A cluster starts the guest from the disks that it has now.
    #[error(
        "guest {name} is run by a cluster, by its generations in {}: its disks cannot be kept, since the cluster would not find the \
         overlays in which it continues, and start it from older disks; record or fork guests of no cluster, or without disks",
        directory.display()
    )]
    Managed { name: String, directory: PathBuf },
    /// It is not known whether a cluster runs the guest.
    #[error("{0}")]
    Generations(#[from] generations::Error),
    /// A reflink cannot be read.
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    /// Memory of the image differs from its manifest.
    #[error("{0}")]
    Damaged(#[source] towline_migration::Error),
    /// The image was written while the guest was restored from it.
    #[error(
        "{} was changed while a guest was restored from it, so the guest would have parts of both; start QEMU again, and replace \
         images by renaming only",
        path.display()
    )]
    Changed { path: PathBuf },
    /// A QEMU that must map the image does not.
    #[error("QEMU on {socket} does not map its memory from {}: {reason}", path.display())]
    NotMapped { socket: String, path: PathBuf, reason: TransferReason },
    /// A restored guest could change the image.
    #[error(
        "QEMU on {socket} has the image {} open for writing (memory backend {backend:?}), so its guest's writes or its balloon \
         would change the image: start it with share=off,readonly=on,rom=off, or with its own copy of the image (a reflink)",
        path.display()
    )]
    ImageWritable { socket: String, backend: String, path: PathBuf },
    /// A restored guest might change the image.
    #[error(
        "QEMU on {socket} shares a file (memory backend {backend:?}) that may be the image: {reason}; start it with share=off, or run \
         towline as QEMU's user or as root"
    )]
    UndecidedFile {
        socket: String,
        backend: String,
        /// Reason for which it cannot be seen.
        reason: TransferReason,
    },
    /// One QEMU's exit would discard the memory of the other.
    #[error(
        "memory backend {backend:?} of QEMU on {socket} has discard-data=on: its exit would discard memory that the other QEMU uses; \
         start QEMU with discard-data=off"
    )]
    DiscardsData { socket: String, backend: String },
    /// A QEMU that loads would write into the guest that another one runs.
    #[error(
        "RAM block {block:?} of QEMU on {socket} is memory of the other QEMU's guest, and not that block of it: {reason}; loading would \
         write into the guest"
    )]
    ForeignMemory { socket: String, block: String, reason: TransferReason },
    /// A QEMU that loads might write into the guest that another one runs.
    #[error(
        "RAM block {block:?} of QEMU on {socket} is mapped shared, and may be memory of the other QEMU's guest: {reason}; loading could \
         write into the guest. Start QEMU 8.2 or later, as towline's user, with separate memory or with all of the guest's"
    )]
    UndecidedMemory {
        socket: String,
        block: String,
        /// Reason for which it is not proven to be that block of the guest.
        reason: TransferReason,
    },
    /// The guest does not run on the image.
    #[error("the guest of QEMU on {socket} does not run on {}: {reason}", image.display())]
    NotBased { socket: String, image: PathBuf, reason: TransferReason },
    /// A drive of which no overlay is possible.
    #[error(
        "the guest of QEMU on {socket} writes to drive {drive} ({file}), of which no overlay is possible: no option of QEMU's \
         command line names it with this file and its format; start the guest with such a drive, or unplug it"
    )]
    NoOverlay { socket: String, drive: String, file: String },
    /// A drive with too many backing files.
    #[error(
        "drive {drive} of the guest of QEMU on {socket} has a chain of {found} files, and one more would be added, expected at most \
         {expected}: have QEMU join them (`towline ctl {socket} block-stream device={node} base={base}`), then try again"
    )]
    LongChain {
        socket: String,
        drive: String,
        node: String,
        /// The file above which the others can be joined.
        base: String,
        found: usize,
        expected: usize,
    },
    /// An overlay of a drive could not be made.
    #[error("{0}")]
    Overlay(#[from] towline_launch::OverlayError),
    /// An overlay cannot be QEMU's.
    #[error("overlay {} cannot belong to QEMU's user: {source}; run towline as that user or as root", path.display())]
    Owner { path: PathBuf, source: std::io::Error },
    /// A drive has another file than the overlays were planned with.
    #[error(
        "drive {drive} of the guest of QEMU on {socket} was changed meanwhile, perhaps by another fork or copy; try again"
    )]
    DriveChanged { socket: String, drive: String },
    /// The guest neither runs nor is paused.
    #[error("the guest of QEMU on {socket} is {state}, expected one that runs or is paused")]
    OtherState { socket: String, state: String },
    /// A running guest could not be taken; it runs on.
    #[error("the guest of QEMU on {socket} cannot be taken as it runs: {source}")]
    NotCaptured { socket: String, source: std::io::Error },
    /// A copy of the image that shares its storage could not be made.
    #[error(
        "a reflink of {} cannot be made beside it: {source}; keep it on a filesystem with FICLONE (XFS, btrfs), in a directory in which \
         you may write",
        image.display()
    )]
    Reflink { image: PathBuf, source: std::io::Error },
}

impl From<towline_qmp::Error> for Error {
    fn from(error: towline_qmp::Error) -> Self {
        Self::Qemu(error.into())
    }
}
