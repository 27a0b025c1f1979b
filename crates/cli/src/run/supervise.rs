//! Supervision of running guests until the last one has ended.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde_json::json;
use towline_channel::Cancel;
use towline_control::plan::Observer as _;
use towline_launch::RunningQemu;

use super::image::RunImage;
use super::report::StartedGuest;
use crate::console;
use crate::exit::Exit;
use crate::progress::Reporter;

/// Time in which QEMUs end by themselves; those that remain are killed.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the exit status of an ended process arrives.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Guests that were started. They are ended when this is dropped, unless they are detached.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    started: Vec<StartedGuest>,
}

impl Guests {
    pub(crate) fn push(&mut self, guest: StartedGuest) {
        self.started.push(guest);
    }

    pub(crate) fn started(&self) -> &[StartedGuest] {
        &self.started
    }

    /// Leaves them running. Those that were started with this process as their owner are killed.
    pub(crate) fn detach(mut self) {
        drop(std::mem::take(&mut self.started));
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        end(&self.started);
    }
}

/// Waits until all guests have ended, or ends them once `cancel` is cancelled. `mapped` is the image whose memory they map: a change of
/// it is reported, as the reason of an end or once all have ended.
pub(crate) fn supervise(
    mut guests: Guests,
    mapped: Option<&RunImage>,
    cancel: &Cancel,
    reporter: &Reporter,
) -> Result<Exit> {
    let exit = wait_for_all(&mut guests, mapped, cancel, reporter);
    if let Some(change) = mapped.and_then(RunImage::change) {
        reporter.notice(&change);
    }
    exit
}

fn wait_for_all(
    guests: &mut Guests,
    mapped: Option<&RunImage>,
    cancel: &Cancel,
    reporter: &Reporter,
) -> Result<Exit> {
    let mut exit = Exit::Done;
    while !guests.started.is_empty() {
        wait(&guests.started, cancel)?;
        let mut index = 0;
        while let Some(guest) = guests.started.get(index) {
            if has_ended(guest)? {
                // Dropping it frees its name.
                exit = exit.max(ended(&guests.started.swap_remove(index), mapped, reporter));
            } else {
                index += 1;
            }
        }
        if cancel.is_cancelled() {
            return Ok(exit);
        }
    }
    Ok(exit)
}

/// Waits for the end of a guest, or for a signal.
fn wait(guests: &[StartedGuest], cancel: &Cancel) -> Result<()> {
    let mut fds: Vec<PollFd<'_>> =
        guests.iter().map(|guest| PollFd::from_borrowed_fd(guest.qemu.pidfd(), PollFlags::IN)).collect();
    fds.push(PollFd::new(cancel, PollFlags::IN));
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno).context("waiting for the end of guests"),
    }
}

fn has_ended(guest: &StartedGuest) -> Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(guest.qemu.pidfd(), PollFlags::IN)];
    match poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).context("waiting for the end of a guest"),
    }
}

/// Reports the end of a guest.
fn ended(guest: &StartedGuest, mapped: Option<&RunImage>, reporter: &Reporter) -> Exit {
    let name = guest.qemu.directory().name();
    let status = guest.qemu.wait(STATUS_TIMEOUT);
    let is_success = status.is_some_and(|status| status.success());
    let text = status.map_or_else(|| "unknown exit status".into(), |status| status.to_string());
    reporter.event("ended", json!({ "name": name.as_str(), "success": is_success, "text": text }));
    if is_success {
        reporter.line(&format!("{name} has ended"));
        return Exit::Done;
    }
    let reason = mapped.and_then(RunImage::change).unwrap_or_else(|| guest.qemu.log_tail());
    console::error(&format!("QEMU of {name} ended ({text}): {reason}"));
    Exit::Failed
}

/// Ends the guests: those that do not end in time by SIGKILL.
fn end(guests: &[StartedGuest]) {
    // One that does not end delays no other guest.
    thread::scope(|scope| {
        for guest in guests {
            let ender = thread::Builder::new().name("end".into());
            if let Err(error) = ender.spawn_scoped(scope, || end_one(&guest.qemu)) {
                tracing::debug!(%error, "no thread");
                end_one(&guest.qemu);
            }
        }
    });
}

fn end_one(qemu: &RunningQemu) {
    let deadline = Instant::now() + END_TIMEOUT;
    // By its process: its monitor's path may be another guest's by now, and its monitor another client's.
    qemu.quit();
    if qemu.wait(deadline.saturating_duration_since(Instant::now())).is_none() {
        tracing::warn!(name = %qemu.directory().name(), "QEMU has not ended and is killed");
        // One that outlives this process is not killed when it is dropped.
        qemu.kill();
        let _ = qemu.wait(STATUS_TIMEOUT);
    }
}
