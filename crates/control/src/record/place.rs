//! Places of records: a directory with image files, or a prefix of an object store.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_image::atomic_file::LockedFile;
use towline_image::{Location, directory, has_manifest, leftover, lock_holder, needed_by};

use super::error::Error;
use super::instants::RecordedInstant;
use super::retention::{Entries, Entry};
use crate::plan::{self, CopyRequest, Destination, Observer, Source, Task};
use crate::run::ImageLocation;

/// Extension of an instant's file.
const EXTENSION: &str = "img";
/// Directory of the disks in that of a record.
const DISKS: &str = "disks";
/// Largest part of a file system that is left free for the guest's disks; 5 % of a smaller one.
const RESERVE_MAX: u64 = 1 << 30;
/// Images that are removed at a time.
const REMOVED_AT_ONCE: usize = 32;
/// Removed images of a store after which the chunks are collected that no other one needs.
#[cfg(feature = "store")]
const COLLECTED_AFTER: usize = 100;

/// Place of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A directory of image files, of this record alone.
    Directory(PathBuf),
    /// A prefix of an object store; refused by a build without the feature `store`.
    Prefix(Location),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Prefix(prefix) => prefix.fmt(f),
        }
    }
}

impl Place {
    /// The directory; `None`: a store.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) => Some(path),
            Self::Prefix(_) => None,
        }
    }

    /// Instants of the record, in their order.
    ///
    /// # Errors
    /// The place cannot be read.
    pub fn instants(&self, cancel: &Cancel) -> Result<Vec<RecordedInstant>, Error> {
        let mut instants = match self {
            Self::Directory(path) => {
                // A record has no file without a manifest.
                let images = file_names(path)?.into_iter().filter(|name| has_manifest(&path.join(name)));
                images.filter_map(|name| name.strip_suffix(".img")?.parse().ok()).collect()
            }
            Self::Prefix(prefix) => names_in_store(prefix, cancel)?,
        };
        instants.sort_by_key(|instant: &RecordedInstant| instant.sequence);
        Ok(instants)
    }

    /// The image of an instant.
    ///
    /// # Errors
    /// The place's name is too long for an image in it.
    pub fn image(&self, instant: &RecordedInstant) -> Result<ImageLocation, Error> {
        match self {
            Self::Directory(path) => Ok(ImageLocation::File(image_file(path, instant))),
            #[cfg(feature = "store")]
            Self::Prefix(prefix) => Ok(ImageLocation::Store(prefix.image(&instant.to_string())?)),
            #[cfg(not(feature = "store"))]
            Self::Prefix(prefix) => Err(Error::NoStores { place: prefix.clone() }),
        }
    }

    pub(super) fn destination(&self, instant: &RecordedInstant) -> Result<Destination, Error> {
        Ok(match self.image(instant)? {
            ImageLocation::Store(location) => Destination::Store(location),
            ImageLocation::File(path) | ImageLocation::Guest(path) => Destination::Image(path),
        })
    }
}

#[cfg(feature = "store")]
fn names_in_store(prefix: &Location, cancel: &Cancel) -> Result<Vec<RecordedInstant>, Error> {
    let names = towline_image::store::image_names(prefix, Some(cancel.clone()));
    Ok(names?.iter().filter_map(|name| name.parse().ok()).collect())
}

#[cfg(not(feature = "store"))]
fn names_in_store(prefix: &Location, _: &Cancel) -> Result<Vec<RecordedInstant>, Error> {
    Err(Error::NoStores { place: prefix.clone() })
}

fn image_file(directory: &Path, instant: &RecordedInstant) -> PathBuf {
    directory.join(format!("{instant}.{EXTENSION}"))
}

fn file_names(directory: &Path) -> Result<Vec<String>, Error> {
    let failed = |source| Error::Directory { path: directory.to_owned(), source };
    let entries = fs::read_dir(directory).map_err(failed)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().into_string().ok()));
    Ok(names.collect::<io::Result<Vec<_>>>().map_err(failed)?.into_iter().flatten().collect())
}

/// A record that is being written, and its images.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) place: Place,
    pub(super) entries: Entries,
    /// Removed since chunks were collected.
    removed: usize,
    /// The directory, locked: it is written by one process.
    _lock: Option<LockedFile>,
}

