//! A file that must not change while a guest is restored from it.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use towline_image::Image;

use super::{Error, TransferReason};

/// The image of a proof, with the attributes that show a later write. Writes through a mapping may show with
/// a delay.
#[derive(Debug)]
pub(super) struct Unchanged {
    path: PathBuf,
    file: File,
    state: FileVersion,
}

/// Length and times of a file, which each write changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    length: u64,
    modified: [i64; 2],
    changed: [i64; 2],
}

impl FileVersion {
    fn of(found: &Metadata) -> Self {
        let modified = [found.mtime(), found.mtime_nsec()];
        Self { length: found.len(), modified, changed: [found.ctime(), found.ctime_nsec()] }
    }
}

impl Unchanged {
    /// The present state of the image.
    pub(super) fn of(image: &Image) -> Result<Self, TransferReason> {
        let path = image.path().to_owned();
        let opened = image.file().try_clone().and_then(|file| Ok((FileVersion::of(&file.metadata()?), file)));
        match opened {
            Ok((state, file)) => Ok(Self { path, file, state }),
            Err(error) => Err(TransferReason::File { path, text: error.to_string() }),
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match self.file.metadata() {
            Ok(found) if FileVersion::of(&found) == self.state => Ok(()),
            _ => Err(Error::Changed { path: self.path.clone() }),
        }
    }
}
