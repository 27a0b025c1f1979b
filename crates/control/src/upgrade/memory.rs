//! Memory of the new QEMU: shared with the old one, or mapped from the image that the guest runs on.

use std::fs::File;
use std::sync::Arc;

use towline_image::Image;
use towline_launch::{MappedMemory, QemuVersion, Sharing};

use super::error::Error;
use super::old::OldQemu;
use crate::in_place::{self, GuestBackends};
use crate::plan::UpgradeMemory;

/// The first QEMU that reports the addresses of its memory, without which nothing proves what it maps.
const PROVES_SINCE: QemuVersion = QemuVersion { major: 8, minor: 2 };

/// The image that the old QEMU maps copy-on-write, locked as its readers do. The new one maps it by the same option.
pub(super) fn image(old: &OldQemu) -> Result<Option<(Arc<Image>, File)>, Error> {
    let mut private = old.backends.private.iter();
    let Some((backend, file)) = private.find_map(|one| Some((&one.backend, one.path.as_ref()?))) else {
        return Ok(None);
    };
    let refused = |backend: &str, path: &str, reason: String| Error::PrivateFile {
        backend: backend.to_owned(),
        path: path.to_owned(),
        reason,
    };
    if let Some(other) = private.find(|other| other.path.as_ref().is_some_and(|path| path != file)) {
        let reason = format!("memory of backend {backend:?} is in {file}");
        return Err(refused(&other.backend, other.path.as_deref().unwrap_or_default(), reason));
    }
    let opened = Image::open(&old.working_directory.join(file));
    let image = Arc::new(opened.map_err(|error| refused(backend, file, error.to_string()))?);
    let lock = in_place::locked(&image).map_err(|reason| refused(backend, file, reason.to_string()))?;
    Ok(Some((image, lock)))
}

/// The shared memory that the new QEMU maps.
pub(super) fn shared(
    backends: &GuestBackends,
    requested: UpgradeMemory,
    version: QemuVersion,
) -> Result<MappedMemory, Error> {
    let anonymous = backends.private.iter().find(|private| private.path.is_none());
    if let Some(private) = anonymous.filter(|_| requested == UpgradeMemory::InPlace) {
        let (backend, kind) = (private.backend.clone(), private.kind.clone());
        return Err(Error::PrivateMemory { backend, kind, reason: private.reason.clone() });
    }
    let blocks = match requested {
        UpgradeMemory::Copied => Vec::new(),
        UpgradeMemory::InPlace if version < PROVES_SINCE => {
            return Err(Error::OldTarget { found: version });
        }
        UpgradeMemory::InPlace => backends.shared.clone(),
    };
    Ok(MappedMemory { blocks, sharing: Sharing::Shared })
}
