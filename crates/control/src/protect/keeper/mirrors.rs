//! The guest's disks, which its QEMU mirrors to the ferry.

use std::path::Path;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_qmp::Event;

use super::request::Error;
use crate::journal::{JournalEntry, UndoRecord};
use crate::nbd::Export;
use crate::plan::{DiskProgress, Observer, Progress};
use crate::qemu::{self, Drive, Mirror, MirrorFailure, MirrorProgress, Qemu};

/// Interval of looks at the jobs, and of reports.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Time without progress after which the copy is given up.
const STALLED_AFTER: Duration = Duration::from_secs(120);

/// Disks of a guest that is protected.
#[derive(Debug)]
pub(super) struct DiskMirrors {
    drives: Vec<Drive>,
    /// Of mirrors that were begun.
    entry: Option<JournalEntry>,
}

impl DiskMirrors {
    /// The drives that the guest of this QEMU writes.
    pub(super) fn of(qemu: &mut Qemu) -> Result<Self, qemu::Error> {
        Ok(Self { drives: qemu.written_drives()?, entry: None })
    }

    /// Their description for the ferry, and for the standby.
    pub(super) fn disks(&self) -> Vec<Export> {
        let disk = |Drive { name, bytes, .. }: &Drive| Export { name: name.clone(), bytes: *bytes };
        self.drives.iter().map(disk).collect()
    }

    /// Has QEMU mirror them to this socket, and returns when the other host has all of them and gets each further write. `are_new`: they are
    /// all zeros there.
    ///
    /// # Errors
    /// [`Error::DiskNotCopied`]; [`Error::Cancelled`]. The caller ends what was begun, by [`Self::end`].
    pub(super) fn start(
        &mut self,
        qemu: &mut Qemu,
        socket: &Path,
        are_new: bool,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<(), Error> {
        if self.drives.is_empty() {
            return Ok(());
        }
        let mirrors = Mirror::of(&self.drives);
        let jobs = Mirror::jobs(&mirrors);
        // Of a towline that was killed.
        qemu.drop_mirrors(&jobs)?;
        self.entry = Some(qemu.record(&UndoRecord::Mirrors { jobs }).ok_or(Error::NoJournal)?);
        for (mirror, drive) in mirrors.iter().zip(&self.drives) {
            qemu.start_mirror(mirror, drive, socket, None, are_new)?;
        }
        await_ready(&mirrors, qemu, cancel, observer)
    }

    /// Finds a disk that is not copied any more.
    ///
    /// # Errors
    /// [`Error::DiskNotCopied`].
    pub(super) fn check(&self, qemu: &mut Qemu) -> Result<(), Error> {
        if self.entry.is_some() {
            MirrorProgress::of(&Mirror::of(&self.drives), &qemu.jobs()?)?;
        }
        Ok(())
    }

    /// As [`Self::check`], if this event may be of that.
    pub(super) fn check_after(&self, event: &Event, qemu: &mut Qemu) -> Result<(), Error> {
        if event.name.starts_with("BLOCK_JOB_") { self.check(qemu) } else { Ok(()) }
    }

    /// Ends them, once the ferry is dead, which they are connected to: QEMU reports each further write as an error.
    pub(super) fn end(&mut self, qemu: &mut Qemu) -> Result<(), qemu::Error> {
        if let Some(entry) = self.entry.take() {
            qemu.drop_mirrors(&Mirror::jobs(&Mirror::of(&self.drives)))?;
            entry.done();
        }
        Ok(())
    }
}

fn await_ready(
    mirrors: &[Mirror],
    qemu: &mut Qemu,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<(), Error> {
    let mut last = (0, Instant::now());
    loop {
        let found = MirrorProgress::of(mirrors, &qemu.jobs()?)?;
        // Until none is unsynced a write may be done before the copy has it.
        let Some(unsynced) = found.unsynced else {
            let text = "its QEMU does not tell when all of it is there; 8.2 and later do";
            return Err(mirrors[0].failed(text).into());
        };
        let disks = DiskProgress { copied: found.copied_bytes, total: found.total_bytes };
        observer.progress(&Progress { disks: Some(disks), ..Progress::default() });
        if found.pending + unsynced == 0 {
            return Ok(());
        }
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if found.copied_bytes != last.0 {
            last = (found.copied_bytes, Instant::now());
        }
        if last.1.elapsed() >= STALLED_AFTER {
            let text = format!("the other host has taken nothing for {} s", STALLED_AFTER.as_secs());
            return Err(mirrors[0].failed(text).into());
        }
        // None, or a lost monitor, which the next query finds.
        let _ = qemu.client().wait_event(|event| event.name == "BLOCK_JOB_READY", LOOK_INTERVAL);
    }
}

impl From<MirrorFailure> for Error {
    fn from(failure: MirrorFailure) -> Self {
        Self::DiskNotCopied { drive: failure.drive, text: failure.text }
    }
}
