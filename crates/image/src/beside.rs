//! The manifest beside an image: which one is the image's, and how both are exchanged as one.
//!
//! Two names cannot be given to two files at once. So the new manifest first has a name of its own, and an image's manifest is
//! whichever of the two files fits it:
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
//! Each line is on the disk before the next is begun. Whatever a crash leaves is one of the lines, and the next writer of the name
//! ends what was begun. Readers change nothing.

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

/// What ends the name of a manifest whose image is about to appear.
const PENDING: &str = ".new";
/// Endings of names of files that belong to an image.
const RESERVED: [&str; 3] = [".manifest.json", ".manifest.json.new", ".working-set.json"];
/// A manifest says within so many bytes what it is.
const HEAD_BYTES: u64 = 256;

/// Where the manifest of an image is while the image is exchanged.
pub(crate) fn pending_path(image: &Path) -> PathBuf {
    let mut path = sidecar_path(image).into_os_string();
    path.push(PENDING);
    path.into()
}

/// The manifest of an image in which this was found, and where it is; `None` if there is none.
///
/// # Errors
/// There is one, which cannot be used or is not this image's.
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

/// Which files have the names of an image and its manifests now: it changes with every exchange.
pub(crate) fn names(image: &Path) -> [Option<(u64, u64)>; 3] {
    use std::os::unix::fs::MetadataExt as _;

    [image.to_owned(), sidecar_path(image), pending_path(image)].map(|path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    })
}

/// Refuses names that are those of other images' parts.
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

/// Refuses to write over files that are no manifests.
///
/// # Errors
/// [`atomic_file::Error::Foreign`], [`atomic_file::Error::NotRegular`].
pub(crate) fn check_parts(image: &Path) -> Result<()> {
    for path in [sidecar_path(image), pending_path(image)] {
        check_part(&path, "a manifest", |head| {
            let is_there = |text: &str| head.windows(text.len()).any(|part| part == text.as_bytes());
            // Somebody may have sorted its fields.
            (is_there("\"format\"") && is_there(FORMAT)) || manifest::is_one(&path)
        })?;
    }
    Ok(())
}

/// Refuses to write over a file that is not what belongs there, by its first bytes.
pub(crate) fn check_part(
    path: &Path,
    expected: &'static str,
    is_expected: impl Fn(&[u8]) -> bool,
) -> atomic_file::Result<()> {
    let mut options = File::options();
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let Ok(file) = options.read(true).custom_flags(flags).open(path) else { return Ok(()) };
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        // Whoever opens it for writing says what it is.
        return Ok(());
    }
    let mut head = Vec::new();
    let read = file.take(HEAD_BYTES).read_to_end(&mut head);
    match read.is_ok() && is_expected(&head) {
        true => Ok(()),
        false => Err(atomic_file::Error::Foreign { path: path.into(), expected }),
    }
}

/// The manifest that has its name before an image is replaced.
///
/// # Errors
/// The directory cannot be looked at.
pub(crate) fn before(image: &Path, place: &Place) -> Result<Option<FileId>> {
    Ok(place.stat(&name_of(&sidecar_path(image)))?.as_ref().map(FileId::of))
}

/// A manifest on the disk whose image is about to appear.
#[derive(Debug)]
pub(crate) struct Pending {
    image: PathBuf,
    settled: OsString,
    pending: OsString,
    /// The manifest that has the name until then.
    before: Option<FileId>,
}

/// What became of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settled {
    /// It has its name.
    Named,
    /// It is at [`pending_path`], where readers find it too.
    Pending,
}

/// Which file has a name.
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
    /// Writes the manifest's text. The image's own file is locked by the caller, who saw `before` when its writing began.
    ///
    /// # Errors
    /// The directory takes no file, or one that is no manifest is in the way.
    pub(crate) fn write(image: &Path, before: Option<FileId>, text: &[u8]) -> Result<Self> {
        check_parts(image)?;
        let (settled, pending) = (name_of(&sidecar_path(image)), name_of(&pending_path(image)));
        write_sidecar(&pending_path(image), text, Existing::Replace)?;
        Ok(Self { image: image.into(), settled, pending, before })
    }

    /// Removes it: the image does not appear.
    pub(crate) fn discard(self, place: &Place) {
        let _ = place.unlink(&self.pending);
    }

    /// Gives it its name, now that its image has its own. Whatever cannot be done leaves it where readers find it too.
    pub(crate) fn settle(self, place: &Place, named: &Named) -> Settled {
        match self.try_settle(place, named) {
            Ok(settled) => settled,
            Err(error) => {
                tracing::warn!(
                    "{}: its manifest stays {}: {error}",
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
            // Somebody else's, who is about to give the image's name to another image too.
            _ => return Ok(Settled::Pending),
        }
        place.sync()?;
        Ok(Settled::Named)
    }

    /// Removes what the manifest was exchanged with, if that is the one of before.
    fn remove_before(&self, place: &Place, before: FileId) -> Result<Settled> {
        let failed = |errno: Errno| Error::Write { path: pending_path(&self.image), source: errno.into() };
        if place.stat(&self.pending)?.as_ref().map(FileId::of) != Some(before) {
            let back = place.rename(&self.pending, &self.settled, RenameFlags::EXCHANGE);
            back.map_err(failed)?;
            return Ok(Settled::Pending);
        }
        // Lost and kept each by itself, the removal alone would leave the image with the old manifest only.
        place.sync()?;
        place.unlink(&self.pending).map_err(failed)?;
        Ok(Settled::Named)
    }
}

/// Ends what a crash left: gives the manifest of the image that is there its name. `is_pending` is whether the image's manifest is
/// the one at [`pending_path`].
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
