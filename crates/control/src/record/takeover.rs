//! Takeovers of a recorded guest: it runs on another host, from its newest image.
//!
//! ```text
//!   PLACE/takeovers/42.json   the host that runs the guest from image 42, or is about to. One of many hosts gets that file
//! ```
//! The file is durable before the guest runs. A record that finds one that was not there when it began ends: its guest is the older of two.
//!
//! Out of scope: whether the host of the recorded guest is off. What takes over has been told so.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use towline_image::manifest::Timestamp;

use super::error::Error;
use super::instants::RecordedInstant;
use super::place::Place;
use crate::generations::{create_once, sync};
use crate::procfs::of_kernel;

const DIRECTORY: &str = "takeovers";
const VERSION: u32 = 1;

/// A host that has taken over a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Holder {
    version: u32,
    host: String,
    boot: String,
    pid: u32,
    at: Timestamp,
    /// Random: of this takeover alone.
    id: u64,
}

/// The right to run a guest from an image of its record, which no other host has.
#[derive(Debug)]
#[must_use]
pub struct Takeover {
    path: PathBuf,
}

impl Takeover {
    /// Takes the guest over at this instant, which is the newest.
    ///
    /// # Errors
    /// [`Error::TakenOver`]: another one has done so. [`Error::NoTakeover`]: the place is a store. [`Error::Directory`].
    pub fn begin(place: &Place, newest: &RecordedInstant) -> Result<Self, Error> {
        let Place::Directory(directory) = place else {
            return Err(Error::NoTakeover { place: place.to_string() });
        };
        let directory = directory.join(DIRECTORY);
        let path = directory.join(format!("{}.json", newest.sequence));
        let failed = |source| Error::Directory { path: path.clone(), source };
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let (host, boot) = (of_kernel("hostname"), of_kernel("random/boot_id"));
        let own = Holder {
            version: VERSION,
            host,
            boot,
            pid: std::process::id(),
            at: Timestamp::now(),
            id: fastrand::u64(..),
        };
        let json = serde_json::to_vec(&own).map_err(|error| failed(error.into()))?;
        match create_once(&path, &json) {
            Ok(()) => Ok(Self { path }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match read(&path)? {
                found if found == own => Ok(Self { path }),
                Holder { host, at, .. } => Err(Error::TakenOver { path, host, at }),
            },
            Err(error) => Err(failed(error)),
        }
    }

    /// Gives it up: the guest has not run here, and will not.
    ///
    /// # Errors
    /// [`Error::Directory`]: the file stays.
    pub fn withdraw(self) -> Result<(), Error> {
        let removed = fs::remove_file(&self.path);
        let synced = removed.and_then(|()| self.path.parent().map_or(Ok(()), sync));
        synced.map_err(|source| Error::Directory { path: self.path, source })
    }
}

fn read(path: &Path) -> Result<Holder, Error> {
    let failed = |source| Error::Directory { path: path.to_owned(), source };
    let holder = serde_json::from_slice(&fs::read(path).map_err(failed)?).ok();
    let holder = holder.filter(|holder: &Holder| holder.version == VERSION);
    holder.ok_or_else(|| failed(io::Error::new(io::ErrorKind::InvalidData, "it is of another version")))
}

/// The takeovers of a directory's guest.
#[derive(Debug, Default)]
pub(super) struct Takeovers {
    known: Vec<PathBuf>,
}

impl Takeovers {
    /// Those that are there.
    pub(super) fn of(directory: Option<&Path>) -> Result<Self, Error> {
        Ok(Self { known: directory.map_or(Ok(Vec::new()), files)? })
    }

    /// Refuses a guest that another host has taken over since.
    pub(super) fn check(&self, directory: Option<&Path>) -> Result<(), Error> {
        let found = directory.map_or(Ok(Vec::new()), files)?;
        match found.into_iter().find(|path| !self.known.contains(path)) {
            Some(path) => {
                let Holder { host, at, .. } = read(&path)?;
                Err(Error::TakenFromHere { path, host, at })
            }
            None => Ok(()),
        }
    }
}

fn files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let directory = directory.join(DIRECTORY);
    let found = fs::read_dir(&directory).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()
    });
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(Error::Directory { path: directory, source }),
        // Not those that are being made.
        Ok(found) => Ok(found
            .into_iter()
            .filter(|path| path.extension().is_some_and(|is| is == "json") && !is_hidden(path))
            .collect()),
    }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_of_many_takes_a_guest_over_and_its_record_ends() {
        let place = tempfile::tempdir().unwrap();
        let directory = Place::Directory(place.path().to_owned());
        let newest = RecordedInstant { sequence: 42, elapsed: Duration::ZERO, at: Timestamp::now() };
        let before = Takeovers::of(Some(place.path())).unwrap();
        before.check(Some(place.path())).unwrap();
        let barrier = Barrier::new(8);
        let begin = || {
            barrier.wait();
            Takeover::begin(&directory, &newest)
        };
        let begun = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(begin)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let (won, lost): (Vec<_>, Vec<_>) = begun.into_iter().partition(Result::is_ok);
        assert_eq!((won.len(), lost.len()), (1, 7));
        assert!(lost.iter().all(|lost| matches!(lost, Err(Error::TakenOver { .. }))), "{lost:?}");
        assert!(matches!(before.check(Some(place.path())), Err(Error::TakenFromHere { .. })));
        // The record of the guest that runs there now.
        Takeovers::of(Some(place.path())).unwrap().check(Some(place.path())).unwrap();
        won.into_iter().next().unwrap().unwrap().withdraw().unwrap();
        before.check(Some(place.path())).unwrap();
        Takeover::begin(&directory, &newest).unwrap().withdraw().unwrap();
        assert_eq!(fs::read_dir(place.path().join(DIRECTORY)).unwrap().count(), 0);
    }
}
