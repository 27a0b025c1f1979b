//! Reasons for which memory is sent, and for which a copy is refused.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use super::file_id::FileId;
use crate::{generations, qemu};

/// Reason for which a block's memory is not proven to be at the destination, so its pages are sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferReason {
    /// The guest has other memory than the image.
    #[error("the guest and {} do not have the same block {block:?}: memory was plugged, or it is not this guest's image", path.display())]
    OtherBlock {
        /// Name of the block.
        block: String,
        /// The image.
        path: PathBuf,
    },
    /// No `memory-backend-*` object has the block's name.
    #[error("no memory backend of QEMU has its name: only blocks of backends are mapped")]
    NoBackend,
    /// The backend is of another type.
    #[error("its backend is a {found}, expected a memory-backend-file with mem-path= of the file")]
    BackendType {
        /// Type of the backend.
        found: String,
    },
    /// The destination is too old.
    #[error("QEMU {found} cannot map a range of an image: offset= and rom= are in 8.2 and later")]
    OldQemu {
        /// Version of the QEMU.
        found: String,
    },
    /// The sizes differ.
    #[error("its backend has {found} bytes, expected {expected}: give size= the size of the block")]
    Size {
        /// Bytes of the backend.
        found: u64,
        /// Bytes of the block.
        expected: u64,
    },
    /// The guest could not write.
    #[error("QEMU maps it read-only, so its guest could not write: start QEMU with rom=off")]
    ReadOnly,
    /// QEMU does not report the block's address, and nothing else identifies its memory.
    #[error("QEMU {found} does not report its address (`info ramblock`), and its size is not unique")]
    NoAddress {
        /// Version of the QEMU.
        found: String,
    },
    /// The process of a QEMU is not known.
    #[error("QEMU's process is not identified: {why}")]
    UnknownProcess {
        /// The reason.
        why: String,
    },
    /// The mappings of the process cannot be read.
    #[error("{}: {text}; towline needs QEMU's user or CAP_SYS_PTRACE, and no sandbox (--sandbox none)", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Text of the error.
        text: String,
    },
    /// A part of the block is not mapped.
    #[error("a part of it is not mapped in QEMU's process")]
    NotMapped,
    /// The memory is of no file.
    #[error("QEMU's process has private memory there, not a file")]
    Anonymous,
    /// The memory belongs to several files, or is not in order.
    #[error("it is mapped in parts that are not one range of one file")]
    NotContiguous,
    /// QEMU maps another file.
    #[error(
        "QEMU maps {path} ({found}), expected {expected}: the file was replaced after QEMU had opened it, or is another one"
    )]
    OtherFile {
        /// Name of the mapped file.
        path: String,
        /// The mapped file.
        found: FileId,
        /// The expected file.
        expected: FileId,
    },
    /// The range begins elsewhere in the file.
    #[error("QEMU maps {path} from byte {found} on, expected {expected}: start QEMU with offset={expected}")]
    Offset {
        /// Name of the mapped file.
        path: String,
        /// First mapped byte.
        found: u64,
        /// First byte of the block in it.
        expected: u64,
    },
    /// The memory is not the other QEMU's.
    #[error("QEMU maps {path} ({found}), which the QEMU that has the guest does not map shared with it")]
    NotSharedWithSource {
        /// Name of the mapped file.
        path: String,
        /// The mapped file.
        found: FileId,
    },
    /// Writes would not reach the memory that both should have.
    #[error(
        "QEMU maps it with share=off, so it has private copies of the pages that it writes: start QEMU with share=on"
    )]
    Private,
    /// QEMU may change the image.
    #[error(
        "QEMU has the image open for writing, so its guest could change it: start QEMU with share=off,readonly=on,rom=off"
    )]
    WritableImage,
    /// A page of the mapping is no longer the file's.
    #[error(
        "QEMU has {bytes} bytes of private copies of it, whose content is not known: start QEMU without prealloc, and let nothing \
         write before the guest is there"
    )]
    PrivateCopies {
        /// Bytes of the copies.
        bytes: u64,
    },
    /// The file of the memory has content.
    #[error("{} has content at byte {offset}", path.display())]
    OldContent {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
    },
    /// QEMU has a file open that is not the one of this name.
    #[error("QEMU does not have {} open: the file was replaced after QEMU had opened it", path.display())]
    NotOpen {
        /// The file.
        path: PathBuf,
    },
    /// QEMU has a file open whose mappings cannot be distinguished from those of the image.
    #[error(
        "QEMU has a file of another device open that has the inode number of {}, so its mappings may belong to either (btrfs subvolumes)",
        path.display()
    )]
    Ambiguous {
        /// The file.
        path: PathBuf,
    },
    /// The image is on overlayfs.
    #[error(
        "{} is on overlayfs, where QEMU may have another file open by its name and number: map it from the filesystem below",
        path.display()
    )]
    Overlay {
        /// The image.
        path: PathBuf,
    },
    /// The kernel does not report private copies.
    #[error(
        "the kernel does not report whether QEMU has private copies of it (no Anonymous in /proc/PID/smaps)"
    )]
    PrivateCopiesUnknown,
    /// The image has no page bitmap bit where its file has content.
    #[error(
        "{} has old content at byte {offset}, where the guest has zeros, as QEMU leaves it in images of running guests: `towline copy \
         IMAGE NEW` makes an image without",
        path.display()
    )]
    StaleContent {
        /// The image.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
    },
    /// Another process has the image locked, to replace it.
    #[error("another towline is about to replace {}", path.display())]
    Locked {
        /// The image.
        path: PathBuf,
    },
    /// The file cannot be examined.
    #[error("{}: {text}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Text of the error.
        text: String,
    },
}

