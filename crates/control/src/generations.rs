//! Generations of a guest that several hosts may run in turn: one file for each run of it, on storage that these hosts share.
//!
//! ```text
//!   DIRECTORY/generation.7   the QEMU that runs the guest, or was to run it: host, process. The first QEMU with this file has the generation
//!   DIRECTORY/saved.7.img    the guest at the end of generation 7
//! ```
//! A guest is continued at a new place only once its QEMU has the next generation, and so one of two places gets it: the file is linked into
//! place, which fails if it is there, and is durable before the guest runs. The newest state is that of the highest generation. The place and
//! the number are in the guest's runtime directory ([`GuestGenerations`]), which every towline of that host finds.
//!
//! Out of scope: which host is alive. A QEMU resumes a guest by itself whose migration failed, in the generation that it has; what takes the
//! next one without the word of the source knows that its host is off, or has ended it.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use towline_launch::{GuestGenerations, RunningGuest, RuntimeError, RuntimeRoot};

use crate::durable::{self, create_once};
use crate::journal::now_ms;
use crate::procfs::of_kernel;
use crate::qemu::Qemu;

const PREFIX: &str = "generation.";
const VERSION: u32 = 1;
/// Longest file of a generation.
const BYTES_MAX: u64 = 16 << 10;

/// A generation that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// Its number, from 1.
    pub number: u64,
    /// The QEMU that has it.
    pub holder: Holder,
}

/// The QEMU that has a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Holder {
    version: u32,
    /// Name of its host.
    pub host: String,
    /// Process id there.
    pub pid: u32,
    start_time: u64,
    boot: String,
    /// Time at which it took the generation, in milliseconds since 1970.
    since_ms: u64,
}

/// Error of generations.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error("generations of the guest: {}: {source}; check the shared storage", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The file is not of this version.
    #[error("generations of the guest: {} is not one of version {VERSION}; use the same towline on all hosts", path.display())]
    Format { path: PathBuf },
    /// Another QEMU has it.
    #[error(
        "generation {} of the guest is that of process {} on {}: the state here is older, and must not run",
        .0.number,
        .0.holder.pid,
        .0.holder.host
    )]
    Taken(Generation),
    /// The directory lacks generations that it had.
    #[error("{} has generation {found} of the guest at most, expected {expected}: mount the shared storage", directory.display())]
    Lost { directory: PathBuf, found: u64, expected: u64 },
    /// It is not known whether a cluster runs the guest.
    #[error("it is not known whether a cluster runs the guest: {0}")]
    Guests(#[from] RuntimeError),
    /// A guest that others start elsewhere would be where they do not look.
    #[error("guest {name} is run by a cluster, by its generations in {}: it would start the guest a second time", directory.display())]
    Managed { name: String, directory: PathBuf },
}

impl Holder {
    fn of(guest: &RunningGuest) -> Self {
        let (pid, start_time) = (guest.pid, guest.start_time);
        let (host, boot) = (of_kernel("hostname"), of_kernel("random/boot_id"));
        Self { version: VERSION, host, pid, start_time, boot, since_ms: now_ms() }
    }

    /// Returns true if it is this QEMU.
    pub fn is(&self, guest: &RunningGuest) -> bool {
        *self == Self { since_ms: self.since_ms, ..Self::of(guest) }
    }
}

/// Path of the guest's image at the end of a generation, in their directory.
pub fn saved_image(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("saved.{number}.img"))
}

/// The highest generation in this directory.
///
/// # Errors
/// The directory, or the file of the generation, cannot be read.
pub fn newest(directory: &Path) -> Result<Option<Generation>, Error> {
    let newest = durable::highest(directory, |name| name.strip_prefix(PREFIX)?.parse().ok());
    let newest = newest.map_err(|source| Error::Io { path: directory.to_owned(), source })?;
    newest.map(|number| Ok(Generation { number, holder: read(&path_of(directory, number))? })).transpose()
}

fn path_of(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{PREFIX}{number}"))
}

fn read(path: &Path) -> Result<Holder, Error> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut bytes));
    read.map_err(|source| Error::Io { path: path.to_owned(), source })?;
    let holder = serde_json::from_slice(&bytes).ok().filter(|holder: &Holder| holder.version == VERSION);
    holder.ok_or_else(|| Error::Format { path: path.to_owned() })
}