impl Record {
    /// Opens a record, which may not exist yet, and removes what a killed process has left of an instant.
    pub(super) fn open(place: &Place, cancel: &Cancel) -> Result<Self, Error> {
        let (place, lock) = match place {
            Place::Directory(path) => {
                let lock = lock_directory(path)?;
                // Names of the disks are compared with those that QEMU has.
                let real = path.canonicalize();
                let real = real.map_err(|source| Error::Directory { path: path.clone(), source })?;
                (Place::Directory(real), Some(lock))
            }
            Place::Prefix(_) => (place.clone(), None),
        };
        let mut record = Self { place, entries: Entries::new(), removed: 0, _lock: lock };
        record.remove_partial_files()?;
        let instants = record.place.instants(cancel)?;
        instants.into_iter().try_for_each(|instant| record.add(instant))?;
        Ok(record)
    }

    /// The last instant.
    pub(super) fn newest(&self) -> Option<&RecordedInstant> {
        self.entries.last_key_value().map(|(_, entry)| &entry.instant)
    }

    /// Directory of the disks of the guest.
    pub(super) fn disks(&self) -> Option<PathBuf> {
        self.place.directory().map(|path| path.join(DISKS))
    }

    /// The file of an instant in a directory.
    pub(super) fn file(&self, sequence: u64) -> Option<PathBuf> {
        Some(image_file(self.place.directory()?, &self.entries.get(&sequence)?.instant))
    }

    /// Adds an instant that was stored, or was stored again.
    pub(super) fn add(&mut self, instant: RecordedInstant) -> Result<(), Error> {
        let mut entry = Entry { instant, base: None, disks: Vec::new() };
        if let Some(directory) = self.place.directory() {
            let needed = needed_by(&image_file(directory, &instant)).map_err(towline_image::Error::from)?;
            let bases = needed.bases.iter().filter(|base| base.parent() == Some(directory));
            let number =
                |base: &PathBuf| Some(base.file_stem()?.to_str()?.parse::<RecordedInstant>().ok()?.sequence);
            // Of two, the later one is based on the earlier one.
            entry.base = bases.filter_map(number).filter(|base| *base < instant.sequence).max();
            entry.disks = needed.disks;
        }
        self.entries.insert(instant.sequence, entry);
        Ok(())
    }

    /// Bytes on the disk that an instant takes; `None` in a store.
    pub(super) fn allocated(&self, sequence: u64) -> Option<u64> {
        Some(fs::metadata(self.file(sequence)?).map_or(0, |file| file.blocks() * 512))
    }

    /// Bytes on the disk of an instant with its bases of the record.
    pub(super) fn allocated_with_bases(&self, sequence: u64) -> u64 {
        let chain = std::iter::successors(Some(sequence), |image| self.entries.get(image)?.base);
        chain.filter_map(|image| self.allocated(image)).fold(0, u64::saturating_add)
    }

    /// Refuses another image in a directory without room: one has at most about what the last one has with its bases of the record.
    pub(super) fn check_room(&self) -> Result<(), Error> {
        let Some(directory) = self.place.directory() else { return Ok(()) };
        check_room(directory, self.newest().map_or(0, |last| self.allocated_with_bases(last.sequence)))
    }

    /// Removes images, of which others are based on those before them only. Returns their number; one may remain, as a guest runs from it.
    pub(super) fn remove(&mut self, sequences: &[u64]) -> usize {
        let (mut removed, mut tried, mut remaining) = (0, 0, None);
        for sequence in sequences {
            // A base stays with what could not be removed, and keeps no others from being removed.
            if self.entries.values().any(|entry| entry.base == Some(*sequence)) {
                continue;
            }
            if tried == REMOVED_AT_ONCE {
                break;
            }
            tried += 1;
            match self.remove_one(*sequence) {
                Ok(()) => {
                    self.entries.remove(sequence);
                    removed += 1;
                }
                Err(error) => remaining = Some(error),
            }
        }
        if let Some(error) = remaining {
            tracing::info!(%error, "an image stays");
        }
        self.removed += removed;
        removed
    }

    fn remove_one(&self, sequence: u64) -> Result<(), Error> {
        if let Some(path) = self.file(sequence) {
            // The increments in the directory are this record's. One that a person has removed would be tried again for ever.
            return match path.try_exists() {
                Ok(false) => Ok(()),
                _ => Ok(directory::remove_leaf(&path).map(drop)?),
            };
        }
        match self.place.image(&self.entries[&sequence].instant)? {
            #[cfg(feature = "store")]
            ImageLocation::Store(location) => {
                use towline_image::store::{IfInUse, remove_image};

                Ok(remove_image(&location, IfInUse::Refuse, None).map(drop)?)
            }
            _ => Ok(()),
        }
    }

