//! Transfer of the device's own state through a pipe of the frontend, while the session continues to reply.
//!
//! The frontend owns the other end: it may send slowly, never, or without end. So there is one transfer at a
//! time, of at most [`DEVICE_STATE_BYTES_MAX`], with progress at least every [`QUIET_MAX`]. Dropping a
//! transfer ends it.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::Cancel;

use super::rings::CANCELLED_WITHIN;
use crate::device::{BackendError, Device};
use crate::message::TransferDirection;
use crate::orphaned_threads::OrphanedThreads;

/// Maximum size of a state. A device's own state is small, because rings and memory travel with the guest.
const DEVICE_STATE_BYTES_MAX: u64 = 64 << 20;
/// Time limit without progress. On a migration's destination the frontend waits for its own stream.
const QUIET_MAX: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
/// Time limit of CHECK_DEVICE_STATE for the rest of the transfer. The frontend has seen its end already.
const CHECK_WITHIN: Duration = Duration::from_secs(10);
/// Interval at which a wait checks for cancellation.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit for the thread to end when the transfer is dropped.
const END_WITHIN: Duration = Duration::from_secs(1);
/// Size of a read.
const READ_BYTES: usize = 64 << 10;

/// Loaded state; `None` for a save.
type Outcome = io::Result<Option<Vec<u8>>>;

/// A transfer under way.
pub(super) struct StateTransfer {
    device: Arc<dyn Device>,
    /// Receives the thread if it does not end.
    orphans: Arc<OrphanedThreads>,
    thread: Option<JoinHandle<()>>,
    outcome: Receiver<Outcome>,
    stop: Cancel,
}

impl StateTransfer {
    /// Begins a transfer in a thread: a pipe holds less than a state, and the frontend reads only after our
    /// reply.
    pub(super) fn begin(
        device: Arc<dyn Device>,
        orphans: Arc<OrphanedThreads>,
        direction: TransferDirection,
        fd: OwnedFd,
    ) -> Result<Self, BackendError> {
        let saved = match direction {
            TransferDirection::Save => Some(device.save()?),
            TransferDirection::Load => None,
        };
        let stop = Cancel::new().map_err(|error| BackendError::new(error.to_string()))?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(io::Error::from)?;
        let pipe = Pipe { file: File::from(fd), stop: stop.clone() };
        let (sender, outcome) = channel();
        let transfer = move || {
            let outcome = match saved {
                Some(state) => pipe.write(&state).map(|()| None),
                None => pipe.read().map(Some),
            };
            // The frontend reads the end of the pipe before it sends CHECK_DEVICE_STATE.
            drop(pipe);
            // A session that was dropped does not receive it.
            let _ = sender.send(outcome);
        };
        let thread = std::thread::Builder::new().name("device-state".into()).spawn(transfer)?;
        Ok(Self { device, orphans, thread: Some(thread), outcome, stop })
    }

    /// Returns true while its descriptor is in use.
    pub(super) fn is_under_way(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Waits for the end of the transfer, which the frontend has seen already, and loads the state into the
    /// device.
    ///
    /// # Errors
    /// If it failed, or does not end because the frontend keeps its end of the pipe open.
    pub(super) fn finish(self, cancel: Option<&Cancel>) -> Result<(), BackendError> {
        let began = Instant::now();
        let until = began + CHECK_WITHIN;
        let transferred = loop {
            match self.outcome.recv_timeout(CANCEL_INTERVAL) {
                Ok(outcome) => break outcome,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(BackendError::new("the transfer's thread panicked"));
                }
                Err(RecvTimeoutError::Timeout)
                    if began.elapsed() >= CANCELLED_WITHIN && cancel.is_some_and(Cancel::is_cancelled) =>
                {
                    return Err(BackendError::new("cancelled because the process is to end"));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                    let seconds = CHECK_WITHIN.as_secs();
                    return Err(BackendError::new(format!(
                        "the transfer has not ended after {seconds} s; the frontend has to close its end of the pipe first"
                    )));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        match transferred? {
            Some(state) if state.len() as u64 > DEVICE_STATE_BYTES_MAX => Err(BackendError::new(format!(
                "the state has more than {DEVICE_STATE_BYTES_MAX} bytes; is it of this device?"
            ))),
            Some(state) => self.device.load(&state),
            None => Ok(()),
        }
    }
}

impl Drop for StateTransfer {
    fn drop(&mut self) {
        self.stop.cancel();
        // It ends at its next check, unless the frontend has made the descriptor blocking again.
        if let Some(thread) = self.thread.take() {
            self.orphans.join(thread, &self.outcome, END_WITHIN);
        }
    }
}

/// The frontend's descriptor, with a token that ends the transfer.
struct Pipe {
    file: File,
    stop: Cancel,
}

impl Pipe {
    fn write(&self, mut state: &[u8]) -> io::Result<()> {
        while !state.is_empty() {
            match (&self.file).write(state) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => state = &state[written..],
                Err(error) => self.wait(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    /// Reads up to the end, or more than DEVICE_STATE_BYTES_MAX.
    fn read(&self) -> io::Result<Vec<u8>> {
        let mut state = Vec::new();
        let mut bytes = vec![0; READ_BYTES];
        loop {
            self.check()?;
            match (&self.file).read(&mut bytes) {
                Ok(0) => return Ok(state),
                Ok(read) => state.extend_from_slice(&bytes[..read]),
                Err(error) => self.wait(error, PollFlags::IN)?,
            }
            if state.len() as u64 > DEVICE_STATE_BYTES_MAX {
                return Ok(state);
            }
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.stop.is_cancelled() { Err(io::Error::other("the transfer was cancelled")) } else { Ok(()) }
    }

    /// Waits after a call that would have blocked; returns other errors.
    fn wait(&self, error: io::Error, events: PollFlags) -> io::Result<()> {
        self.check()?;
        match error.kind() {
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::WouldBlock => {}
            _ => return Err(error),
        }
        let mut fds = [
            PollFd::from_borrowed_fd(self.file.as_fd(), events),
            PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&QUIET_MAX)) {
            Ok(0) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no progress in the frontend's pipe for {} s", QUIET_MAX.tv_sec),
            )),
            Ok(_) | Err(Errno::INTR) => self.check(),
            Err(errno) => Err(errno.into()),
        }
    }
}
