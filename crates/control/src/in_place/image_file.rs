//! The file of an image: its content, whether it stays as it is, and a copy that shares its storage.
//!
//! A mapping shows the content of the file, a reader the content according to the page bitmaps. QEMU leaves
//! the old content of a page that became zero in the file and only clears its bit. towline's own images have
//! a hole there. Only data of the file is read, since holes are zeros, and of it only the pages without a
//! bit.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, SeekFrom, flock, seek};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_image::Image;
use towline_migration::{ExtentKind, Guest as _, parallel};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef};

use super::error::Error;
use super::transfer_reason::TransferReason;

/// Number of threads that compare an image with its manifest.
const VERIFY_THREADS: usize = 2;
/// Memory that is compared at once: one chunk of a manifest.
const VERIFY_BYTES: u64 = 2 << 20;
const ZERO_PAGE: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Offset in the file of the first page of a block that is not zero there and has no bit; `begin` is that of
/// the block. `file` is the image, with its own position.
pub(super) fn stale_page(
    image: &Image,
    file: &File,
    block: BlockIndex,
    begin: u64,
) -> io::Result<Option<u64>> {
    let end = begin + image.ram_blocks()[block.index()].length;
    let mut at = begin;
    while let Some((data, hole)) = next_data(file, at)?.filter(|(data, _)| *data < end) {
        // Data and holes begin at the filesystem's blocks, which may be larger than a page or smaller.
        let first = (data - begin) / PAGE_SIZE * PAGE_SIZE;
        let last = (hole.min(end) - begin).next_multiple_of(PAGE_SIZE);
        if let Some(page) = stale_within(image, block, first, last) {
            return Ok(Some(begin + page));
        }
        at = hole;
    }
    Ok(None)
}

/// The next data of a file at or after `at`, and the hole that follows.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(Some((data, seek(file, SeekFrom::Hole(data))?))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// As [`stale_page`], for the pages between two offsets of the block.
fn stale_within(image: &Image, block: BlockIndex, first: u64, last: u64) -> Option<u64> {
    let mut at = first;
    while at < last {
        let page = PageRef { block, offset: at };
        let extent = image.extent(page);
        let end = (at + extent.pages * PAGE_SIZE).min(last);
        if extent.kind == ExtentKind::Zero {
            // A block without anything to compare is not known to be zero.
            let Some(bytes) = image.immutable(page, end - at) else { return Some(at) };
            let stale = bytes.chunks(ZERO_PAGE.len()).position(|page| page != &ZERO_PAGE[..page.len()]);
            if let Some(stale) = stale {
                return Some(at + stale as u64 * PAGE_SIZE);
            }
        }
        at = end;
    }
    None
}

/// Compares a block with the manifest: its pages are not sent, and therefore not verified while they are
/// sent.
pub(super) fn verify_block(image: &Image, name: &str, cancel: &Cancel) -> Result<(), Error> {
    let blocks = (0..).map(BlockIndex).zip(image.ram_blocks());
    for (index, block) in blocks.filter(|(_, block)| block.name == name) {
        let chunks: Vec<u64> = (0..block.length).step_by(VERIFY_BYTES as usize).collect();
        let verify = |&offset: &u64| {
            if cancel.is_cancelled() {
                return Ok(());
            }
            let length = VERIFY_BYTES.min(block.length - offset);
            image.prepare(PageRef { block: index, offset }, length)
        };
        parallel::for_each(&chunks, VERIFY_THREADS, || verify).map_err(Error::Damaged)?;
    }
    Ok(())
}

/// The image with a reader's lock, so no towline replaces it.
pub(crate) fn locked(image: &Image) -> Result<File, TransferReason> {
    Ok(Unchanged::of(image)?.locked()?.file)
}

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
        let file = image.reopen().map_err(|error| TransferReason::file(image.path(), error))?;
        let found = file.metadata().map_err(|error| TransferReason::file(image.path(), error))?;
        Ok(Self { path: image.path().to_owned(), file, state: FileVersion::of(&found) })
    }

    /// Takes a reader's lock, so no towline replaces the image while this value lives.
    pub(super) fn locked(self) -> Result<Self, TransferReason> {
        match flock(&self.file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Err(TransferReason::Locked { path: self.path }),
            // A filesystem without locks has none to violate.
            _ => Ok(self),
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match self.file.metadata() {
            Ok(found) if FileVersion::of(&found) == self.state => Ok(()),
            _ => Err(Error::Changed { path: self.path.clone() }),
        }
    }
}

/// A file with the content of an image, made as a reflink of it. A QEMU may map it shared and write into it;
/// the image is unchanged. It has no name, so it is freed with its last user.
#[derive(Debug)]
pub struct Reflink {
    image: Image,
    // Its path is that of this descriptor in `/proc`.
    _file: File,
}

impl Reflink {
    /// Creates a reflink of `image`, in its directory.
    ///
    /// # Errors
    /// [`Error::Reflink`] on a filesystem without `FICLONE` or `O_TMPFILE`.
    pub fn create(image: &Image) -> Result<Self, Error> {
        let failed = |source: std::io::Error| Error::Reflink { image: image.path().to_owned(), source };
        let file = create_unnamed(image.path()).map_err(failed)?;
        rustix::fs::ioctl_ficlone(&file, image.file()).map_err(|errno| failed(errno.into()))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok(Self { image: Image::open(Path::new(&path))?, _file: file })
    }

    /// Path by which a QEMU opens it while this process has it open.
    pub fn path(&self) -> &Path {
        self.image.path()
    }

    /// The file, as an image.
    pub fn image(&self) -> &Image {
        &self.image
    }
}

/// A file without a name beside the image, for the memory of a guest, which is its owner's alone.
fn create_unnamed(image: &Path) -> std::io::Result<File> {
    let image = image.canonicalize()?;
    let directory = image.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::TMPFILE.bits().cast_signed();
    File::options().read(true).write(true).custom_flags(flags).mode(0o600).open(directory)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_reflink_is_its_owners_alone_and_has_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        std::fs::write(&image, "").unwrap();
        let file = create_unnamed(&image).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