    /// Removes the chunks of a store that no image needs any longer, from time to time: no image can be stored meanwhile.
    #[cfg(feature = "store")]
    pub(super) fn collect(&mut self, age_min: Duration, cancel: &Cancel) -> Result<(), Error> {
        if let Place::Prefix(prefix) = &self.place
            && self.removed >= COLLECTED_AFTER
        {
            self.removed = 0;
            towline_image::store::Garbage::remove(prefix, age_min, Some(cancel.clone()), &mut |_| {})?;
        }
        Ok(())
    }

    #[cfg(not(feature = "store"))]
    pub(super) fn collect(&mut self, _: Duration, _: &Cancel) -> Result<(), Error> {
        self.removed = 0;
        Ok(())
    }

    /// Removes what a failure, or a killed process, has left of an image.
    pub(super) fn remove_partial_files(&self) -> Result<(), Error> {
        let directory = match &self.place {
            Place::Directory(directory) => directory,
            Place::Prefix(_prefix) => {
                #[cfg(feature = "store")]
                towline_image::store::remove_unsent(_prefix, &is_instant);
                return Ok(());
            }
        };
        for partial in leftover::list(directory)? {
            let name = partial.path.file_name().and_then(|name| name.to_str());
            let name = name.and_then(|name| name.strip_prefix('.')?.strip_suffix(".partial"));
            if let Some((stem, _)) = name.and_then(|name| name.split_once('.'))
                && is_instant(stem)
            {
                leftover::remove(&directory.join(format!("{stem}.{EXTENSION}")))?;
            }
        }
        // An image has its name before its manifest has; without it, nothing is based on it.
        let names: BTreeSet<String> = file_names(directory)?.into_iter().collect();
        for name in &names {
            let image =
                name.strip_suffix(".manifest.json.new").or_else(|| name.strip_suffix(".manifest.json"));
            let is_of_instant = |image: &str| image.strip_suffix(".img").is_some_and(is_instant);
            if image.is_some_and(|image| is_of_instant(image) && !names.contains(image)) {
                let path = directory.join(name);
                fs::remove_file(&path).map_err(|source| Error::Directory { path, source })?;
            }
        }
        Ok(())
    }
}

fn is_instant(name: &str) -> bool {
    name.parse::<RecordedInstant>().is_ok()
}

/// Base of an image that is merged: the whole image at the end of its chain, unless that is one of the same record.
pub(super) fn base_of_merge(image: &Path) -> Option<PathBuf> {
    towline_image::base_paths(image).pop().filter(|whole| whole.parent() != image.parent())
}

/// Refuses to write `bytes` bytes where the guest's disks might have no room afterwards.
pub(super) fn check_room(path: &Path, bytes: u64) -> Result<(), Error> {
    let found =
        statvfs(path).map_err(|errno| Error::Directory { path: path.to_owned(), source: errno.into() })?;
    let in_bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let needed = bytes.saturating_add((in_bytes(found.f_blocks) / 20).min(RESERVE_MAX));
    let free = in_bytes(found.f_bavail);
    if free < needed {
        return Err(Error::NoRoom {
            path: path.to_owned(),
            free: free >> 20,
            needed: needed.div_ceil(1 << 20),
        });
    }
    Ok(())
}

/// Stores an image of a chain again, so that it needs none of the record. It takes `bytes` bytes at most.
pub(super) fn merge(image: &Path, bytes: u64, cancel: &Cancel, observer: &dyn Observer) -> Result<(), Error> {
    let whole = base_of_merge(image);
    check_room(image.parent().unwrap_or(image), bytes)?;
    let task = Task::Copy { transfer: Default::default(), after: Default::default(), base: whole };
    let request = CopyRequest { overwrite: true, ..CopyRequest::new(task) };
    let (from, to) = (Source::Image(image.to_owned()), Destination::Image(image.to_owned()));
    plan::copy(&from, &to, &request, cancel, observer).map(drop).map_err(Error::Copy)
}

/// Makes the directory, and locks it.
fn lock_directory(path: &Path) -> Result<LockedFile, Error> {
    let failed = |source: io::Error| Error::Directory { path: path.to_owned(), source };
    // Memory of a guest is its owner's alone; its QEMU has to pass to its disks.
    let make = |path: &Path| DirBuilder::new().recursive(true).mode(0o711).create(path);
    make(path).and_then(|()| make(&path.join(DISKS))).map_err(failed)?;
    let directory = File::open(path).map_err(failed)?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(LockedFile(directory)),
        Err(Errno::WOULDBLOCK) => {
            Err(Error::PlaceInUse { path: path.to_owned(), holder: lock_holder(&directory) })
        }
        Err(errno) => Err(failed(errno.into())),
    }
}
