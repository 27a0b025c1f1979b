//! The device's own state, through a pipe of the frontend's, while the session goes on answering.
//!
//! The frontend owns the other end: it may send slowly, never, or without end. One transfer at a time, of at most
//! [`DEVICE_STATE_BYTES_MAX`], that has to move within [`QUIET_MAX`]; dropping it ends it.

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

use crate::device::{Device, Refusal};
use crate::message::Direction;

/// The longest state that is taken. A device's own state is small: what is in rings and memory travels with the guest.
pub(super) const DEVICE_STATE_BYTES_MAX: u64 = 64 << 20;
/// How long no byte may come or go. On a migration's destination the frontend waits for its own stream.
const QUIET_MAX: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
/// How long CHECK_DEVICE_STATE waits for the rest, of which the frontend has seen the end already.
const CHECK_WITHIN: Duration = Duration::from_secs(10);
/// Between two looks whether the session is cancelled, while it waits.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);
/// How long the thread may take to end when the transfer is dropped.
const END_WITHIN: Duration = Duration::from_secs(1);
/// Bytes that are read at a time.
const READ_BYTES: usize = 64 << 10;

/// What a load came to; nothing for a save.
type Outcome = io::Result<Option<Vec<u8>>>;

/// A transfer under way.
pub(super) struct StateTransfer {
    device: Arc<dyn Device>,
    thread: Option<JoinHandle<()>>,
    outcome: Receiver<Outcome>,
    stop: Cancel,
}

impl StateTransfer {
    /// Begins it: a pipe holds less than a state, and the frontend reads only when it has our answer.
    pub(super) fn begin(device: Arc<dyn Device>, direction: Direction, fd: OwnedFd) -> Result<Self, Refusal> {
        let saved = match direction {
            Direction::Save => Some(device.save()?),
            Direction::Load => None,
        };
        let stop = Cancel::new().map_err(|error| Refusal::new(error.to_string()))?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(io::Error::from)?;
        let pipe = Pipe { file: File::from(fd), stop: stop.clone() };
        let (sender, outcome) = channel();
        let transfer = move || {
            let outcome = match saved {
                Some(state) => pipe.write(&state).map(|()| None),
                None => pipe.read().map(Some),
            };
            // The frontend sees the end of the pipe before it is told anything.
            drop(pipe);
            // A session that is gone does not need it.
            let _ = sender.send(outcome);
        };
        let thread = std::thread::Builder::new().name("device-state".into()).spawn(transfer)?;
        Ok(Self { device, thread: Some(thread), outcome, stop })
    }

    /// Whether its descriptor is still in use.
    pub(super) fn is_under_way(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Waits for its end, which the frontend has seen already, and hands what was read to the device.
    ///
    /// # Errors
    /// That it failed, or does not end: the frontend keeps its end of the pipe open.
    pub(super) fn finish(self, cancel: Option<&Cancel>) -> Result<(), Refusal> {
        let until = Instant::now() + CHECK_WITHIN;
        let transferred = loop {
            match self.outcome.recv_timeout(CANCEL_INTERVAL) {
                Ok(outcome) => break outcome,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Refusal::new("the transfer's thread panicked"));
                }
                Err(RecvTimeoutError::Timeout) if cancel.is_some_and(Cancel::is_cancelled) => {
                    return Err(Refusal::new("the process is to end"));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                    let seconds = CHECK_WITHIN.as_secs();
                    return Err(Refusal::new(format!(
                        "the transfer is not over after {seconds} s; the frontend closes its end of the pipe before it asks"
                    )));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        match transferred? {
            Some(state) if state.len() as u64 > DEVICE_STATE_BYTES_MAX => Err(Refusal::new(format!(
                "the state is longer than {DEVICE_STATE_BYTES_MAX} bytes; is it this device's?"
            ))),
            Some(state) => self.device.load(&state),
            None => Ok(()),
        }
    }
}

impl Drop for StateTransfer {
    fn drop(&mut self) {
        self.stop.cancel();
        let Some(thread) = self.thread.take() else { return };
        // It ends as soon as it looks, unless the frontend has made the descriptor blocking again.
        match self.outcome.recv_timeout(END_WITHIN) {
            Ok(_) | Err(RecvTimeoutError::Disconnected) => drop(thread.join()),
            Err(RecvTimeoutError::Timeout) => {
                tracing::error!("a transfer of device state does not end; its thread is left behind");
            }
        }
    }
}

/// The frontend's descriptor, and what ends the transfer.
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

    /// All of it, or one byte more than is allowed.
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
        if self.stop.is_cancelled() { Err(io::Error::other("the transfer was given up")) } else { Ok(()) }
    }

    /// After a call that failed: waits if it would have blocked.
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
                format!("the frontend's pipe is quiet for {} s", QUIET_MAX.tv_sec),
            )),
            Ok(_) | Err(Errno::INTR) => self.check(),
            Err(errno) => Err(errno.into()),
        }
    }
}