impl TransferReason {
    /// A file cannot be examined.
    pub(super) fn file(path: &Path, error: impl Display) -> Self {
        Self::File { path: path.to_owned(), text: error.to_string() }
    }

    /// A file of a process cannot be read.
    pub(super) fn unreadable(path: PathBuf, error: impl Display) -> Self {
        Self::Unreadable { path, text: error.to_string() }
    }
}

/// Reason for which a copy, or an upgrade, is refused: it would damage memory that is in use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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
    Managed {
        /// Name of the guest.
        name: String,
        /// Directory of its generations.
        directory: PathBuf,
    },
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
    Changed {
        /// The image.
        path: PathBuf,
    },
    /// A QEMU that must map the image does not.
    #[error("QEMU on {socket} does not map its memory from {}: {reason}", path.display())]
    NotMapped {
        /// The monitor's socket.
        socket: String,
        /// The image.
        path: PathBuf,
        /// Reason for it.
        reason: TransferReason,
    },
    /// A restored guest could change the image.
    #[error(
        "QEMU on {socket} has the image {} open for writing (memory backend {backend:?}), so its guest's writes or its balloon \
         would change the image: start it with share=off,readonly=on,rom=off, or with its own copy of the image (a reflink)",
        path.display()
    )]
    ImageWritable {
        /// The monitor's socket.
        socket: String,
        /// Id of the backend.
        backend: String,
        /// The image.
        path: PathBuf,
    },
    /// A restored guest might change the image.
    #[error(
        "QEMU on {socket} shares a file (memory backend {backend:?}) that may be the image: {reason}; start it with share=off, or run \
         towline as QEMU's user or as root"
    )]
    UndecidedFile {
        /// The monitor's socket.
        socket: String,
        /// Id of the backend.
        backend: String,
        /// Reason for which it cannot be seen.
        reason: TransferReason,
    },
    /// One QEMU's exit would discard the memory of the other.
    #[error(
        "memory backend {backend:?} of QEMU on {socket} has discard-data=on: its exit would discard memory that the other QEMU uses; \
         start QEMU with discard-data=off"
    )]
    DiscardsData {
        /// The monitor's socket.
        socket: String,
        /// Id of the backend.
        backend: String,
    },
    /// A QEMU that loads would write into the guest that another one runs.
    #[error(
        "RAM block {block:?} of QEMU on {socket} is memory of the other QEMU's guest, and not that block of it: {reason}; loading would \
         write into the guest"
    )]
    ForeignMemory {
        /// The monitor's socket.
        socket: String,
        /// The block.
        block: String,
        /// The difference.
        reason: TransferReason,
    },
    /// A QEMU that loads might write into the guest that another one runs.
    #[error(
        "RAM block {block:?} of QEMU on {socket} is mapped shared, and may be memory of the other QEMU's guest: {reason}; loading could \
         write into the guest. Start QEMU 8.2 or later, as towline's user, with separate memory or with all of the guest's"
    )]
    UndecidedMemory {
        /// The monitor's socket.
        socket: String,
        /// The block.
        block: String,
        /// Reason for which it is not proven to be that block of the guest.
        reason: TransferReason,
    },
    /// The guest does not run on the image.
    #[error("the guest of QEMU on {socket} does not run on {}: {reason}", image.display())]
    NotBased {
        /// The monitor's socket.
        socket: String,
        /// The image.
        image: PathBuf,
        /// The reason.
        reason: TransferReason,
    },
    /// A drive of which no overlay is possible.
    #[error(
        "the guest of QEMU on {socket} writes to drive {drive} ({file}), of which no overlay is possible: no option of QEMU's \
         command line names it with this file and its format; start the guest with such a drive, or unplug it"
    )]
    NoOverlay {
        /// The monitor's socket.
        socket: String,
        /// The drive.
        drive: String,
        /// Its file.
        file: String,
    },
    /// A drive with too many backing files.
    #[error(
        "drive {drive} of the guest of QEMU on {socket} has a chain of {found} files, and one more would be added, expected at most \
         {expected}: have QEMU join them (`towline ctl {socket} block-stream device={node} base={base}`), then try again"
    )]
    LongChain {
        /// The monitor's socket.
        socket: String,
        /// The drive.
        drive: String,
        /// Its node.
        node: String,
        /// The file above which the others can be joined.
        base: String,
        /// Number of files.
        found: usize,
        /// Maximum number.
        expected: usize,
    },
    /// An overlay of a drive could not be made.
    #[error("{0}")]
    Overlay(#[from] towline_launch::OverlayError),
    /// An overlay cannot be QEMU's.
    #[error("overlay {} cannot belong to QEMU's user: {source}; run towline as that user or as root", path.display())]
    Owner {
        /// The overlay.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// A drive has another file than the overlays were planned with.
    #[error(
        "drive {drive} of the guest of QEMU on {socket} was changed meanwhile, perhaps by another fork or copy; try again"
    )]
    DriveChanged {
        /// The monitor's socket.
        socket: String,
        /// The drive.
        drive: String,
    },
    /// The guest neither runs nor is paused.
    #[error("the guest of QEMU on {socket} is {state}, expected one that runs or is paused")]
    OtherState {
        /// The monitor's socket.
        socket: String,
        /// Its state.
        state: String,
    },
    /// A running guest could not be taken; it runs on.
    #[error("the guest of QEMU on {socket} cannot be taken as it runs: {source}")]
    NotCaptured {
        /// The monitor's socket.
        socket: String,
        /// The error.
        source: std::io::Error,
    },
    /// A copy of the image that shares its storage could not be made.
    #[error(
        "a reflink of {} cannot be made beside it: {source}; keep it on a filesystem with FICLONE (XFS, btrfs), in a directory in which \
         you may write",
        image.display()
    )]
    Reflink {
        /// The image.
        image: PathBuf,
        /// The error.
        source: std::io::Error,
    },
}

impl From<towline_qmp::Error> for Error {
    fn from(error: towline_qmp::Error) -> Self {
        Self::Qemu(error.into())
    }
}
