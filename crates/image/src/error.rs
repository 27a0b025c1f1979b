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
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("{}: {source}{}", path.display(), advice(source))]
    Write {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The path is a Unix socket.
    #[error("{}: a Unix socket, not an image; a QEMU is named by its QMP socket, as qmp:{0}, and a stream as unix:{0}", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
    },
    /// The path is a directory or a device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file is not an image.
    #[error("{}: not an image: {found}, and an image begins with QEMU's \"QEVM\"; correct the path", path.display())]
    NotAnImage {
        /// The file.
        path: PathBuf,
        /// First bytes of the file, or that it is empty.
        found: String,
    },
    /// The file is a migration stream without QEMU's mapped-ram layout.
    #[error("{}: a migration stream, but not one with mapped-ram", path.display())]
    NotMappedRam {
        /// The file.
        path: PathBuf,
    },
    /// The file is not a migration stream, or is damaged.
    #[error("{}: at byte {offset:#x}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Offset of the error.
        offset: u64,
        /// The error.
        source: towline_protocol::Error,
    },
    /// The file ends too early.
    #[error("{}: truncated: it ends at byte {length:#x} inside {awaiting}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Length of the file in bytes.
        length: u64,
        /// The next item that was expected.
        awaiting: &'static str,
    },
    /// The guest is too large to be stored.
    #[error("{}: the stream announces {found} bytes of guest memory, at most {limit} can be stored in an image; check the source", path.display())]
    TooLarge {
        /// The image to be written.
        path: PathBuf,
        /// Sum of the stream's block list in bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The file lost pages while it was read.
    #[error("{}: not all of it could be read: the file has {found} bytes, expected {expected}; it was truncated while it was in use, or its disk fails: take another copy of it", path.display())]
    Lost {
        /// The file.
        path: PathBuf,
        /// Length of the file in bytes.
        found: u64,
        /// Length of the file when it was opened.
        expected: u64,
    },
    /// The bytes between memory and device state are damaged.
    #[error("{}: at byte {offset:#x} the end of the memory is damaged; take another copy of the image or store the guest again", path.display())]
    MemoryEnd {
        /// The file.
        path: PathBuf,
        /// Offset at which they are expected.
        offset: u64,
    },
    /// Another writer is about to replace a base.
    #[error("{}: it is about to be replaced by {holder}; wait for that, and take the new image as base", path.display())]
    BaseBusy {
        /// The base.
        path: PathBuf,
        /// The process that replaces it, if known.
        holder: String,
    },
    /// A base was changed after the image's copy of its chunks had been deallocated.
    #[error("{}: its base {} was replaced or changed just before the image was complete, so the image was discarded; store the guest again", path.display(), base.display())]
    BaseChanged {
        /// The image.
        path: PathBuf,
        /// Base of the image.
        base: PathBuf,
    },
    /// The device state is truncated or damaged.
    #[error("{}: the device state at byte {offset:#x}: {source}", path.display())]
    DeviceState {
        /// The file.
        path: PathBuf,
        /// Offset in the file.
        offset: u64,
        /// The error.
        source: towline_protocol::Error,
    },
    /// There is no manifest to verify against.
    #[error("{}: there is no manifest beside it ({}), so there are no checksums to verify: it was made by QEMU itself, or its manifest was left behind", path.display(), sidecar.display())]
    NoManifest {
        /// The image.
        path: PathBuf,
        /// Path at which the manifest was expected.
        sidecar: PathBuf,
    },
    /// A chunk differs from its checksum.
    #[error("{}: {source}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The chunk, and the two hashes.
        source: Box<CorruptChunk>,
    },
    /// An incremental image has no manifest, which would name its base.
    #[error("{}: an incremental image, but there is no manifest beside it ({}) that names its base: copy both files", path.display(), sidecar.display())]
    NoBase {
        /// The image.
        path: PathBuf,
        /// Path at which the manifest was expected.
        sidecar: PathBuf,
    },
    /// The base of an incremental image is missing or damaged.
    #[error("{}: an incremental image, and its base cannot be used: {source}; bring the base back (content {content}), to {} or beside the image", path.display(), base.display())]
    BaseUnusable {
        /// The image.
        path: PathBuf,
        /// Base of the image.
        base: PathBuf,
        /// Content of the base when the image was stored.
        content: Digest,
        /// The error of the base.
        source: Box<Self>,
    },
    /// The base is another image than the one recorded.
    #[error("{}: its base {} is not the image that it was made on: its content is {found}, expected {expected}; bring that one back, no other will do", path.display(), base.display())]
    OtherBase {
        /// The image.
        path: PathBuf,
        /// The file found in place of the base.
        base: PathBuf,
        /// Content of the file found.
        found: String,
        /// Content of the base when the image was stored.
        expected: Digest,
    },
    /// The guest's RAM blocks differ from the base's.
    #[error("{}: the guest has {found}, its base {} has {expected}: another guest, or another memory size", path.display(), base.display())]
    BaseDiffers {
        /// The image.
        path: PathBuf,
        /// Base of the image.
        base: PathBuf,
        /// The first RAM block that differs.
        found: String,
        /// The base's block in its place.
        expected: String,
    },
    /// The chain has too many images.
    #[error("{}: it is based on more images than the {limit} that a chain may have: copy it, or its base, to a whole image (`towline copy IMAGE NEW`)", path.display())]
    ChainTooLong {
        /// The image.
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
        /// The image to remove.
        path: PathBuf,
        /// The images that are based on it.
        increments: Vec<PathBuf>,
    },
    /// Another image may be based on the image.
    #[error("{}: {} may be based on it, but {why}: repair or remove that first; nothing was removed", path.display(), other.display())]
    UnknownBases {
        /// The image to remove.
        path: PathBuf,
        /// The image whose bases are unknown.
        other: PathBuf,
        /// The error of its manifest.
        why: String,
    },
    /// The path of the image to remove is a symbolic link.
    #[error("{}: a symbolic link; name the image itself, or remove the link with rm; nothing was removed", path.display())]
    SymbolicLink {
        /// The link.
        path: PathBuf,
    },
    /// The image was removed without its manifest or its working set.
    #[error("{}: the image was removed, but not {}: {source}; remove that file by hand", path.display(), part.display())]
    PartRemains {
        /// The removed image.
        path: PathBuf,
        /// The remaining file.
        part: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Processes read the image.
    #[error("{}: it is in use by {}: try again when they have finished; nothing was removed", path.display(), users.join(", "))]
    InUse {
        /// The image to remove.
        path: PathBuf,
        /// The processes.
        users: Vec<String>,
    },
    /// The image would replace one of its own bases.
    #[error("{}: the image would replace {}, which it is based on: choose another name", path.display(), base.display())]
    OwnBase {
        /// The image.
        path: PathBuf,
        /// The file of the chain that has this name.
        base: PathBuf,
    },
    /// The base's path cannot be recorded in a manifest.
    #[error("{:?}: the path of a base must be UTF-8; rename it", path)]
    BasePath {
        /// The base.
        path: PathBuf,
    },
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
    Order {
        /// The image to be written.
        path: PathBuf,
        /// The missing item.
        what: &'static str,
    },
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
