//! The instance of a guest's resource on this host, and the QEMU that it is about.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use towline_image::atomic_file::LockedFile;
use towline_launch::{GuestName, RunningGuest, RuntimeRoot};

use super::super::refusal::{Outcome, Refusal};

/// Roles.
pub(super) const STARTED: &str = "started";
pub(super) const PROMOTED: &str = "promoted";
/// Locked by a claim.
const CLAIMING: &str = "claiming";
/// Times of the first claim with a copy, and of the last one, in seconds since boot.
const CLAIMED_SINCE: &str = "claimed-since";
/// Seconds between two claims, at most, of those that are made without a pause.
const PAUSE_MAX: i64 = 3;
/// There until the scores of other hosts are removed.
pub(super) const SCORES_LEFT: &str = "scores-left";
/// Mark of the last start.
const MARK: &str = "mark";
/// Time for a claim, which may be killed at any moment.
const CLAIM_ENDS_WITHIN: Duration = Duration::from_secs(2);
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

    /// Returns true if it has this role, or this is left to do.
    pub(super) fn has(&self, name: &str) -> bool {
        self.directory.join(name).exists()
    }

    /// Ends a role, or what is left to do. Removing a file needs no room on a file system that is full.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.directory.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) fn is_promoted(&self) -> bool {
        self.has(STARTED) && self.has(PROMOTED)
    }

    pub(super) fn set_started(&self) -> io::Result<()> {
        self.remove(CLAIMED_SINCE)?;
        File::create(self.directory.join(CLAIMING))?;
        fs::write(self.directory.join(STARTED), "")
    }

    pub(super) fn set_promoted(&self) -> io::Result<()> {
        fs::write(self.directory.join(SCORES_LEFT), "")?;
        fs::write(self.directory.join(PROMOTED), "")
    }

    /// A mark of a new start.
    pub(super) fn new_mark(&self) -> io::Result<String> {
        fs::create_dir_all(&self.directory)?;
        let mark = format!("{:016x}", fastrand::u64(..));
        fs::write(self.directory.join(MARK), &mark)?;
        Ok(mark)
    }

    /// That of the last start.
    pub(super) fn mark(&self) -> io::Result<String> {
        fs::read_to_string(self.directory.join(MARK))
    }

    /// Keeps a demotion, and a stop, from being done until it is dropped, or this process ends.
    ///
    /// # Errors
    /// Another claim has it.
    pub(super) fn claiming(&self) -> Result<LockedFile, Refusal> {
        let file = self.lock()?;
        file.0.set_len(0)?;
        write!(&file.0, "{}", std::process::id())?;
        Ok(file)
    }

    /// Locks it, which needs no room on a file system that is full: a stop must not fail for that.
    fn lock(&self) -> Result<LockedFile, Refusal> {
        let file = File::options().read(true).write(true).open(self.directory.join(CLAIMING))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(LockedFile(file)),
            Err(Errno::WOULDBLOCK) => Err(Refusal::failed("another claim is made on this host; wait for it")),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until no claim is made here that was begun before. One that takes long, or was stopped, is killed.
    pub(super) fn await_claims(&self, within: Duration) -> Outcome {
        let (begun, path) = (Instant::now(), self.directory.join(CLAIMING));
        while path.exists() {
            match self.lock() {
                Ok(_) => break,
                Err(refusal) if begun.elapsed() >= within => return Err(refusal),
                Err(_) if begun.elapsed() >= CLAIM_ENDS_WITHIN => {
                    let claim = fs::read_to_string(&path).ok().and_then(|text| text.parse().ok());
                    if let Some(claim) = claim.and_then(Pid::from_raw) {
                        let _ = kill_process(claim, Signal::KILL);
                    }
                }
                Err(_) => {}
            }
            thread::sleep(LOCK_INTERVAL);
        }
        Ok(())
    }

    /// Returns true once claims were made with a copy for this time, without a pause. It is counted from then on again.
    pub(super) fn has_claimed_for(&self, time: Duration) -> Result<bool, Refusal> {
        let (path, now) = (self.directory.join(CLAIMED_SINCE), clock_gettime(ClockId::Boottime).tv_sec);
        let times = fs::read_to_string(&path).ok();
        let times = times.as_deref().and_then(|text| text.split_once(' '));
        let times =
            times.and_then(|(since, last)| Some((since.parse::<i64>().ok()?, last.parse::<i64>().ok()?)));
        let since = times.filter(|(_, last)| now - last <= PAUSE_MAX).map_or(now, |(since, _)| since);
        let is_long = now - since >= time.as_secs().cast_signed();
        fs::write(&path, format!("{} {now}", if is_long { now } else { since }))?;
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::symlink;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;

    #[test]
    fn a_stop_needs_no_room() {
        let place = tempfile::tempdir().unwrap();
        let instance = Instance { guest: "web".parse().unwrap(), directory: place.path().to_owned() };
        // A file that cannot grow, as on a file system that is full.
        let full = memfd_create("full", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&full, SealFlags::GROW).unwrap();
        symlink(format!("/proc/self/fd/{}", full.as_raw_fd()), place.path().join(CLAIMING)).unwrap();
        assert!(instance.claiming().is_err(), "a claim could not be killed");
        instance.await_claims(Duration::ZERO).unwrap();
        // One that is made is waited for.
        let claiming = instance.lock().unwrap();
        assert!(instance.await_claims(Duration::ZERO).is_err());
        drop(claiming);
        instance.await_claims(Duration::ZERO).unwrap();
    }
}
