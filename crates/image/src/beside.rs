//! The manifest beside an image: finding the one that belongs to it, and replacing both together.
//!
//! Two files cannot be renamed atomically. So a new manifest is first staged under a name of its own, and an
//! image's manifest is whichever of the two files matches it:
//!
//! ```text
//!                        NAME    NAME.manifest.json   NAME.manifest.json.new    an image of NAME is
//!   before               old     old                  -                         the old one
//!   manifest written     old     old                  new                       the old one
//!   image renamed        new     old                  new                       the new one
//!   manifests exchanged  new     new                  old                       the new one
//!   done                 new     new                  -                         the new one
//! ```
//!
//! Each line is on the disk before the next step begins. A crash leaves one of these states, and the next
//! writer of the name completes it. Readers change nothing.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use crate::atomic_file::{self, Existing, Named, Place, write_sidecar};
use crate::journal::{self, Fault};
use crate::manifest::{self, FORMAT, Found, Manifest, sidecar_path};
use crate::{Error, Result};

/// Suffix of a manifest whose image has not been renamed yet.
const PENDING: &str = ".new";
/// Suffixes of files that belong to an image.
const RESERVED: [&str; 3] = [".manifest.json", ".manifest.json.new", ".working-set.json"];
/// A manifest is recognised within this many bytes.
const HEAD_BYTES: u64 = 256;

/// Path of the manifest while its image is being replaced.
pub(crate) fn pending_path(image: &Path) -> PathBuf {
    let mut path = sidecar_path(image).into_os_string();
    path.push(PENDING);
    path.into()
}

/// Finds the manifest of an image with these properties, and under which name it is; `None` if there is none.
///
/// # Errors
/// A manifest exists but is invalid or belongs to another image.
pub(crate) fn find(image: &Path, found: &Found<'_>) -> manifest::Result<Option<(Manifest, Settled)>> {
    let fitting = |path: PathBuf, settled| {
        let Some((manifest, text)) = Manifest::load_from(&path, found.blocks)? else { return Ok(None) };
        manifest.check(image, found)?;
        manifest.check_seal(image, &path, text, found)?;
        Ok(Some((manifest, settled)))
    };
    let named = fitting(sidecar_path(image), Settled::Named);
    if let Ok(Some(_)) = &named {
        return named;
    }
    match fitting(pending_path(image), Settled::Pending) {
        Ok(Some(pending)) => Ok(Some(pending)),
        _ => named,
    }
}

/// Identities of an image and its manifests: they change with every replacement.
pub(crate) fn names(image: &Path) -> [Option<(u64, u64)>; 3] {
    use std::os::unix::fs::MetadataExt as _;

    [image.to_owned(), sidecar_path(image), pending_path(image)].map(|path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    })
}

/// Refuses names that are reserved for parts of other images.
///
/// # Errors
/// [`atomic_file::Error::Reserved`].
pub(crate) fn check_name(image: &Path) -> Result<()> {
    let name = image.file_name().unwrap_or_default().as_encoded_bytes();
    let partial = if name.starts_with(b".") { Some(".partial") } else { None };
    let suffix = RESERVED.into_iter().chain(partial).find(|suffix| name.ends_with(suffix.as_bytes()));
    match suffix {
        Some(suffix) => Err(atomic_file::Error::Reserved { path: image.into(), suffix }.into()),
        None => Ok(()),
    }
}

/// Refuses to overwrite files that are not manifests.
///
/// # Errors
/// [`atomic_file::Error::Foreign`], [`atomic_file::Error::NotRegular`].
pub(crate) fn check_parts(image: &Path) -> Result<()> {
    for path in [sidecar_path(image), pending_path(image)] {
        check_part(&path, "a manifest", |head| {
            let is_there = |text: &str| head.windows(text.len()).any(|part| part == text.as_bytes());
            // The fields may have been reordered.
            (is_there("\"format\"") && is_there(FORMAT)) || manifest::is_one(&path)
        })?;
    }
    Ok(())
}

/// Refuses to overwrite a file of another kind, judged by its first bytes.
pub(crate) fn check_part(
    path: &Path,
    expected: &'static str,
    is_expected: impl Fn(&[u8]) -> bool,
) -> atomic_file::Result<()> {
    let mut options = File::options();
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let Ok(file) = options.read(true).custom_flags(flags).open(path) else { return Ok(()) };
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        // Opening it for writing reports what it is.
        return Ok(());
    }
    let mut head = Vec::new();
    let read = file.take(HEAD_BYTES).read_to_end(&mut head);
    match read.is_ok() && is_expected(&head) {
        true => Ok(()),
        false => Err(atomic_file::Error::Foreign { path: path.into(), expected }),
    }
}

