//! Guests from an image, each in a QEMU that is started here, supervised until the last one has ended.
//!
//! ```text
//!   prepare ─► Prepared ─ start ─► Running ─ restore ─ settle ─► Running ─ supervise, or detach
//!   image locked,                  names, overlays, QEMUs        the guests run
//!   command lines allowed          └─ dropped: the QEMUs are ended, and overlays of guests that never ran are removed
//! ```
//! The image is locked (shared) until the last guest has ended, and never changes: a guest that fails is
//! still in it. An image may come from anyone; what names something of this host is in [`RunOptions::host`].
//!
//! Out of scope: the command line and output, and an upgrade of these guests (`upgrade`). Limits: Linux,
//! QEMUs of one user on one host.

#[cfg(feature = "store")]
mod cache;
mod guests;
mod image;
mod options;
mod parent;
mod running;
#[cfg(test)]
mod tests;

use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};
use std::thread::{self, Builder};
use std::time::Instant;

use towline_channel::{Cancel, Error as ChannelError};
use towline_launch::{CreatedDisk, GuestDirectory, HostArguments, IncomingOption, Launcher, QemuVersion};

use crate::lock::lock;
use crate::plan::{AfterCopy, CopyRequest, PostcopyStart, RequestedPages, Task, TransferOptions};
use crate::qemu::StartedQemu;
use guests::PlannedGuests;
use image::RunImage;
use running::Guests;

pub(crate) use guests::main_memory;
pub use guests::{GuestStart, MemoryOrigin, Notice, recorded_command_line};
pub use image::ImageChange;
pub use options::{
    CommandLineTrust, Disks, Download, Error, FirstState, ImageLocation, MemoryRequest, Networks,
    PrepareContext, RunOptions,
};
pub use running::{GuestEnd, RestoreObserver, Running, StartedGuest};

/// Guests of which none was started.
#[derive(Debug)]
pub struct Prepared<'a> {
    /// Notices for the user, before the guests start.
    pub notices: Vec<Notice>,
    options: &'a RunOptions,
    host: HostArguments,
    image: RunImage,
    starts: Vec<GuestStart>,
    memory: MemoryOrigin,
}

/// A guest whose name and disks are its own.
struct Claimed {
    start: GuestStart,
    directory: GuestDirectory,
    overlays: Vec<CreatedDisk>,
}

/// Use of the connections by which monitors have answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Monitors {
    /// The copy continues with it.
    Kept,
    /// Closed: the QEMUs are compared with each other first, or need another kind of connection.
    Free,
}

/// Opens the image, which is copied from its store to a file first if guests are to map it, and makes the
/// command lines of its guests.
///
/// # Errors
/// Everything of the image, its command line or this host that excludes a start.
pub fn prepare<'a>(options: &'a RunOptions, context: PrepareContext<'_>) -> Result<Prepared<'a>, Error> {
    // Only memory that is mapped depends on it; that of a fork's own QEMU is known once its guest is.
    let is_given = !options.host.binary.as_os_str().is_empty();
    let (image, version) = thread::scope(|scope| {
        // The binary runs for its version while a store is waited for.
        let of_binary = || QemuVersion::of_binary(&options.host);
        let version =
            (options.memory.is_mapped() && is_given).then(|| Builder::new().spawn_scoped(scope, of_binary));
        let image = RunImage::open(options, context);
        let version = version.transpose().map_err(ChannelError::NoThread)?;
        let version = version.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        image.map(|image| (image, version))
    })?;
    let host = image.host(&options.host);
    let version = version.or_else(|| image.version(&host));
    let planned = guests::plan(options, &image, &host, version.transpose()?)?;
    let PlannedGuests { starts, memory, notices } = planned;
    Ok(Prepared { notices, options, host, image, starts, memory })
}

