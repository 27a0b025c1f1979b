//! Reasons for which memory is sent.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use super::file_id::FileId;

/// Reason for which a block's memory is not proven to be at the destination, so its pages are sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferReason {
    /// The guest has other memory than the image.
    #[error("the guest and {} do not have the same block {block:?}: memory was plugged, or it is not this guest's image", path.display())]
    OtherBlock { block: String, path: PathBuf },
    /// No `memory-backend-*` object has the block's name.
    #[error("no memory backend of QEMU has its name: only blocks of backends are mapped")]
    NoBackend,
    /// The backend is of another type.
    #[error("its backend is a {found}, expected a memory-backend-file with mem-path= of the file")]
    BackendType { found: String },
    /// The destination is too old.
    #[error("QEMU {found} cannot map a range of an image: offset= and rom= are in 8.2 and later")]
    OldQemu { found: String },
    /// The sizes differ.
    #[error("its backend has {found} bytes, expected {expected}: give size= the size of the block")]
    Size { found: u64, expected: u64 },
    /// The guest could not write.
    #[error("QEMU maps it read-only, so its guest could not write: start QEMU with rom=off")]
    ReadOnly,
    /// QEMU does not report the block's address, and nothing else identifies its memory.
    #[error("QEMU {found} does not report its address (`info ramblock`), and its size is not unique")]
    NoAddress { found: String },
    /// The process of a QEMU is not known.
    #[error("QEMU's process is not identified: {why}")]
    UnknownProcess { why: String },
    /// The mappings of the process cannot be read.
    #[error("{}: {text}; towline needs QEMU's user or CAP_SYS_PTRACE, and no sandbox (--sandbox none)", path.display())]
    Unreadable { path: PathBuf, text: String },
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
    OtherFile { path: String, found: FileId, expected: FileId },
    /// The range begins elsewhere in the file.
    #[error("QEMU maps {path} from byte {found} on, expected {expected}: start QEMU with offset={expected}")]
    Offset {
        path: String,
        /// First mapped byte.
        found: u64,
        /// First byte of the block in it.
        expected: u64,
    },
    /// The memory is not the other QEMU's.
    #[error("QEMU maps {path} ({found}), which the QEMU that has the guest does not map shared with it")]
    NotSharedWithSource { path: String, found: FileId },
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
    PrivateCopies { bytes: u64 },
    /// The file of the memory has content.
    #[error("{} has content at byte {offset}", path.display())]
    OldContent { path: PathBuf, offset: u64 },
    /// QEMU has a file open that is not the one of this name.
    #[error("QEMU does not have {} open: the file was replaced after QEMU had opened it", path.display())]
    NotOpen { path: PathBuf },
    /// QEMU has a file open whose mappings cannot be distinguished from those of the image.
    #[error(
        "QEMU has a file of another device open that has the inode number of {}, so its mappings may belong to either (btrfs subvolumes)",
        path.display()
    )]
    Ambiguous { path: PathBuf },
    /// The image is on overlayfs.
    #[error(
        "{} is on overlayfs, where QEMU may have another file open by its name and number: map it from the filesystem below",
        path.display()
    )]
    Overlay { path: PathBuf },
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
    StaleContent { path: PathBuf, offset: u64 },
    /// Another process has the image locked, to replace it.
    #[error("another towline is about to replace {}", path.display())]
    Locked { path: PathBuf },
    /// The file cannot be examined.
    #[error("{}: {text}", path.display())]
    File { path: PathBuf, text: String },
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
