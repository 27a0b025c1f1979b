//! A copy of an image that shares its storage: the memory of one guest that must be mapped shared.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::OFlags;
use towline_image::Image;

use super::Error;
use crate::lock::lock;

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
        let file = create(image.path()).map_err(failed)?;
        rustix::fs::ioctl_ficlone(&file, image.file()).map_err(|errno| failed(errno.into()))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok(Self { image: Image::open(Path::new(&path))?, _file: file })
    }

    /// Path by which a QEMU opens it while this process has it open.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.image.path()
    }

    /// The file, as an image.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }
}

/// A reflink that no guest uses yet.
#[derive(Debug)]
pub struct UnusedReflink(Mutex<Option<Reflink>>);

impl UnusedReflink {
    /// A reflink that is for one guest.
    #[must_use]
    pub fn new(reflink: Reflink) -> Self {
        Self(Mutex::new(Some(reflink)))
    }

    /// The reflink; `None` if this was called before.
    pub(crate) fn take(&self) -> Option<Reflink> {
        lock(&self.0).take()
    }
}

/// A file without a name beside the image, for the memory of a guest, which is its owner's alone.
fn create(image: &Path) -> std::io::Result<File> {
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
        let file = create(&image).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
