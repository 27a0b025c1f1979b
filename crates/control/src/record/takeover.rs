//! Takeovers of a recorded guest: it runs on another host, from its newest image.
//!
//! ```text
//!   PLACE/takeovers/1.json   the host that takes the guest over, and then runs it. One of many hosts gets that file
//!   PLACE/takeovers/1-…/     overlays of the disks of its image
//! ```
//! The file is durable before the guest runs. Takeovers are numbered from 1, and a standby says which one it follows: what is true of
//! the first host is not of the second. A record that finds one that was not there when it began ends once that guest runs: its own is the
//! older of two.
//!
//! Out of scope: whether the host of the recorded guest is off. What takes over has been told so.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use towline_image::manifest::Timestamp;

use super::error::{Error, Holder};
use super::place::Place;
use crate::durable::{create_once, highest, remove, replace};
use crate::procfs::of_kernel;

const DIRECTORY: &str = "takeovers";
const VERSION: u32 = 1;

/// The right to run a guest from an image of its record, which no other host has.
#[derive(Debug)]
#[must_use]
pub struct Takeover(Holder);

/// Beginning of a takeover.
#[derive(Debug)]
pub enum Begun {
    /// By this process.
    Here(Takeover),
    /// Another one was quicker.
    There(Holder),
}

/// The takeover with the highest number, if that is above `after`.
///
/// # Errors
/// [`Error::NoTakeover`]: the place is a store. [`Error::Directory`].
pub fn newest_takeover(place: &Place, after: u64) -> Result<Option<Holder>, Error> {
    let directory = directory_of(place)?;
    let number = newest(directory)?;
    (number > after).then(|| read(&path_of(directory, number))).transpose()
}

impl Takeover {
    /// Takes the guest over that was taken over this number of times.
    ///
    /// # Errors
    /// [`Error::NoTakeover`]: the place is a store. [`Error::NoSuchTakeover`]: it was not yet. [`Error::Directory`].
    pub fn begin(place: &Place, after: u64) -> Result<Begun, Error> {
        let number = after.saturating_add(1);
        if after > 0 && !path_of(directory_of(place)?, after).exists() {
            return Err(Error::NoSuchTakeover { place: place.to_string(), number: after });
        }
        let path = path_of(directory_of(place)?, number);
        let directory = path.parent().unwrap_or(Path::new("/"));
        make_directory(directory, 0o755).map_err(|source| Error::Directory { path: path.clone(), source })?;
        let takeover = Self(Holder {
            path: path.clone(),
            version: VERSION,
            host: of_kernel("hostname"),
            pid: std::process::id(),
            at: Timestamp::now(),
            id: fastrand::u64(..),
            runs: false,
        });
        let is_first = takeover.or_withdraw(create_once(&path, &takeover.0))?;
        if !is_first && let Some(other) = takeover.other()? {
            return Ok(Begun::There(other));
        }
        takeover.or_withdraw(make_directory(&takeover.overlays(), 0o711))?;
        Ok(Begun::Here(takeover))
    }

    /// Withdraws a takeover that has failed, whose file may be there all the same.
    fn or_withdraw<T>(&self, done: io::Result<T>) -> Result<T, Error> {
        done.or_else(|source| {
            self.withdraw()?;
            Err(Error::Directory { path: self.0.path.clone(), source })
        })
    }

    /// Directory of the overlays of this takeover alone. It is there.
    pub fn overlays(&self) -> PathBuf {
        self.0.path.with_extension(format!("{:016x}", self.0.id))
    }

    /// Marks the guest as one that runs here.
    ///
    /// # Errors
    /// [`Error::TakenFromHere`]: the file was removed or replaced. [`Error::Directory`].
    pub fn runs(&self) -> Result<(), Error> {
        if let Some(other) = self.other()? {
            return Err(Error::TakenFromHere(other));
        }
        replace(&self.0.path, &Holder { runs: true, ..self.0.clone() })
            .map_err(|source| Error::Directory { path: self.0.path.clone(), source })
    }

    /// Gives it up: the guest does not run here, and will not. A file of another one stays.
    ///
    /// # Errors
    /// [`Error::Directory`]: the file stays.
    pub fn withdraw(&self) -> Result<(), Error> {
        let _ = fs::remove_dir(self.overlays());
        match self.other() {
            Ok(None) => {}
            Err(Error::Directory { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => return found.map(drop),
        }
        remove(&self.0.path).map_err(|source| Error::Directory { path: self.0.path.clone(), source })
    }

    /// The one that has its file; `None`: it has that itself.
    fn other(&self) -> Result<Option<Holder>, Error> {
        Ok(Some(read(&self.0.path)?).filter(|holder| holder.id != self.0.id))
    }
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    // Records of other users, and the users of QEMUs, have to pass, whatever the umask is.
    fs::set_permissions(path, Permissions::from_mode(mode)).or_else(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Ok(()),
        _ => Err(error),
    })
}

fn directory_of(place: &Place) -> Result<&Path, Error> {
    place.directory().ok_or_else(|| Error::NoTakeover { place: place.to_string() })
}

fn path_of(directory: &Path, number: u64) -> PathBuf {
    directory.join(DIRECTORY).join(format!("{number}.json"))
}

fn read(path: &Path) -> Result<Holder, Error> {
    let failed = |source| Error::Directory { path: path.to_owned(), source };
    let holder = serde_json::from_slice(&fs::read(path).map_err(failed)?).ok();
    let holder = holder.filter(|holder: &Holder| holder.version == VERSION);
    let holder = holder.map(|holder| Holder { path: path.to_owned(), ..holder });
    holder.ok_or_else(|| failed(io::Error::new(io::ErrorKind::InvalidData, "it is of another version")))
}

/// Number of the newest takeover that was begun; 0 for none.
fn newest(directory: &Path) -> Result<u64, Error> {
    let directory = directory.join(DIRECTORY);
    match highest(&directory, |name| name.strip_suffix(".json")?.parse().ok()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(source) => Err(Error::Directory { path: directory, source }),
        Ok(highest) => Ok(highest.unwrap_or_default()),
    }
}

/// Directories of overlays of guests that were taken over.
pub(super) fn overlay_directories(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory.join(DIRECTORY)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let directory = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        Ok(entry.file_type()?.is_dir().then(|| entry.path()))
    };
    entries.filter_map(|entry| directory(entry).transpose()).collect()
}