/// A guest of this host that has generations.
#[derive(Debug, Clone)]
pub struct ManagedGuest {
    /// Its QEMU.
    pub guest: RunningGuest,
    place: GuestGenerations,
}

impl ManagedGuest {
    /// The guest, if it has generations.
    pub fn of(guest: RunningGuest) -> Option<Self> {
        let place = guest.generations.clone()?;
        Some(Self { guest, place })
    }

    /// The guest in this QEMU, if it has generations.
    ///
    /// # Errors
    /// [`Error::Guests`].
    pub(crate) fn of_qemu(qemu: &Qemu) -> Result<Option<Self>, Error> {
        Self::find(qemu.process().pid(), &qemu.socket_path())
    }

    /// The guest of this user in the QEMU with this process, or with this monitor if its process is not known.
    ///
    /// # Errors
    /// [`Error::Guests`].
    pub(crate) fn find(process: Option<i32>, socket: &Path) -> Result<Option<Self>, Error> {
        Self::find_below(&RuntimeRoot::of_user(), process, socket)
    }

    fn find_below(root: &RuntimeRoot, process: Option<i32>, socket: &Path) -> Result<Option<Self>, Error> {
        // A monitor in the directory of a guest is of that.
        let name =
            socket.strip_prefix(root.path()).ok().and_then(|path| path.parent()?.to_str()?.parse().ok());
        let is_it =
            |guest: &RunningGuest| process.is_none_or(|process| i64::from(guest.pid) == i64::from(process));
        let found = match name {
            Some(name) => root.find(&name)?.filter(is_it),
            None => root.find_qemu(process, socket)?,
        };
        Ok(found.and_then(Self::of))
    }

    /// Directory of its generations.
    pub fn directory(&self) -> &Path {
        &self.place.directory
    }

