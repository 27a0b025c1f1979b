//! Takes a running guest as it is at one instant: it is stopped for as long as its devices are saved and its written pages are read.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use towline_image::{Image, Origin};
use towline_protocol::device_state::DeviceState;
use towline_qmp::commands::{AddFd, RemoveFd, RunState, XenSaveDevicesState};

use super::{BasedGuest, CapturedGuest, Error, GuestDisks};
use crate::journal::{JournalEntry, UndoRecord};
use crate::qemu::Qemu;

/// A guest that is about to be taken: what it has written already has its room here, so that only its content is copied while it is
/// stopped.
#[derive(Debug)]
pub(crate) struct PreparedCapture {
    based: BasedGuest,
    devices: DeviceFile,
}

impl PreparedCapture {
    /// Prepares the guest of `qemu`, which runs on `image`, and does not stop it.
    ///
    /// # Errors
    /// [`Error::OtherState`]; [`Error::NotBased`]: it does not run on the image; [`Error::NotCaptured`]; [`Error::Qemu`].
    pub(crate) fn of(qemu: &mut Qemu, image: &Arc<Image>) -> Result<Self, Error> {
        running(qemu)?;
        let socket = qemu.socket().to_owned();
        let not_based =
            |reason| Error::NotBased { socket: socket.clone(), image: image.path().to_owned(), reason };
        let mut based = BasedGuest::of(qemu, image).map_err(not_based)?;
        based.capture().map_err(|source| Error::NotCaptured { socket, source })?;
        Ok(Self { based, devices: DeviceFile::open(qemu)? })
    }

    /// Reads the guest's memory once more, while it runs. A guest that is taken soon afterwards is stopped for a shorter time: some
    /// 10 ms for 64 MiB. Without that, one stop in ten takes 50 ms if QEMUs were started since the last reading.
    ///
    /// # Errors
    /// [`Error::NotCaptured`].
    pub(crate) fn read_again(&mut self, qemu: &Qemu) -> Result<(), Error> {
        self.based.capture().map_err(|source| Error::NotCaptured { socket: qemu.socket().to_owned(), source })
    }

    /// Bytes that the guest has written so far.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.based.written_bytes()
    }

    /// Bytes of an image's chunks in which it has written so far.
    pub(crate) fn written_chunk_bytes(&self) -> u64 {
        self.based.written_chunk_bytes()
    }

    /// Takes the guest, whose origin this is, and its disks once all else was. Afterwards it runs on, if it ran before.
    ///
    /// # Errors
    /// [`Error::OtherState`]; [`Error::NotCaptured`]; [`Error::Qemu`]; those of `disks`. The guest runs on.
    pub(crate) fn take(
        self,
        qemu: &mut Qemu,
        disks: &mut GuestDisks,
        mut origin: Origin,
    ) -> Result<CapturedGuest, Error> {
        let Self { mut based, mut devices } = self;
        let socket = qemu.socket().to_owned();
        let not_captured = |source: io::Error| Error::NotCaptured { socket: socket.clone(), source };
        let ran = running(qemu)?;
        // A cancelled command does not leave it stopped.
        qemu.wait_for_replies();
        let entry = ran.then(|| qemu.record(&UndoRecord::Stopped { overlays: disks.overlays() })).flatten();
        let begun = Instant::now();
        let stopped = if ran { qemu.stop().map_err(Error::from) } else { Ok(()) };
        let taken = stopped.and_then(|()| {
            thread::scope(|scope| {
                let memory = Builder::new().spawn_scoped(scope, || based.capture()).map_err(not_captured)?;
                let saved = devices.save(qemu);
                tracing::debug!(after_us = begun.elapsed().as_micros(), "devices saved");
                let memory = memory.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                saved?;
                memory.map_err(not_captured)
            })?;
            tracing::debug!(after_us = begun.elapsed().as_micros(), "memory copied");
            disks.take(qemu)
        });
        let standstill =
            if ran { run_on(qemu, entry.as_ref())?.duration_since(begun) } else { Duration::ZERO };
        let closed = devices.close(qemu);
        taken?;
        let state = closed.map_err(not_captured)?;
        let state = DeviceState::of_saved(&state, based.image().devices())
            .map_err(|error| not_captured(io::Error::other(error.to_string())))?;
        if let Some(process) = &mut origin.process {
            process.disks = disks.stored();
        }
        let guest = based.into_guest(state, origin, standstill)?;
        let (written, standstill_us) = (guest.written_bytes(), standstill.as_micros());
        tracing::info!(written, standstill_us, socket = qemu.socket(), "guest taken");
        Ok(guest)
    }
}

/// Returns true if the guest runs, and false if it is paused.
///
/// # Errors
/// [`Error::OtherState`]: it is neither, or is being migrated.
fn running(qemu: &mut Qemu) -> Result<bool, Error> {
    let status = qemu.status()?.status;
    let state = match qemu.migration()?.status.filter(|migration| !migration.is_idle()) {
        Some(migration) => format!("being migrated ({})", migration.as_str()),
        None if status == RunState::RUNNING => return Ok(true),
        None if status == RunState::PAUSED => return Ok(false),
        None => format!("`{}`", status.as_str()),
    };
    Err(Error::OtherState { socket: qemu.socket().to_owned(), state })
}

/// Runs the guest on, also one that may not have been stopped. Returns the time at which it ran.
fn run_on(qemu: &mut Qemu, entry: Option<&JournalEntry>) -> Result<Instant, Error> {
    // The record stays if this fails, and the next command runs it on.
    qemu.cont()?;
    let at = Instant::now();
    entry.into_iter().for_each(JournalEntry::done);
    Ok(at)
}

/// A file in memory that QEMU writes the state of the devices to.
#[derive(Debug)]
struct DeviceFile {
    file: File,
    set: i64,
}

impl DeviceFile {
    fn open(qemu: &mut Qemu) -> Result<Self, Error> {
        let socket = qemu.socket().to_owned();
        let failed = |source: io::Error| Error::NotCaptured { socket: socket.clone(), source };
        let file =
            memfd_create("towline-devices", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let file = File::from(file);
        // QEMU takes a descriptor of a set only for the access that it was opened with.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let writer = File::options().write(true).open(path).map_err(failed)?;
        let add = AddFd { fdset_id: None, opaque: Some("towline devices".into()) };
        let set = qemu.client().execute_with_fds(&add, &[writer.as_fd()])?.fdset_id;
        Ok(Self { file, set })
    }

    fn save(&self, qemu: &mut Qemu) -> Result<(), Error> {
        let filename = format!("/dev/fdset/{}", self.set);
        qemu.client().execute(&XenSaveDevicesState { filename, live: false })?;
        Ok(())
    }

    /// Content of the file.
    fn close(&mut self, qemu: &mut Qemu) -> io::Result<Vec<u8>> {
        if let Err(error) = qemu.client().execute(&RemoveFd { fdset_id: self.set, fd: None }) {
            tracing::debug!(%error, "the descriptor of the devices stays open in QEMU");
        }
        let mut bytes = Vec::new();
        self.file.rewind()?;
        self.file.read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}
