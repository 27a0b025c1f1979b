//! The ferry, as a child of the keeper.

use std::ffi::OsString;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::super::messages::{FromFerry, Link, Received};
use super::request::Error;
use crate::procfs::start_time;

/// Reason for the end of a ferry that says nothing.
pub(super) const FERRY_ENDED: &str = "the process that takes checkpoints has ended";

/// A ferry, which is killed with this value. It outlives a keeper that is killed.
#[derive(Debug)]
pub(super) struct FerryProcess {
    child: Child,
    pub(super) link: Link<FromFerry>,
}

impl FerryProcess {
    pub(super) fn start(command: &[OsString]) -> Result<Self, Error> {
        let (program, arguments) =
            command.split_first().ok_or_else(|| Error::Ferry(std::io::ErrorKind::NotFound.into()))?;
        let [here, there] = Link::<FromFerry>::pair().map_err(Error::Ferry)?;
        // Not in the foreground group: Ctrl-C is the keeper's.
        let child = std::os::unix::process::CommandExt::process_group(&mut Command::new(program), 0)
            .args(arguments)
            .stdin(Stdio::from(there))
            .stdout(Stdio::null())
            .spawn()
            .map_err(Error::Ferry)?;
        Ok(Self { child, link: Link::new(here) })
    }

    /// Its process and start time.
    pub(super) fn identity(&self) -> (i32, u64) {
        let pid = i32::try_from(self.child.id()).unwrap_or_default();
        (pid, start_time(pid).unwrap_or_default())
    }

    /// Waits for the next message for this time.
    pub(super) fn expect(&self, within: Duration) -> Result<FromFerry, Error> {
        let not_protected = |reason| Err(Error::NotProtected { reason });
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.link.receive(left) {
                Received::Message(FromFerry::Ended { reason, .. }) => return not_protected(reason),
                Received::Message(message) => return Ok(message),
                Received::End => return not_protected(FERRY_ENDED.into()),
                Received::Nothing if left > Duration::ZERO => {}
                Received::Nothing => {
                    return not_protected(format!("no progress within {} s", within.as_secs()));
                }
            }
        }
    }

    /// Ends it at once: QEMU sees the end of its connection, and so does the standby.
    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for FerryProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
