//! The instance of a guest's resource on this host, and the QEMU that it is about.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use towline_launch::{GuestName, RunningGuest, RuntimeRoot};

use super::super::refusal::{Outcome, Refusal};

const STARTED: &str = "started";
const PROMOTED: &str = "promoted";
/// Locked by a claim.
const CLAIMING: &str = "claiming";
/// Time of the first claim with a copy, since boot.
const CLAIMED_SINCE: &str = "claimed-since";
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// An instance, whose role and claims are files.
pub(super) struct Instance {
    pub(super) guest: GuestName,
    directory: PathBuf,
}

impl Instance {
    pub(super) fn of(guest: GuestName) -> Self {
        let root = RuntimeRoot::of_user();
        let directory = root.path().with_file_name("cluster").join(guest.as_str());
        Self { guest, directory }
    }

    pub(super) fn is_started(&self) -> bool {
        self.directory.join(STARTED).exists()
    }

    pub(super) fn is_promoted(&self) -> bool {
        self.is_started() && self.directory.join(PROMOTED).exists()
    }

    pub(super) fn set_started(&self) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        remove(self.directory.join(CLAIMED_SINCE))?;
        File::create(self.directory.join(CLAIMING))?;
        fs::write(self.directory.join(STARTED), "")
    }

    pub(super) fn set_promoted(&self) -> io::Result<()> {
        fs::write(self.directory.join(PROMOTED), "")
    }

    /// Removing a file needs no room on a file system that is full.
    pub(super) fn set_demoted(&self) -> io::Result<()> {
        remove(self.directory.join(PROMOTED))
    }

    pub(super) fn set_stopped(&self) -> io::Result<()> {
        self.set_demoted()?;
        remove(self.directory.join(STARTED))
    }

    /// Keeps a demotion from being done until it is dropped, or this process ends.
    ///
    /// # Errors
    /// Another claim has it.
    pub(super) fn claiming(&self) -> Result<File, Refusal> {
        let file = File::open(self.directory.join(CLAIMING))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => Err(Refusal::failed("another claim is made on this host; wait for it")),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until no claim is made here that was begun before.
    pub(super) fn await_claims(&self, within: Duration) -> Outcome {
        let deadline = Instant::now() + within;
        while self.directory.join(CLAIMING).exists() {
            match self.claiming() {
                Err(refusal) if Instant::now() >= deadline => return Err(refusal),
                Err(_) => thread::sleep(LOCK_INTERVAL),
                Ok(_) => break,
            }
        }
        Ok(())
    }

    /// Returns true once claims were made with a copy for this time. It is counted from then on again.
    pub(super) fn has_claimed_for(&self, time: Duration) -> Result<bool, Refusal> {
        let (path, now) = (self.directory.join(CLAIMED_SINCE), clock_gettime(ClockId::Boottime).tv_sec);
        let since = fs::read_to_string(&path).ok().and_then(|text| text.parse::<i64>().ok());
        let is_long = since.is_some_and(|since| now - since >= time.as_secs().cast_signed());
        if since.is_none() || is_long {
            fs::write(&path, now.to_string())?;
        }
        Ok(is_long)
    }

    /// The guest's QEMU on this host, or one that waits for the guest.
    ///
    /// # Errors
    /// Its state cannot be read: it may run.
    pub(super) fn qemu(&self) -> Result<Option<RunningGuest>, Refusal> {
        Ok(RuntimeRoot::of_user().find(&self.guest)?)
    }

    /// Kills whatever has the guest here, or waits for it.
    pub(super) fn kill(&self, within: Duration) -> Outcome {
        match self.qemu()? {
            Some(qemu) if !qemu.kill(within) => Err(Refusal::failed(format!(
                "the QEMU of {} (process {}) cannot be killed",
                self.guest, qemu.pid
            ))),
            _ => Ok(()),
        }
    }
}

fn remove(path: PathBuf) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
