//! Errors of manifests.

use std::fmt;
use std::path::{Path, PathBuf};

use super::Digest;
use super::text::truncated;

/// Result of the operations of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to read or write a manifest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path is a directory, a FIFO or a device.
    #[error("{} is not a regular file, as a manifest must be; correct the path", path.display())]
    NotRegular { path: PathBuf },
    /// The manifest is longer than any manifest of this image.
    #[error("{}: {found} bytes, but a manifest of this image's blocks has at most {limit}; take the manifest that came with the image", path.display())]
    TooLong {
        path: PathBuf,
        /// Length of the manifest in bytes.
        found: u64,
        /// The limit for the image's block list.
        limit: u64,
    },
    /// The manifest is malformed.
    #[error("{}: invalid manifest: {why}; it is damaged or was changed: copy it again", path.display())]
    Json {
        path: PathBuf,
        /// The field or position, and the error there.
        why: String,
    },
    /// The file is JSON of another format.
    #[error("{}: `format` is {found:?}, expected \"towline-image\"; this is not an image's manifest, correct the path", path.display())]
    Format {
        path: PathBuf,
        /// Value of its `format`.
        found: String,
    },
    /// The manifest is newer than this program.
    #[error("{}: manifest version {found}, this towline reads 1 to {known}; use a towline that is as new as the one that made it", path.display())]
    Version { path: PathBuf, found: u32, known: u32 },
    /// A field contradicts another one or a limit.
    #[error("{}: `{field}` is {found}, expected {expected}; the manifest is damaged or was changed: copy it again", path.display())]
    Field {
        path: PathBuf,
        /// The field, e.g. `blocks[2].length`.
        field: String,
        found: String,
        expected: String,
    },
    /// The manifest describes another guest than the image.
    #[error("{}: `{field}` is {found}, the image has {expected}; the manifest belongs to another image: take the one that came with this image", path.display())]
    Differs {
        path: PathBuf,
        /// The field, e.g. `blocks[2].length`.
        field: String,
        found: String,
        expected: String,
    },
    /// The image does not have the length in its manifest.
    #[error("{}: the image has {found} bytes, its manifest {} says {expected}; it was truncated or changed, or is another image: copy both again", image.display(), path.display())]
    ImageLength { path: PathBuf, image: PathBuf, found: u64, expected: u64 },
    /// The manifest belongs to another image.
    #[error("{} has the identity {found}, its manifest {} was made for {expected}; they do not belong together: take the manifest that came with this image", image.display(), path.display())]
    OtherImage { path: PathBuf, image: PathBuf, found: Digest, expected: Digest },
    /// The image's seal belongs to another manifest.
    #[error("{}: its BLAKE3 is {found}, the image {} was stored with a manifest of {expected}; the manifest is damaged, was changed or is another image's, or the image is damaged there: copy both again", path.display(), image.display())]
    Seal {
        path: PathBuf,
        image: PathBuf,
        /// Hash of the manifest's text.
        found: Digest,
        expected: Digest,
    },
    /// The image has no seal where the manifest expects it.
    #[error("{}: at byte {offset:#x} the hash of its manifest {} is missing; the image is damaged there, or the manifest is another image's: copy both again", image.display(), path.display())]
    NoSeal { path: PathBuf, image: PathBuf, offset: u64 },
    /// A page bitmap differs from the stored one.
    #[error("{}: block {block:?}: the BLAKE3 of its page bitmap is {found}, the manifest {} says {expected}; the image is damaged there: take another copy of it or store the guest again", image.display(), path.display())]
    Bitmap {
        path: PathBuf,
        image: PathBuf,
        block: String,
        /// Hash of the bitmap in the image.
        found: Box<Digest>,
        expected: Box<Digest>,
    },
    /// A page bitmap has another number of pages than the stored one.
    #[error("{}: block {block:?}: its page bitmap has {found} pages with content, the manifest {} says {expected}; the image is damaged there: take another copy of it or store the guest again", image.display(), path.display())]
    PageCount { path: PathBuf, image: PathBuf, block: String, found: u64, expected: u64 },
    /// The image belongs to the manifest, except for its device state.
    #[error("{}: the device state{place}: its BLAKE3 is {found}, the manifest {} says {expected}; the image is damaged there, or the manifest is of another image of such a guest: copy both again", image.display(), path.display())]
    DeviceState {
        path: PathBuf,
        image: PathBuf,
        /// The device that differs, if it is only one; else empty.
        place: String,
        /// Hash of the device state in the image.
        found: Box<Digest>,
        expected: Digest,
    },
    /// The manifest cannot be read.
    #[error("{}: {op}: {source}; check that the file may be read by this user", path.display())]
    Io { op: &'static str, path: PathBuf, source: std::io::Error },
}

impl Error {
    pub(super) fn invalid_json(path: &Path, error: &serde_json::Error) -> Self {
        Self::Json { path: path.into(), why: truncated(&error.to_string()) }
    }

    pub(super) fn field(
        path: &Path,
        field: String,
        found: impl fmt::Display,
        expected: impl fmt::Display,
    ) -> Self {
        Self::Field {
            path: path.into(),
            field,
            found: truncated(&found.to_string()),
            expected: expected.to_string(),
        }
    }
}
