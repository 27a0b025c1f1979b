//! Errors of images.

use std::io;
use std::path::PathBuf;

use crate::checksum::CorruptChunk;
use crate::manifest::Digest;

/// Failure to read or write an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file cannot be written.
    #[error("{}: {source}{}", path.display(), advice(source))]
    Write { path: PathBuf, source: io::Error },
    /// The path is a Unix socket.
    #[error("{}: a Unix socket, not an image; a QEMU is named by its QMP socket, as qmp:{0}, and a stream as unix:{0}", path.display())]
    Socket { path: PathBuf },
    /// The path is a directory or a device.
    #[error("{}: not a regular file", path.display())]
    NotAFile { path: PathBuf },
    /// The file is not an image.
    #[error("{}: not an image: {found}, and an image begins with QEMU's \"QEVM\"; correct the path", path.display())]
    NotAnImage {
        path: PathBuf,
        /// First bytes of the file, or that it is empty.
        found: String,
    },
    /// The file is a migration stream without QEMU's mapped-ram layout.
    #[error("{}: a migration stream, but not one with mapped-ram", path.display())]
    NotMappedRam { path: PathBuf },
    /// The file is not a migration stream, or is damaged.
    #[error("{}: at byte {offset:#x}: {source}", path.display())]
    Format { path: PathBuf, offset: u64, source: towline_protocol::Error },
    /// The file ends too early.
    #[error("{}: truncated: it ends at byte {length:#x} inside {awaiting}", path.display())]
    Truncated {
        path: PathBuf,
        /// Length of the file in bytes.
        length: u64,
        awaiting: &'static str,
    },
    /// The guest is too large to be stored.
    #[error("{}: the stream announces {found} bytes of guest memory, at most {limit} can be stored in an image; check the source", path.display())]
    TooLarge {
        path: PathBuf,
        /// Sum of the stream's block list in bytes.
        found: u64,
        limit: u64,
    },
    /// The file lost pages while it was read.
    #[error("{}: not all of it could be read: the file has {found} bytes, expected {expected}; it was truncated while it was in use, or its disk fails: take another copy of it", path.display())]
    Lost {
        path: PathBuf,
        /// Length of the file in bytes.
        found: u64,
        /// Length of the file when it was opened.
        expected: u64,
    },
    /// The bytes between memory and device state are damaged.
    #[error("{}: at byte {offset:#x} the end of the memory is damaged; take another copy of the image or store the guest again", path.display())]
    MemoryEnd { path: PathBuf, offset: u64 },
    /// Another writer is about to replace a base.
    #[error("{}: it is about to be replaced by {holder}; wait for that, and take the new image as base", path.display())]
    BaseBusy {
        path: PathBuf,
        /// The process that replaces it, if known.
        holder: String,
    },
    /// A base was changed after the image's copy of its chunks had been deallocated.
    #[error("{}: its base {} was replaced or changed just before the image was complete, so the image was discarded; store the guest again", path.display(), base.display())]
    BaseChanged { path: PathBuf, base: PathBuf },
    /// The device state is truncated or damaged.
    #[error("{}: the device state at byte {offset:#x}: {source}", path.display())]
    DeviceState { path: PathBuf, offset: u64, source: towline_protocol::Error },
    /// There is no manifest to verify against.
    #[error("{}: there is no manifest beside it ({}), so there are no checksums to verify: it was made by QEMU itself, or its manifest was left behind", path.display(), sidecar.display())]
    NoManifest {
        path: PathBuf,
        /// Path at which the manifest was expected.
        sidecar: PathBuf,
    },
    /// A chunk differs from its checksum.
    #[error("{}: {source}", path.display())]
    Corrupt { path: PathBuf, source: Box<CorruptChunk> },
    /// An incremental image has no manifest, which would name its base.
    #[error("{}: an incremental image, but there is no manifest beside it ({}) that names its base: copy both files", path.display(), sidecar.display())]
    NoBase {
        path: PathBuf,
        /// Path at which the manifest was expected.
        sidecar: PathBuf,
    },
    /// The base of an incremental image is missing or damaged.
    #[error("{}: an incremental image, and its base cannot be used: {source}; bring the base back (content {content}), to {} or beside the image", path.display(), base.display())]
    BaseUnusable {
        path: PathBuf,
        base: PathBuf,
        /// Content of the base when the image was stored.
        content: Digest,
        source: Box<Self>,
    },
    /// The base is another image than the one recorded.
    #[error("{}: its base {} is not the image that it was made on: its content is {found}, expected {expected}; bring that one back, no other will do", path.display(), base.display())]
    OtherBase {
        path: PathBuf,
        /// The file found in place of the base.
        base: PathBuf,
        found: String,
        /// Content of the base when the image was stored.
        expected: Digest,
    },
    /// The guest's RAM blocks differ from the base's.
    #[error("{}: the guest has {found}, its base {} has {expected}: another guest, or another memory size", path.display(), base.display())]
    BaseDiffers {
        path: PathBuf,
        base: PathBuf,
        /// The first RAM block that differs.
        found: String,
        expected: String,
    },
    /// The chain has too many images.
    #[error("{}: it is based on more images than the {limit} that a chain may have: copy it, or its base, to a whole image (`towline copy IMAGE NEW`)", path.display())]
    ChainTooLong {
        path: PathBuf,
        /// The limit, itself included.
        limit: usize,
    },
    /// Other images are based on the image.
    #[error(
        "{}: {} is based on it: remove that first, or copy it to a whole image (`towline copy IMAGE NEW`); nothing was removed",
        path.display(),
        increments.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NeededBy {
        path: PathBuf,
        /// The images that are based on it.
        increments: Vec<PathBuf>,
    },
    /// Another image may be based on the image.
    #[error("{}: {} may be based on it, but {why}: repair or remove that first; nothing was removed", path.display(), other.display())]
    UnknownBases { path: PathBuf, other: PathBuf, why: String },
    /// The path of the image to remove is a symbolic link.
    #[error("{}: a symbolic link; name the image itself, or remove the link with rm; nothing was removed", path.display())]
    SymbolicLink { path: PathBuf },
    /// The image was removed without its manifest or its working set.
    #[error("{}: the image was removed, but not {}: {source}; remove that file by hand", path.display(), part.display())]
    PartRemains { path: PathBuf, part: PathBuf, source: io::Error },
    /// Processes read the image.
    #[error("{}: it is in use by {}: try again when they have finished; nothing was removed", path.display(), users.join(", "))]
    InUse { path: PathBuf, users: Vec<String> },
    /// The image would replace one of its own bases.
    #[error("{}: the image would replace {}, which it is based on: choose another name", path.display(), base.display())]
    OwnBase {
        path: PathBuf,
        /// The file of the chain that has this name.
        base: PathBuf,
    },
    /// The base's path cannot be recorded in a manifest.
    #[error("{:?}: the path of a base must be UTF-8; rename it", path)]
    BasePath { path: PathBuf },
    /// The manifest is invalid.
    #[error("{0}")]
    Manifest(#[from] crate::manifest::Error),
    /// The image's file cannot be created.
    #[error("{0}")]
    AtomicFile(#[from] crate::atomic_file::Error),
    /// Error of a store, or of an image in one: `store::Error`, with the feature `store`.
    #[error("{0}")]
    Store(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The stream's items arrived in an unexpected order.
    #[error("{}: {what}", path.display())]
    Order { path: PathBuf, what: &'static str },
}

impl From<Error> for towline_migration::Error {
    fn from(error: Error) -> Self {
        Self::guest(error)
    }
}

#[cfg(not(feature = "store"))]
impl Error {
    /// Returns true if the same read may succeed later: never without object stores.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        false
    }
}

/// The result of every operation on an image.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Remedy, where there is one.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": free some space or choose another filesystem; the source keeps its guest and no partial file is left"
        }
        _ => "",
    }
}
