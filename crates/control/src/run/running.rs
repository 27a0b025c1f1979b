//! Guests whose QEMUs were started: restored there, supervised until the last one has ended, or left alone.

use std::io;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_launch::{CreatedDisk, RunningQemu};
use towline_migration::LaneSends;

use super::guests::{GuestStart, MemoryOrigin};
use super::image::{ImageChange, RunImage};
use super::options::Error;
use crate::plan::{
    CloneTarget, Clones, CopyPhase, CopyRequest, CopyResult, Destination, Failure, Observer, OwnQemu,
    Progress,
};
use crate::qemu::StartedQemu;

/// Time in which QEMUs end by themselves; those that remain are killed.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the exit status of an ended process arrives.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest that was started.
#[derive(Debug)]
pub struct StartedGuest {
    /// The QEMU.
    pub qemu: RunningQemu,
    /// Time at which its monitor answered.
    pub answered: Instant,
    /// Name and command line of the guest.
    pub start: GuestStart,
    /// Monitor of the QEMU, for the copy; `None`: the copy connects to it.
    pub(super) monitor: Option<StartedQemu>,
    /// Removed with this value, unless they are kept.
    pub(super) overlays: Vec<CreatedDisk>,
    /// True once the guest may have run, so it may have written to its disks.
    pub(super) has_run: AtomicBool,
}

/// Guests that were started. They are ended when this is dropped, unless they were taken out.
#[derive(Debug, Default)]
pub(super) struct Guests(pub(super) Vec<StartedGuest>);

impl Drop for Guests {
    fn drop(&mut self) {
        // By their processes: a monitor's path may be another guest's by now, and a monitor another client's.
        self.0.iter().for_each(|guest| guest.qemu.quit());
        let deadline = Instant::now() + END_TIMEOUT;
        for StartedGuest { qemu, start, .. } in &self.0 {
            if qemu.wait(deadline.saturating_duration_since(Instant::now())).is_none() {
                tracing::warn!(name = %start.name, "QEMU has not ended and is killed");
                // One that outlives this process is not killed when it is dropped.
                qemu.kill();
                let _ = qemu.wait(STATUS_TIMEOUT);
            }
        }
    }
}

/// QEMUs that wait for their guests or run them. Dropping it ends them.
#[derive(Debug)]
#[must_use]
pub struct Running {
    /// Origin of the guests' memory.
    pub memory: MemoryOrigin,
    // Ended before the lock of the image goes.
    pub(super) guests: Guests,
    pub(super) image: RunImage,
    pub(super) request: CopyRequest,
}

/// A guest that has ended.
#[derive(Debug)]
pub struct GuestEnd<'a> {
    /// The guest.
    pub guest: &'a StartedGuest,
    /// Exit status of its QEMU; `None` if it is not known.
    pub status: Option<ExitStatus>,
    /// The likely reason of a QEMU that ended with an error while its guest mapped the image.
    pub change: Option<ImageChange>,
}

/// Receives what becomes of the guests while they are restored, from several threads.
#[derive(Clone, Copy)]
pub struct RestoreObserver<'a> {
    /// Observers of the guests, in their order.
    pub guests: &'a [&'a dyn Observer],
    /// Receives notices that concern all of them.
    pub all: &'a dyn Observer,
    /// Called for each guest as soon as it runs.
    pub running: &'a (dyn Fn(&StartedGuest) + Sync),
    /// Called for each restore as soon as it ends.
    pub ended: &'a (dyn Fn(usize, &CopyResult) + Sync),
}

/// The restore of one guest.
struct GuestRestore<'a> {
    guest: &'a StartedGuest,
    destination: Destination,
    observer: &'a dyn Observer,
    running: &'a (dyn Fn(&StartedGuest) + Sync),
}

impl Observer for GuestRestore<'_> {
    fn phase(&self, phase: CopyPhase) {
        self.observer.phase(phase);
        // It runs before this is known: `Running` follows the answer to `cont`, which may get lost.
        if matches!(phase, CopyPhase::Release | CopyPhase::CutOver | CopyPhase::Running) {
            self.guest.has_run.store(true, Ordering::Relaxed);
        }
        if phase == CopyPhase::Running {
            (self.running)(self.guest);
        }
    }

    fn progress(&self, progress: &Progress) {
        self.observer.progress(progress);
    }

    fn lanes(&self, lanes: &[LaneSends]) {
        self.observer.lanes(lanes);
    }

    fn notice(&self, text: &str) {
        self.observer.notice(text);
    }
}

impl GuestRestore<'_> {
    fn target(&self) -> CloneTarget<'_> {
        CloneTarget {
            destination: &self.destination,
            observer: self,
            own: Some(OwnQemu {
                started: self.guest.monitor.as_ref(),
                reflink: &self.guest.start.reflink,
                links_down: &self.guest.start.links_down,
            }),
        }
    }
}

