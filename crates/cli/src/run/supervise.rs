//! Supervision of running guests until the last one has ended.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_launch::RunningQemu;
use towline_qmp::commands::Quit;
use towline_qmp::{Client, Options};

use crate::console;
use crate::exit::Exit;
use crate::progress::Reporter;

/// Time limit of a monitor's replies at the end.
const QUIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time in which QEMUs end after `quit`; those that remain are killed.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the exit status of an ended process arrives.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until all guests have ended, or ends them once `cancel` is cancelled.
pub(crate) fn supervise(mut guests: Vec<RunningQemu>, cancel: &Cancel, reporter: &Reporter) -> Result<Exit> {
    let mut exit = Exit::Done;
    while !guests.is_empty() {
        wait(&guests, cancel)?;
        let mut index = 0;
        while let Some(guest) = guests.get(index) {
            if has_ended(guest)? {
                // Dropping it frees its name.
                exit = exit.max(ended(&guests.swap_remove(index), reporter));
            } else {
                index += 1;
            }
        }
        if cancel.is_cancelled() {
            end(guests);
            return Ok(exit);
        }
    }
    Ok(exit)
}

/// Waits for the end of a guest, or for a signal.
fn wait(guests: &[RunningQemu], cancel: &Cancel) -> Result<()> {
    let mut fds: Vec<PollFd<'_>> =
        guests.iter().map(|guest| PollFd::from_borrowed_fd(guest.pidfd(), PollFlags::IN)).collect();
    fds.push(PollFd::new(cancel, PollFlags::IN));
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno).context("waiting for the end of guests"),
    }
}

fn has_ended(guest: &RunningQemu) -> Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(guest.pidfd(), PollFlags::IN)];
    match poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).context("waiting for the end of a guest"),
    }
}

/// Reports the end of a guest.
fn ended(guest: &RunningQemu, reporter: &Reporter) -> Exit {
    let name = guest.directory().name();
    match guest.wait(STATUS_TIMEOUT) {
        Some(status) if status.success() => {
            reporter.line(&format!("{name} has ended"));
            Exit::Done
        }
        status => {
            let status = status.map_or_else(|| "unknown exit status".into(), |status| status.to_string());
            console::error(&format!("QEMU of {name} ended ({status}): {}", guest.log_tail()));
            Exit::Failed
        }
    }
}

/// Ends the guests: by their monitors, and those that do not end in time by SIGKILL, when they are dropped.
pub(crate) fn end(guests: Vec<RunningQemu>) {
    let options = Options { deadline: QUIT_TIMEOUT, greeting_deadline: QUIT_TIMEOUT, ..Options::default() };
    for guest in &guests {
        let quit = Client::connect(guest.qmp_path(), &options).and_then(|mut client| client.execute(&Quit));
        if let Err(error) = quit {
            tracing::debug!(name = %guest.directory().name(), %error, "QEMU is not ended by its monitor");
        }
    }
    let deadline = Instant::now() + END_TIMEOUT;
    for guest in &guests {
        if guest.wait(deadline.saturating_duration_since(Instant::now())).is_none() {
            tracing::warn!(name = %guest.directory().name(), "QEMU has not ended and is killed");
        }
    }
    drop(guests);
}
