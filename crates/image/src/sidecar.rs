//! The manifest beside an image: finds the one that belongs to it, and replaces both together.
//!
//! Two files cannot be renamed atomically. So a new manifest is first staged under a temporary name, and an
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
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;

use crate::atomic_file::{self, DirectoryEntry, Existing, RenamedFile, write_sidecar};
use crate::journal::{self, PublicationBug};
use crate::manifest::{self, FORMAT, ImageProperties, Manifest, sidecar_path};
use crate::regular_file::{FileId, open_regular};
use crate::{Error, Result};

/// Suffix of a manifest whose image has not been renamed yet.
const STAGED_SUFFIX: &str = ".new";
/// Suffixes of files that belong to an image.
const RESERVED_SUFFIXES: [&str; 3] = [".manifest.json", ".manifest.json.new", ".working-set.json"];
/// A manifest is recognised within this many bytes.
const RECOGNISED_BYTES: u64 = 256;

/// Path of the manifest while its image is being replaced.
pub(crate) fn staged_path(image: &Path) -> PathBuf {
    let mut path = sidecar_path(image).into_os_string();
    path.push(STAGED_SUFFIX);
    path.into()
}

/// Finds the manifest of an image with these properties, and its name; `None` if there is none.
///
/// # Errors
/// A manifest exists but is invalid or belongs to another image.
pub(crate) fn find(
    image: &Path,
    found: &ImageProperties<'_>,
) -> manifest::Result<Option<(Manifest, ManifestName)>> {
    let fitting = |path: PathBuf, name| {
        let Some((manifest, text)) = Manifest::load(&path, found.blocks)? else { return Ok(None) };
        manifest.check(image, found)?;
        manifest.check_seal(image, &path, text, found)?;
        Ok(Some((manifest, name)))
    };
    let named = fitting(sidecar_path(image), ManifestName::Final);
    if let Ok(Some(_)) = &named {
        return named;
    }
    match fitting(staged_path(image), ManifestName::Staged) {
        Ok(Some(staged)) => Ok(Some(staged)),
        _ => named,
    }
}

/// Identities of an image and its manifests: they change with every replacement.
pub(crate) fn file_ids(image: &Path) -> [Option<FileId>; 3] {
    [image.to_owned(), sidecar_path(image), staged_path(image)].map(|path| FileId::at(&path))
}