impl Prepared<'_> {
    /// Starts the QEMUs, as many at once as the host has processors, since nearly all of it is QEMU's own
    /// work. Each is started after a call of `starting`. Returns when their monitors have answered.
    ///
    /// # Errors
    /// A name that is taken, an overlay that cannot be made, or a QEMU that does not start. Then the others
    /// are ended, and nothing is left of any of them.
    pub fn start(self, cancel: &Cancel, starting: &(dyn Fn(&GuestStart) + Sync)) -> Result<Running, Error> {
        let Self { options, host, mut image, starts, memory, .. } = self;
        let count = starts.len();
        let is_kept = count == 1 && options.memory != MemoryRequest::Postcopy;
        let monitors = if is_kept { Monitors::Kept } else { Monitors::Free };
        image.make_overlays(&host)?;
        let mut claimed = claim(starts, options)?;
        let version = image.version(&host).transpose()?;
        if memory == MemoryOrigin::Mapped && image.store_for_many(options, cancel)? {
            claimed.iter_mut().try_for_each(|guest| guest.start.map_from(&image, version))?;
        }
        let waiting = Mutex::new(claimed.into_iter());
        // If anything fails, those that were started are ended.
        let (started, failed) = (Mutex::new(Guests::default()), OnceLock::new());
        let work = || {
            while !cancel.is_cancelled() {
                let next = {
                    let mut waiting = lock(&waiting);
                    let next = waiting.next();
                    // In their order.
                    next.iter().for_each(|guest| starting(&guest.start));
                    next
                };
                let Some(guest) = next else { return };
                match start_one(guest, options, &image, monitors) {
                    Ok(guest) => lock(&started).0.push(guest),
                    Err(error) => {
                        lock(&waiting).by_ref().for_each(drop);
                        failed.get_or_init(|| error);
                    }
                }
            }
        };
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(count);
        thread::scope(|scope| {
            // This thread is one of them.
            let prepare = || image.prepare();
            let prepared = Builder::new().spawn_scoped(scope, prepare).map_err(ChannelError::NoThread)?;
            (1..threads).for_each(|_| drop(Builder::new().spawn_scoped(scope, work)));
            work();
            prepared.join().unwrap_or_else(|panic| resume_unwind(panic))
        })?;
        let mut guests = std::mem::take(&mut *lock(&started));
        failed.into_inner().map_or(Ok(()), Err)?;
        cancel.check()?;
        guests.0.sort_by_key(|guest| guest.start.n);
        Ok(Running { memory, guests, image, request: request(options) })
    }
}

/// Takes the names of the guests, and then makes their overlays: only the run that has a name makes the disks
/// of that name.
fn claim(starts: Vec<GuestStart>, options: &RunOptions) -> Result<Vec<Claimed>, Error> {
    let mut claimed = Vec::new();
    for start in starts {
        let directory = options.root.claim(&start.name)?;
        claimed.push(Claimed { start, directory, overlays: Vec::new() });
    }
    for Claimed { start, overlays, .. } in &mut claimed {
        for overlay in &start.overlays {
            overlays.push(overlay.create(&start.host)?);
        }
    }
    Ok(claimed)
}

fn start_one(
    claimed: Claimed,
    options: &RunOptions,
    image: &RunImage,
    monitors: Monitors,
) -> Result<StartedGuest, Error> {
    let Claimed { start, directory, overlays } = claimed;
    let mut launcher = Launcher::new(directory);
    launcher.incoming = IncomingOption::Defer;
    launcher.image = Some(image.name.clone());
    launcher.lifetime = options.lifetime;
    launcher.generations.clone_from(&options.generations);
    // A guest that outlives this process keeps the lock.
    launcher.descriptors.extend(image.lock().map_err(Error::Lock)?.map(Into::into));
    let (line, host) = (&start.command_line, &start.host);
    let started = match monitors {
        Monitors::Kept => launcher
            .start_with(line, host, |qemu, options| {
                StartedQemu::connect(&qemu.qmp_path(), qemu.pid(), options)
            })
            .map(|(qemu, monitor)| (qemu, Some(monitor))),
        Monitors::Free => launcher.start(line, host).map(|qemu| (qemu, None)),
    };
    let (qemu, monitor) =
        started.map_err(|source| Error::NotStarted { guest: start.name.clone(), source })?;
    let (answered, has_run) = (Instant::now(), AtomicBool::new(false));
    Ok(StartedGuest { qemu, answered, start, monitor, overlays, has_run })
}

/// The copy that brings the guests into their QEMUs.
fn request(options: &RunOptions) -> CopyRequest {
    let RunOptions { memory, state, .. } = *options;
    let (transfer, run) = (TransferOptions::default(), Some(state == FirstState::Running));
    let task = match memory {
        MemoryRequest::Postcopy => Task::Postcopy {
            transfer,
            start: PostcopyStart::Copy { run },
            requested_pages: RequestedPages::MainChannel,
        },
        _ => Task::Copy { transfer, after: AfterCopy::SourcePaused { run }, base: None },
    };
    CopyRequest { requires_mapped_memory: memory == MemoryRequest::Mapped, ..CopyRequest::new(task) }
}