impl Running {
    /// The image's absolute path, or its location.
    pub fn image(&self) -> &Path {
        &self.image.name
    }

    /// The guests.
    pub fn guests(&self) -> &[StartedGuest] {
        &self.guests.0
    }

    /// Restores the image into all QEMUs, and runs the guests. Returns the results in the order of the
    /// guests.
    ///
    /// # Errors
    /// Nothing was touched: one of the restores is not possible.
    pub fn restore(
        &self,
        observer: RestoreObserver<'_>,
        cancel: &Cancel,
    ) -> Result<Vec<CopyResult>, Failure> {
        let RestoreObserver { guests, all, running, ended } = observer;
        let watched = self.guests().iter().zip(guests);
        let restores = watched.map(|(guest, observer)| GuestRestore {
            guest,
            destination: Destination::Qmp(guest.qemu.qmp_path()),
            observer: *observer,
            running,
        });
        let restores: Vec<_> = restores.collect();
        let targets: Vec<_> = restores.iter().map(GuestRestore::target).collect();
        let clones = Clones { targets: &targets, options: &self.request, cancel, observer: all, ended };
        let copied = self.image.copy_to_all(&clones)?;
        for (guest, copied) in self.guests().iter().zip(&copied) {
            if copied.as_ref().is_err_and(|failure| failure.guest.needs_attention()) {
                guest.has_run.store(true, Ordering::Relaxed);
            }
        }
        Ok(copied)
    }

    /// Continues with the guests after this result of [`Self::restore`], unless one has failed that another
    /// towline cannot finish: then all are ended, since all of them are in the image. Overlays of guests that
    /// may have run are kept, because they have what those wrote; the others are removed.
    pub fn settle(
        mut self,
        restored: &Result<Vec<CopyResult>, Failure>,
        observer: &dyn Observer,
    ) -> Option<Self> {
        let is_lost =
            |copied: &CopyResult| copied.as_ref().is_err_and(|failure| !failure.guest.lacks_memory());
        let is_ended = restored.as_ref().map_or(true, |copied| copied.iter().any(is_lost));
        if !is_ended || self.guests.0.iter().any(|guest| guest.has_run.load(Ordering::Relaxed)) {
            self.image.keep();
        }
        for guest in &mut self.guests.0 {
            let has_run = guest.has_run.load(Ordering::Relaxed);
            // Those of guests that go on are their disks.
            if !is_ended || has_run {
                guest.overlays.drain(..).for_each(CreatedDisk::keep);
            }
            for overlay in guest.start.overlays.iter().filter(|_| is_ended && has_run) {
                let (name, path) = (&guest.start.name, overlay.path.display());
                observer.notice(&format!("{name} may have run: overlay {path} is kept"));
            }
        }
        (!is_ended).then_some(self)
    }

    /// Leaves the guests running. Those that were started with this process as their owner are killed.
    pub fn detach(mut self) {
        drop(std::mem::take(&mut self.guests.0));
    }

    /// Waits until all guests have ended, or until `cancel`. Calls `ended` for each one that ends.
    ///
    /// # Errors
    /// [`Error::Wait`].
    pub fn supervise(&mut self, cancel: &Cancel, ended: &mut dyn FnMut(&GuestEnd<'_>)) -> Result<(), Error> {
        let guests = &mut self.guests.0;
        while !guests.is_empty() {
            for index in wait(guests, cancel).map_err(Error::Wait)?.into_iter().rev() {
                // Dropping it frees its name.
                let guest = guests.swap_remove(index);
                let status = guest.qemu.wait(STATUS_TIMEOUT);
                let is_success = status.is_some_and(|status| status.success());
                let change = if is_success { None } else { change(&self.memory, &self.image) };
                ended(&GuestEnd { guest: &guest, status, change });
            }
            if cancel.is_cancelled() {
                break;
            }
        }
        Ok(())
    }

    /// The change of an image whose memory the guests map or mapped.
    pub fn image_change(&self) -> Option<ImageChange> {
        change(&self.memory, &self.image)
    }
}

fn change(memory: &MemoryOrigin, image: &RunImage) -> Option<ImageChange> {
    if *memory == MemoryOrigin::Mapped { image.change() } else { None }
}

/// Waits for the end of guests, or for a signal. Returns the indexes of those that have ended.
fn wait(guests: &[StartedGuest], cancel: &Cancel) -> io::Result<Vec<usize>> {
    let pidfds = guests.iter().map(|guest| guest.qemu.pidfd());
    let mut fds: Vec<_> = pidfds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    fds.push(PollFd::new(cancel, PollFlags::IN));
    match poll(&mut fds, None) {
        Ok(_) => Ok((0..guests.len()).filter(|&index| !fds[index].revents().is_empty()).collect()),
        Err(Errno::INTR) => Ok(Vec::new()),
        Err(errno) => Err(errno.into()),
    }
}
