//! A copy of an image that shares its storage: the memory of one guest that has to be mapped shared.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use towline_image::Image;

use super::Error;

/// A file with the content of an image, made as a reflink of it. A QEMU may map it shared and write into it; the image stays.
#[derive(Debug)]
pub struct Reflink {
    image: Image,
}

impl Reflink {
    /// Makes the reflink of `image` at `path`, where no file is. It is removed by the caller.
    ///
    /// # Errors
    /// [`Error::Reflink`] on a filesystem without `FICLONE`, or on another one than the image's; nothing is left then.
    pub fn create(image: &Image, path: &Path) -> Result<Self, Error> {
        let failed = |source: std::io::Error| Error::Reflink {
            image: image.path().to_owned(),
            path: path.to_owned(),
            source,
        };
        let file = create(path).map_err(failed)?;
        let made = rustix::fs::ioctl_ficlone(&file, image.file())
            .map_err(|errno| failed(errno.into()))
            .and_then(|()| Ok(Image::open(path)?));
        match made {
            Ok(image) => Ok(Self { image }),
            Err(error) => {
                if let Err(error) = std::fs::remove_file(path) {
                    tracing::warn!(path = %path.display(), %error, "an unfinished reflink is left");
                }
                Err(error)
            }
        }
    }

    /// The file, as an image.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }
}

/// A file for the memory of a guest, which is its owner's alone.
fn create(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_reflink_is_its_owners_alone() {
        let directory = tempfile::tempdir().unwrap();
        let file = create(&directory.path().join("reflink")).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