/// The takeovers of the guest of a record, which is in a directory or not.
#[derive(Debug)]
pub(super) struct Takeovers {
    directory: Option<PathBuf>,
    /// Number of the one after which the recorded guest runs.
    known: u64,
}

impl Takeovers {
    /// Accepts those of this host, whose guest may be the recorded one.
    ///
    /// # Errors
    /// [`Error::TakenFromHere`]: another host has the guest. [`Error::Directory`].
    pub(super) fn of(directory: Option<&Path>) -> Result<Self, Error> {
        let Some(directory) = directory else { return Ok(Self { directory: None, known: 0 }) };
        let known = newest(directory)?;
        if known > 0 {
            let newest = read(&path_of(directory, known))?;
            if newest.host != of_kernel("hostname") {
                return Err(Error::TakenFromHere(newest));
            }
        }
        Ok(Self { directory: Some(directory.to_owned()), known })
    }

    /// Refuses a guest that is being taken over.
    ///
    /// # Errors
    /// [`Error::TakenFromHere`]: it runs elsewhere. [`Error::TakeoverBegun`]; [`Error::Directory`]: it may.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let newest = newest(directory)?;
        if newest <= self.known {
            return Ok(());
        }
        let other = read(&path_of(directory, newest))?;
        Err(if other.runs { Error::TakenFromHere(other) } else { Error::TakeoverBegun(other) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn one_of_many_takes_a_guest_over_and_its_record_ends() {
        let place = tempfile::tempdir().unwrap();
        let directory = Place::Directory(place.path().to_owned());
        let before = Takeovers::of(Some(place.path())).unwrap();
        before.check().unwrap();
        let barrier = Barrier::new(8);
        let begin = || {
            barrier.wait();
            Takeover::begin(&directory, 0).unwrap()
        };
        let begun = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(begin)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let (mut here, there): (Vec<_>, Vec<_>) =
            begun.into_iter().partition(|begun| matches!(begun, Begun::Here(_)));
        assert_eq!((here.len(), there.len()), (1, 7));
        let Some(Begun::Here(takeover)) = here.pop() else { panic!() };
        assert!(takeover.overlays().is_dir());
        // It can still fail; the record goes on then.
        assert!(matches!(before.check(), Err(Error::TakeoverBegun { .. })));
        takeover.withdraw().unwrap();
        before.check().unwrap();
        assert_eq!(newest_takeover(&directory, 0).unwrap(), None);
        assert_eq!(fs::read_dir(place.path().join(DIRECTORY)).unwrap().count(), 0);
        let Begun::Here(takeover) = Takeover::begin(&directory, 0).unwrap() else { panic!() };
        takeover.runs().unwrap();
        assert!(matches!(before.check(), Err(Error::TakenFromHere { .. })));
        assert!(newest_takeover(&directory, 0).unwrap().unwrap().runs);
        // The record of the guest that runs here now, and a standby for that.
        Takeovers::of(Some(place.path())).unwrap().check().unwrap();
        assert_eq!(newest_takeover(&directory, 1).unwrap(), None);
        assert!(matches!(Takeover::begin(&directory, 1).unwrap(), Begun::Here(_)));
    }

    #[test]
    fn a_file_that_others_have_made_is_not_ours() {
        let place = tempfile::tempdir().unwrap();
        let directory = Place::Directory(place.path().to_owned());
        let Begun::Here(takeover) = Takeover::begin(&directory, 0).unwrap() else { panic!() };
        let other = Holder { host: "other".into(), id: takeover.0.id ^ 1, ..takeover.0.clone() };
        fs::write(&takeover.0.path, serde_json::to_vec(&other).unwrap()).unwrap();
        assert!(matches!(takeover.runs(), Err(Error::TakenFromHere { .. })));
        takeover.withdraw().unwrap();
        assert_eq!(newest_takeover(&directory, 0).unwrap().unwrap().host, "other");
        // A record that is started again on the first host.
        assert!(matches!(Takeovers::of(Some(place.path())), Err(Error::TakenFromHere { .. })));
        fs::write(place.path().join(DIRECTORY).join("2.json"), "{}").unwrap();
        assert!(Takeovers::of(Some(place.path())).is_err());
        let store = Place::Prefix("store:/nowhere".parse().unwrap());
        assert!(matches!(newest_takeover(&store, 0), Err(Error::NoTakeover { .. })));
    }
}