    /// The place of its next generation, for the QEMU that it goes to.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub(crate) fn next(&self) -> Result<GuestGenerations, Error> {
        self.enter()?;
        Ok(GuestGenerations { directory: self.directory().to_owned(), after: self.held()? })
    }

    /// The generation from which it continues.
    pub fn after(&self) -> u64 {
        self.place.after
    }

    /// Refuses what would have it elsewhere without its cluster.
    pub(crate) fn refuse(&self) -> Error {
        Error::Managed { name: self.guest.name.clone(), directory: self.directory().to_owned() }
    }

    /// Generation that it has.
    ///
    /// # Errors
    /// [`Error::Taken`]: it has none, or there is a higher one.
    pub fn held(&self) -> Result<u64, Error> {
        match newest(self.directory())? {
            Some(newest) if newest.holder.is(&self.guest) => Ok(newest.number),
            Some(newest) => Err(Error::Taken(newest)),
            None => Err(self.lost(0)),
        }
    }

    /// Takes the generation in which a guest that has just come here runs, unless it has that.
    ///
    /// # Errors
    /// [`Error::Taken`], and those of the storage: it must not run here.
    pub fn enter(&self) -> Result<(), Error> {
        match newest(self.directory())? {
            Some(newest) if newest.holder.is(&self.guest) => Ok(()),
            Some(newest) if newest.number > self.place.after => Err(Error::Taken(newest)),
            newest => match newest.map_or(0, |newest| newest.number) {
                found if found < self.place.after => Err(self.lost(found)),
                found => self.take(found + 1),
            },
        }
    }

    /// Takes the next generation for a guest that was sent, and has its last one, to run on here.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub fn take_back(&self) -> Result<(), Error> {
        self.take(self.held()? + 1)
    }

    /// Releases its generation: it has not run in it and never will.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn withdraw(&self) -> Result<(), Error> {
        let number = match self.held() {
            Ok(number) => number,
            Err(Error::Taken(_) | Error::Lost { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let path = path_of(self.directory(), number);
        durable::remove(&path).map_err(|source| Error::Io { path, source })
    }

    fn lost(&self, found: u64) -> Error {
        let GuestGenerations { directory, after: expected } = self.place.clone();
        Error::Lost { directory, found, expected }
    }

    fn take(&self, number: u64) -> Result<(), Error> {
        let (path, holder) = (path_of(self.directory(), number), Holder::of(&self.guest));
        let made = create_once(&path, &holder);
        if !made.map_err(|source| Error::Io { path: path.clone(), source })? {
            let holder = read(&path)?;
            // A server may have done it, and its reply was lost.
            if !holder.is(&self.guest) {
                return Err(Error::Taken(Generation { number, holder }));
            }
        }
        tracing::info!(guest = self.guest.name, number, "took a generation");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::DirBuilderExt as _;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    fn guest(directory: &Path, pid: u32, after: u64) -> ManagedGuest {
        let generations = Some(GuestGenerations { directory: directory.to_owned(), after });
        let guest = RunningGuest {
            name: "g".into(),
            pid,
            start_time: 7,
            owner_pid: 1,
            is_detached: true,
            qmp: "/run/qmp.sock".into(),
            image: None,
            generations,
        };
        ManagedGuest::of(guest).unwrap()
    }

    #[test]
    fn a_guest_whose_state_cannot_be_read_keeps_no_other_one() {
        let place = tempfile::tempdir().unwrap();
        let root = RuntimeRoot::at(place.path().join("guests"));
        for name in ["later", "web"] {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(root.path().join(name)).unwrap();
        }
        fs::write(root.path().join("later/state.json"), "{\"version\": 2}").unwrap();
        let lock = File::create(root.path().join("later/lock")).unwrap();
        lock.lock().unwrap();
        let own = std::process::id().cast_signed();
        let start_time = crate::procfs::start_time(own).unwrap();
        let guest = RunningGuest { start_time, ..guest(place.path(), std::process::id(), 0).guest };
        let mut state = serde_json::to_value(&guest).unwrap();
        state["version"] = 1.into();
        fs::write(root.path().join("web/state.json"), state.to_string()).unwrap();
        let find = |pid, socket: &Path| ManagedGuest::find_below(&root, Some(pid), socket);
        assert!(find(own, &root.path().join("web/qmp.sock")).unwrap().is_some());
        assert!(find(own, Path::new("/run/vm/a.qmp")).unwrap().is_some());
        // It may be the one that cannot be read.
        assert!(matches!(find(1, Path::new("/run/vm/a.qmp")), Err(Error::Guests(_))));
        assert!(find(own, &root.path().join("later/qmp.sock")).is_err());
    }

    #[test]
    fn one_of_many_gets_a_generation() {
        let place = tempfile::tempdir().unwrap();
        let barrier = Barrier::new(8);
        let take = |pid| {
            barrier.wait();
            guest(place.path(), pid, 0).enter()
        };
        let taken = thread::scope(|scope| {
            let take = &take;
            let threads: Vec<_> = (1..=8).map(|pid| scope.spawn(move || take(pid))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(taken.iter().filter(|taken| taken.is_ok()).count(), 1, "{taken:?}");
        let others =
            taken.iter().filter(|taken| matches!(taken, Err(Error::Taken(Generation { number: 1, .. }))));
        assert_eq!(others.count(), 7, "{taken:?}");
        // Nothing else is left.
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_guest_that_was_sent_runs_here_or_there() {
        let place = tempfile::tempdir().unwrap();
        let (source, destination) = (guest(place.path(), 1, 0), guest(place.path(), 2, 1));
        source.enter().unwrap();
        assert_eq!(source.held().unwrap(), 1);
        // It is taken back, and its destination comes too late, or the other way round.
        source.take_back().unwrap();
        let has_second = |entered, by| matches!(entered, Err(Error::Taken(Generation { number: 2, holder })) if holder.pid == by);
        assert!(has_second(destination.enter(), 1));
        source.withdraw().unwrap();
        for _ in 0..2 {
            destination.enter().unwrap();
        }
        assert_eq!(destination.held().unwrap(), 2);
        assert!(has_second(source.take_back(), 2));
        // It releases its own only.
        source.withdraw().unwrap();
        assert_eq!(newest(place.path()).unwrap().unwrap().number, 2);
    }

    #[test]
    fn generations_that_are_not_mounted_are_not_taken_again() {
        let place = tempfile::tempdir().unwrap();
        assert!(matches!(guest(place.path(), 2, 3).enter(), Err(Error::Lost { found: 0, expected: 3, .. })));
        assert!(matches!(guest(&place.path().join("missing"), 2, 0).enter(), Err(Error::Io { .. })));
        fs::write(place.path().join("generation.4"), "{}").unwrap();
        assert!(matches!(newest(place.path()), Err(Error::Format { .. })));
    }
}
