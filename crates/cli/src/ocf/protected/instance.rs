//! The instance of a guest's resource on this host, and the QEMU that it is about.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use towline_launch::{GuestName, RunningGuest, RuntimeRoot};

use super::super::here;
use super::super::refusal::{Outcome, Refusal};

const STARTED: &str = "started";
const PROMOTED: &str = "promoted";

/// An instance, whose role and claims are files.
pub(super) struct Instance {
    pub(super) guest: GuestName,
    directory: PathBuf,
}

/// QEMU of the guest on this host.
#[derive(Debug)]
pub(super) enum Qemu {
    /// It has the guest.
    Guest(RunningGuest),
    /// It waits for the guest of another host.
    Waiting(RunningGuest),
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

    /// File that names the claimant of a generation on this host.
    pub(super) fn claim_path(&self, generation: u64) -> PathBuf {
        self.directory.join(format!("generation.{generation}"))
    }

    /// # Errors
    /// A guest whose state cannot be read may be this one.
    pub(super) fn qemu(&self) -> Result<Option<Qemu>, Refusal> {
        let guests = RuntimeRoot::of_user().list()?;
        let found = guests.into_iter().find(|guest| guest.name == self.guest.as_str());
        let kind = |found| match here::is_agent_working(&found) {
            true => Qemu::Waiting(found),
            false => Qemu::Guest(found),
        };
        Ok(found.map(kind))
    }

    pub(super) fn kill(&self, qemu: &RunningGuest, within: Duration) -> Outcome {
        match qemu.kill(within) {
            true => Ok(()),
            false => Err(Refusal::failed(format!("the QEMU of {} cannot be killed", self.guest))),
        }
    }
}

fn remove(path: PathBuf) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
