//! What can be wrong with an image.

use std::io;
use std::path::PathBuf;

use crate::checksum::CorruptChunk;
use crate::manifest::Digest;

/// An image that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("{}: {source}{}", path.display(), advice(source))]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory or device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// Which.
        path: PathBuf,
    },
    /// It is some other file.
    #[error("{}: not an image: {found}, and an image begins with QEMU's \"QEVM\"; correct the path", path.display())]
    NotAnImage {
        /// Which.
        path: PathBuf,
        /// What it is, or begins with.
        found: String,
    },
    /// It is a migration stream without QEMU's mapped-ram layout.
    #[error("{}: a migration stream, but not one with mapped-ram: convert it with `towline copy --return-path off exec:'cat FILE' file:IMAGE`", path.display())]
    NotMappedRam {
        /// Which.
        path: PathBuf,
    },
    /// It is no migration stream, or a broken one.
    #[error("{}: at byte {offset:#x}: {source}", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        source: towline_protocol::Error,
    },
    /// It ends too early.
    #[error("{}: truncated: it ends at byte {length:#x} inside {awaiting}", path.display())]
    Truncated {
        /// Which.
        path: PathBuf,
        /// Its length in bytes.
        length: u64,
        /// What was to come next.
        awaiting: &'static str,
    },
    /// A guest larger than any that is stored.
    #[error("{}: the guest says that it has {found} bytes of memory, at most {limit} are stored in an image: does it really?", path.display())]
    TooLarge {
        /// Which image was to be written.
        path: PathBuf,
        /// What the stream's block list adds up to.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The file lost pages while it was read.
    #[error("{}: not all of it could be read: the file has {found} bytes, expected {expected}; it was cut short while it was in use, or its disk fails: take another copy of it", path.display())]
    Lost {
        /// Which.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// Its length when it was opened.
        expected: u64,
    },
    /// What stands between memory and device state is not what was stored.
    #[error("{}: at byte {offset:#x} the end of the memory is damaged; take another copy of the image or store the guest again", path.display())]
    MemoryEnd {
        /// Which.
        path: PathBuf,
        /// Where it should begin.
        offset: u64,
    },
    /// Another image is about to take the place of a base.
    #[error("{}: it is about to be replaced by {holder}; wait for that, and take the new image as base", path.display())]
    BaseBusy {
        /// The base.
        path: PathBuf,
        /// The process that replaces it, as far as it can be told.
        holder: String,
    },
    /// A base was changed when what it has was dropped already.
    #[error("{}: its base {} was replaced or changed in the moment in which the image was to appear: the image was dropped; store the guest again", path.display(), base.display())]
    BaseChanged {
        /// The image.
        path: PathBuf,
        /// Its base.
        base: PathBuf,
    },
    /// Its device state is cut off or broken.
    #[error("{}: the device state at byte {offset:#x}: {source}", path.display())]
    DeviceState {
        /// Which.
        path: PathBuf,
        /// Where it begins.
        offset: u64,
        /// What is wrong.
        source: towline_protocol::Error,
    },
    /// Nothing to verify against.
    #[error("{}: there is no manifest beside it ({}), so there are no checksums to verify: it was made by QEMU itself, or its manifest was left behind", path.display(), sidecar.display())]
    NoManifest {
        /// Which.
        path: PathBuf,
        /// Where the manifest was looked for.
        sidecar: PathBuf,
    },
    /// A chunk is not what was stored.
    #[error("{}: {source}", path.display())]
    Corrupt {
        /// Which.
        path: PathBuf,
        /// Where, and what was found.
        source: Box<CorruptChunk>,
    },
    /// An incremental image without what says on which.
    #[error("{}: an incremental image, but there is no manifest beside it ({}) that names its base: copy both files", path.display(), sidecar.display())]
    NoBase {
        /// Which.
        path: PathBuf,
        /// Where its manifest was looked for.
        sidecar: PathBuf,
    },
    /// An incremental image's base is missing or broken.
    #[error("{}: an incremental image, and its base cannot be used: {source}; bring the base back (content {content}), to {} or beside the image", path.display(), base.display())]
    BaseUnusable {
        /// The image.
        path: PathBuf,
        /// Its base.
        base: PathBuf,
        /// What the base held.
        content: Digest,
        /// What is wrong with it.
        source: Box<Self>,
    },
    /// The base is another image by now.
    #[error("{}: its base {} is not the image that it was made on: its content is {found}, expected {expected}; bring that one back, no other will do", path.display(), base.display())]
    OtherBase {
        /// The image.
        path: PathBuf,
        /// What was found where its base was.
        base: PathBuf,
        /// What that holds.
        found: String,
        /// What its base held.
        expected: Digest,
    },
    /// The guest is not the base's.
    #[error("{}: the guest has {found}, its base {} has {expected}: another guest, or another memory size; store it whole, without --base", path.display(), base.display())]
    BaseDiffers {
        /// The image.
        path: PathBuf,
        /// Its base.
        base: PathBuf,
        /// The first RAM block that differs.
        found: String,
        /// What the base has there.
        expected: String,
    },
    /// A chain of too many images.
    #[error("{}: it is based on more images than the {limit} that a chain may have: make a whole one of it (`towline copy IMAGE NEW`), if it can still be read, or of its base", path.display())]
    ChainTooLong {
        /// The image.
        path: PathBuf,
        /// The limit, itself included.
        limit: usize,
    },
    /// An image that would replace what it is based on.
    #[error("{}: the image would replace {}, which it is based on: choose another name", path.display(), base.display())]
    OwnBase {
        /// The image.
        path: PathBuf,
        /// The file of its chain that has this name.
        base: PathBuf,
    },
    /// A base that no manifest can name.
    #[error("{:?}: its path is not UTF-8, and so no base of an image: rename it", path)]
    BasePath {
        /// The base.
        path: PathBuf,
    },
    /// The manifest cannot be used.
    #[error(transparent)]
    Manifest(#[from] crate::manifest::Error),
    /// The image's file cannot be made.
    #[error(transparent)]
    AtomicFile(#[from] crate::atomic_file::Error),
    /// A store, or an image in one.
    #[cfg(feature = "store")]
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    /// A stream came in another order than the engine's.
    #[error("{}: {what}", path.display())]
    Order {
        /// Which image was to be written.
        path: PathBuf,
        /// What was missing.
        what: &'static str,
    },
}

/// The result of every operation on an image.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The way out, where there is one.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": make room there or choose another place; the guest runs on at its source and nothing was left behind"
        }
        _ => "",
    }
}
