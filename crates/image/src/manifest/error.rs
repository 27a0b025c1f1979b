//! What can be wrong with a manifest, and whose fault it is.

use std::fmt;
use std::path::{Path, PathBuf};

use super::Digest;

/// The result of every call here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Bytes of a hostile text that an error shows.
const SHOWN_BYTES_MAX: usize = 80;

/// Why a manifest cannot be used or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It is a directory, a FIFO or a device.
    #[error("{} is not a regular file, which a manifest is; correct the path", path.display())]
    NotRegular {
        /// What was found.
        path: PathBuf,
    },
    /// It is longer than any manifest of this image.
    #[error("{}: {found} bytes, but a manifest of this image's blocks has at most {limit}; take the manifest that came with the image", path.display())]
    TooLong {
        /// The manifest.
        path: PathBuf,
        /// Its bytes.
        found: u64,
        /// The limit for the image's block list.
        limit: u64,
    },
    /// Its text cannot be read.
    #[error("{}: no valid manifest: {why}; it is damaged or was changed: copy it again", path.display())]
    Json {
        /// The manifest.
        path: PathBuf,
        /// The field or place, and what is wrong there.
        why: String,
    },
    /// It is JSON of something else.
    #[error("{}: `format` is {found:?}, expected \"towline-image\"; this is not an image's manifest, correct the path", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What its `format` says.
        found: String,
    },
    /// It is newer than this program.
    #[error("{}: manifest version {found}, this towline reads 1 to {known}; use a towline that is as new as the one that made it", path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that is known here.
        known: u32,
    },
    /// A field contradicts the others or a limit.
    #[error("{}: `{field}` is {found}, expected {expected}; the manifest is damaged or was changed: copy it again", path.display())]
    Field {
        /// The manifest.
        path: PathBuf,
        /// The field, e.g. `blocks[2].length`.
        field: String,
        /// What it says.
        found: String,
        /// What it may say.
        expected: String,
    },
    /// It describes another guest than the image holds.
    #[error("{}: `{field}` is {found}, the image has {expected}; the manifest belongs to another image: take the one that came with this image", path.display())]
    Differs {
        /// The manifest.
        path: PathBuf,
        /// The field, e.g. `blocks[2].length`.
        field: String,
        /// What it says.
        found: String,
        /// What the image says.
        expected: String,
    },
    /// The image has not the length it was stored with.
    #[error("{}: the image has {found} bytes, its manifest {} says {expected}; it was cut short or changed, or is another image: copy both again", image.display(), path.display())]
    ImageLength {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// The image's bytes.
        found: u64,
        /// The manifest's idea of them.
        expected: u64,
    },
    /// The manifest was made for another image.
    #[error("{} has the identity {found}, its manifest {} was made for {expected}; they do not belong together: take the manifest that came with this image", image.display(), path.display())]
    OtherImage {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// The image's identity.
        found: Digest,
        /// The manifest's idea of it.
        expected: Digest,
    },
    /// The image names another text than its manifest has.
    #[error("{}: its BLAKE3 is {found}, the image {} was stored with a manifest of {expected}; the manifest is damaged, was changed or is another image's, or the image is damaged there: copy both again", path.display(), image.display())]
    Seal {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// The hash of the manifest's text.
        found: Digest,
        /// The hash that the image has.
        expected: Digest,
    },
    /// The image does not name its manifest's text where the manifest says so.
    #[error("{}: at byte {offset:#x} there is not the hash of its manifest {}; the image is damaged there, or the manifest is another image's: copy both again", image.display(), path.display())]
    NoSeal {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// Where it should be in the image.
        offset: u64,
    },
    /// A page bitmap is not the one that was stored.
    #[error("{}: block {block:?}: the BLAKE3 of its page bitmap is {found}, the manifest {} says {expected}; the image is damaged there: take another copy of it or store the guest again", image.display(), path.display())]
    Bitmap {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// The block's name.
        block: String,
        /// The hash of what is there.
        found: Box<Digest>,
        /// The hash of what was stored.
        expected: Box<Digest>,
    },
    /// A page bitmap has more or fewer pages than were stored.
    #[error("{}: block {block:?}: its page bitmap says that {found} pages have content, the manifest {} says {expected}; the image is damaged there: take another copy of it or store the guest again", image.display(), path.display())]
    PageCount {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// The block's name.
        block: String,
        /// Bits that are set.
        found: u64,
        /// Pages that were stored with content.
        expected: u64,
    },
    /// The head is the manifest's, the device state is not.
    #[error("{}: the device state{place}: its BLAKE3 is {found}, the manifest {} says {expected}; the image is damaged there, or the manifest is of another image of such a guest: copy both again", image.display(), path.display())]
    DeviceState {
        /// The manifest.
        path: PathBuf,
        /// The image.
        image: PathBuf,
        /// The device that differs, if it is only one; else empty.
        place: String,
        /// The hash of what is there.
        found: Box<Digest>,
        /// The hash of what was stored.
        expected: Digest,
    },
    /// The kernel does not let us read it.
    #[error("{}: {op}: {source}; check that the file may be read by this user", path.display())]
    Io {
        /// What was being done.
        op: &'static str,
        /// The manifest.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

impl Error {
    pub(super) fn invalid_json(path: &Path, error: &serde_json::Error) -> Self {
        Self::Json { path: path.into(), why: shown(&error.to_string()) }
    }

    pub(super) fn format(path: &Path, found: &str) -> Self {
        Self::Format { path: path.into(), found: shown(found) }
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
            found: shown(&found.to_string()),
            expected: expected.to_string(),
        }
    }
}

/// As much of somebody's text as belongs into an error.
pub(super) fn shown(text: &str) -> String {
    if text.len() <= SHOWN_BYTES_MAX {
        return text.into();
    }
    let end = (0..=SHOWN_BYTES_MAX).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}…", &text[..end])
}
