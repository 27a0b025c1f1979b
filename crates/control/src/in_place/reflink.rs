//! A copy of an image that shares its storage: the memory of one guest that has to be mapped shared.

use std::fs::File;
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
        let file = File::options().read(true).write(true).create_new(true).open(path).map_err(failed)?;
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