/// Refuses names that are reserved for parts of other images.
///
/// # Errors
/// [`atomic_file::Error::Reserved`].
pub(crate) fn check_name(image: &Path) -> Result<()> {
    let name = image.file_name().unwrap_or_default().as_encoded_bytes();
    let partial = if name.starts_with(b".") { Some(".partial") } else { None };
    let suffix =
        RESERVED_SUFFIXES.into_iter().chain(partial).find(|suffix| name.ends_with(suffix.as_bytes()));
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
    for path in [sidecar_path(image), staged_path(image)] {
        check_part(&path, "a manifest", |head| {
            let contains = |text: &str| head.windows(text.len()).any(|part| part == text.as_bytes());
            // The fields may have been reordered.
            (contains("\"format\"") && contains(FORMAT)) || manifest::is_manifest(&path)
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
    // Opening another kind of file for writing reports its kind.
    let Ok(Some(file)) = open_regular(path, OFlags::NOFOLLOW) else { return Ok(()) };
    let mut head = Vec::new();
    let read = file.take(RECOGNISED_BYTES).read_to_end(&mut head);
    if read.is_ok() && is_expected(&head) {
        Ok(())
    } else {
        Err(atomic_file::Error::Foreign { path: path.into(), expected })
    }
}

/// The manifest under the final name before an image is replaced.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn current_manifest(image: &Path, entry: &DirectoryEntry) -> Result<Option<FileId>> {
    Ok(entry.stat(&name_of(&sidecar_path(image)))?.as_ref().map(FileId::of))
}

/// A manifest on the disk whose image is about to be renamed.
#[derive(Debug)]
pub(crate) struct StagedManifest {
    image: PathBuf,
    final_name: OsString,
    staged_name: OsString,
    /// The manifest under the final name when writing began.
    previous: Option<FileId>,
}

/// Name under which a manifest is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ManifestName {
    /// `NAME.manifest.json`.
    Final,
    /// [`staged_path`], where readers look too.
    Staged,
}

impl StagedManifest {
    /// Writes the manifest's text. The caller has the image file locked, and read `previous` when writing
    /// began.
    ///
    /// # Errors
    /// The file cannot be created, or a file that is not a manifest has its name.
    pub(crate) fn write(image: &Path, previous: Option<FileId>, text: &[u8]) -> Result<Self> {
        check_parts(image)?;
        let (final_name, staged_name) = (name_of(&sidecar_path(image)), name_of(&staged_path(image)));
        write_sidecar(&staged_path(image), text, Existing::Replace)?;
        Ok(Self { image: image.into(), final_name, staged_name, previous })
    }

    /// Removes the manifest: the image will not appear.
    pub(crate) fn discard(self, entry: &DirectoryEntry) {
        let _ = entry.unlink(&self.staged_name);
    }

    /// Renames the manifest after its image was renamed. On failure it keeps its name, where readers look
    /// too.
    pub(crate) fn publish(self, entry: &DirectoryEntry, renamed: &RenamedFile) -> ManifestName {
        match self.try_publish(entry, renamed) {
            Ok(name) => name,
            Err(error) => {
                tracing::warn!(
                    "{}: its manifest keeps the name {}: {error}",
                    self.image.display(),
                    self.staged_name.display()
                );
                ManifestName::Staged
            }
        }
    }

    fn try_publish(&self, entry: &DirectoryEntry, renamed: &RenamedFile) -> Result<ManifestName> {
        let failed = |errno: Errno| Error::Write { path: staged_path(&self.image), source: errno.into() };
        let rename = |flags| entry.rename(&self.staged_name, &self.final_name, flags);
        if journal::is_on(PublicationBug::ReplacedUnchecked) {
            rename(RenameFlags::empty()).map_err(failed)?;
            return Ok(ManifestName::Final);
        }
        if !renamed.still_has_name() {
            return Ok(ManifestName::Staged);
        }
        let now = entry.stat(&self.final_name)?.as_ref().map(FileId::of);
        match (now, self.previous) {
            (None, _) => match rename(RenameFlags::NOREPLACE) {
                Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty()).map_err(failed)?,
                renamed => renamed.map_err(failed)?,
            },
            (Some(now), Some(previous)) if now == previous => match rename(RenameFlags::EXCHANGE) {
                Ok(()) => return self.remove_previous(entry, previous),
                Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty()).map_err(failed)?,
                Err(errno) => return Err(failed(errno)),
            },
            // Another program's, which is about to replace the image too.
            _ => return Ok(ManifestName::Staged),
        }
        entry.sync()?;
        Ok(ManifestName::Final)
    }

    /// Removes the manifest that was exchanged if it is the previous one.
    fn remove_previous(&self, entry: &DirectoryEntry, previous: FileId) -> Result<ManifestName> {
        let failed = |errno: Errno| Error::Write { path: staged_path(&self.image), source: errno.into() };
        if entry.stat(&self.staged_name)?.as_ref().map(FileId::of) != Some(previous) {
            let back = entry.rename(&self.staged_name, &self.final_name, RenameFlags::EXCHANGE);
            back.map_err(failed)?;
            return Ok(ManifestName::Staged);
        }
        // Without this sync a crash could keep the removal and lose the exchange, leaving the image with the
        // old manifest only.
        entry.sync()?;
        entry.unlink(&self.staged_name).map_err(failed)?;
        Ok(ManifestName::Final)
    }
}

/// Completes a replacement that a crash interrupted: renames the manifest of the present image. `is_staged`
/// returns true if that image's manifest is the one at [`staged_path`].
pub(crate) fn complete_interrupted(
    image: &Path,
    entry: &DirectoryEntry,
    is_staged: impl FnOnce() -> bool,
) -> Result<()> {
    let (final_name, staged_name) = (name_of(&sidecar_path(image)), name_of(&staged_path(image)));
    if entry.stat(&staged_name)?.is_none() || !is_staged() {
        return Ok(());
    }
    let failed = |errno: Errno| Error::Write { path: staged_path(image), source: errno.into() };
    entry.rename(&staged_name, &final_name, RenameFlags::empty()).map_err(failed)?;
    Ok(entry.sync()?)
}

fn name_of(path: &Path) -> OsString {
    path.file_name().unwrap_or(OsStr::new("")).to_owned()
}