/// The manifest under the final name before an image is replaced.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn before(image: &Path, place: &Place) -> Result<Option<FileId>> {
    Ok(place.stat(&name_of(&sidecar_path(image)))?.as_ref().map(FileId::of))
}

/// A manifest on the disk whose image is about to be renamed.
#[derive(Debug)]
pub(crate) struct Pending {
    image: PathBuf,
    settled: OsString,
    pending: OsString,
    /// The manifest under the final name when writing began.
    before: Option<FileId>,
}

/// Name under which a manifest is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settled {
    /// `NAME.manifest.json`.
    Named,
    /// [`staged_path`], where readers look too.
    Pending,
}

/// Identity of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    number: u64,
}

impl FileId {
    fn of(stat: &Stat) -> Self {
        Self { device: stat.st_dev, number: stat.st_ino }
    }
}

impl Pending {
    /// Writes the manifest's text. The caller has the image file locked, and read `previous` when writing
    /// began.
    ///
    /// # Errors
    /// The file cannot be created, or a file that is not a manifest has its name.
    pub(crate) fn write(image: &Path, before: Option<FileId>, text: &[u8]) -> Result<Self> {
        check_parts(image)?;
        let (settled, pending) = (name_of(&sidecar_path(image)), name_of(&pending_path(image)));
        write_sidecar(&pending_path(image), text, Existing::Replace)?;
        Ok(Self { image: image.into(), settled, pending, before })
    }

    /// Removes the manifest: the image will not appear.
    pub(crate) fn discard(self, place: &Place) {
        let _ = place.unlink(&self.pending);
    }

    /// Renames the manifest after its image was renamed. On failure it keeps its name, where readers look
    /// too.
    pub(crate) fn settle(self, place: &Place, named: &Named) -> Settled {
        match self.try_settle(place, named) {
            Ok(settled) => settled,
            Err(error) => {
                tracing::warn!(
                    "{}: its manifest keeps the name {}: {error}",
                    self.image.display(),
                    self.pending.display()
                );
                Settled::Pending
            }
        }
    }

    fn try_settle(&self, place: &Place, named: &Named) -> Result<Settled> {
        let failed = |errno: Errno| Error::Write { path: pending_path(&self.image), source: errno.into() };
        let rename = |flags| place.rename(&self.pending, &self.settled, flags);
        if journal::is_on(Fault::ReplacedUnseen) {
            rename(RenameFlags::empty()).map_err(failed)?;
            return Ok(Settled::Named);
        }
        if !named.is_named() {
            return Ok(Settled::Pending);
        }
        let now = place.stat(&self.settled)?.as_ref().map(FileId::of);
        match (now, self.before) {
            (None, _) => match rename(RenameFlags::NOREPLACE) {
                Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty()).map_err(failed)?,
                renamed => renamed.map_err(failed)?,
            },
            (Some(now), Some(before)) if now == before => match rename(RenameFlags::EXCHANGE) {
                Ok(()) => return self.remove_before(place, before),
                Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty()).map_err(failed)?,
                Err(errno) => return Err(failed(errno)),
            },
            // Another program's, which is about to replace the image too.
            _ => return Ok(Settled::Pending),
        }
        place.sync()?;
        Ok(Settled::Named)
    }

    /// Removes the manifest that was exchanged if it is the previous one.
    fn remove_before(&self, place: &Place, before: FileId) -> Result<Settled> {
        let failed = |errno: Errno| Error::Write { path: pending_path(&self.image), source: errno.into() };
        if place.stat(&self.pending)?.as_ref().map(FileId::of) != Some(before) {
            let back = place.rename(&self.pending, &self.settled, RenameFlags::EXCHANGE);
            back.map_err(failed)?;
            return Ok(Settled::Pending);
        }
        // Without this sync a crash could keep the removal and lose the exchange, leaving the image with the
        // old manifest only.
        place.sync()?;
        place.unlink(&self.pending).map_err(failed)?;
        Ok(Settled::Named)
    }
}

/// Completes a replacement that a crash interrupted: renames the manifest of the present image. `is_staged`
/// returns true if that image's manifest is the one at [`staged_path`].
pub(crate) fn settle_left(image: &Path, place: &Place, is_pending: impl FnOnce() -> bool) -> Result<()> {
    let (settled, pending) = (name_of(&sidecar_path(image)), name_of(&pending_path(image)));
    if place.stat(&pending)?.is_none() || !is_pending() {
        return Ok(());
    }
    let failed = |errno: Errno| Error::Write { path: pending_path(image), source: errno.into() };
    place.rename(&pending, &settled, RenameFlags::empty()).map_err(failed)?;
    Ok(place.sync()?)
}

fn name_of(path: &Path) -> OsString {
    path.file_name().unwrap_or(OsStr::new("")).to_owned()
}
