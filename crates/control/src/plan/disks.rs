//! Disks that move with their guest: its QEMU mirrors them to the NBD server of the destination's QEMU.
//!
//! ```text
//!   QEMU here ── unix ──► towline here ══ tcp, TLS by the keys of the move ══► towline there ── unix ──► QEMU there (NBD server)
//!   blockdev-mirror, write-blocking:
//!     copy ─► ready ─► [memory is transferred] ─► guest stopped (pre-switchover) ─► jobs ended, flushed ─► device state ─► …
//! ```
//! Until the device state is sent, the guest's disk is the one at the source. Whatever fails until then leaves it complete, because a mirror
//! writes every block to it as well. Afterwards both disks are equal, and the stream's session decides who has the guest.
//! A failed move leaves a part of a disk at the destination, whose owner removes it.

mod compare;
mod connection;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_qmp as qmp;
use towline_qmp::commands::{MigrationInfo, MigrationStatus};

use super::context::Context;
use super::error::{Error, check_cancelled};
use super::forward::{FarEnds, Forwarder};
use super::private_dir::PrivateDir;
use super::progress::{CopyPhase, DiskProgress, Progress};
use super::request::WritableDisks;
use crate::journal::{JournalEntry, UndoRecord};
use crate::qemu::{self, Mirror, MirrorFailure, MirrorProgress, Qemu, is_complete};
use compare::{Comparison, serve};
use connection::{Purpose, connected};

/// Socket of the source's QEMU, and of the destination's.
const MIRROR_SOCKET: &str = "mirror.sock";
const EXPORT_SOCKET: &str = "export.sock";
/// Interval of queries for the progress of the copy.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Timeout for the last writes to be on the storage of the other host, while the guest is stopped.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
const FLUSH_INTERVAL: Duration = Duration::from_millis(1);
/// Limit from which on a copy makes progress within any timeout, in bytes per second.
const STEADY_SPEED: u64 = 1 << 20;

/// Disks of a source that are copied.
#[derive(Debug)]
pub(super) struct DiskMirrors {
    mirrors: Vec<Mirror>,
    entry: Option<JournalEntry>,
    /// True once they have ended successfully.
    are_complete: bool,
    /// Until they are to end.
    forwarder: Option<Forwarder>,
    comparison: Option<Comparison>,
}

impl DiskMirrors {
    /// Copies the disks, if the request has it so, and returns when the other QEMU has all of them and gets each further write.
    ///
    /// # Errors
    /// [`Error::DiskNotCopied`]; [`Error::Cancelled`]. The caller ends what was begun, by [`Self::end`].
    pub(super) fn start(
        qemu: &mut Qemu,
        dir: &PrivateDir,
        context: &Context<'_>,
        begun: &mut Option<Self>,
    ) -> Result<(), Error> {
        let WritableDisks::Mirrored { to, compare } = &context.options.disks else { return Ok(()) };
        context.require_paths(qemu)?;
        context.observer.phase(CopyPhase::Disks);
        let drives = qemu.written_drives()?;
        let far = drives
            .iter()
            .map(|drive| connected(drive, to, Purpose::Content, context))
            .collect::<Result<_, _>>()?;
        let far = FarEnds::Connected(Mutex::new(far));
        let forwarder = Forwarder::start(Arc::new(dir.listen(MIRROR_SOCKET)?), far, None)?;
        let mirrors = Mirror::of(&drives);
        let jobs = Mirror::jobs(&mirrors);
        qemu.wait_for_replies();
        // Of a towline that was killed.
        qemu.drop_mirrors(&jobs)?;
        let entry = qemu.record(&UndoRecord::Mirrors { jobs });
        let this = begun.insert(Self {
            mirrors,
            entry,
            are_complete: false,
            forwarder: Some(forwarder),
            comparison: None,
        });
        let (socket, speed) = (dir.join(MIRROR_SOCKET), speed(context, drives.len()));
        for (mirror, drive) in this.mirrors.iter().zip(&drives) {
            context.check_cancelled()?;
            qemu.start_mirror(mirror, drive, &socket, speed, false).map_err(|error| match error {
                qemu::Error::Qmp(qmp::Error::Refusal { desc, .. }) => mirror.failed(desc).into(),
                error => Error::from(error),
            })?;
        }
        this.await_ready(qemu, context, speed)?;
        if *compare {
            this.comparison = Some(Comparison::start(qemu, &drives, dir, to, context)?);
        }
        Ok(())
    }

    fn await_ready(
        &self,
        qemu: &mut Qemu,
        context: &Context<'_>,
        mut applied: Option<u64>,
    ) -> Result<(), Error> {
        let mut last = (0, Instant::now());
        loop {
            context.check_cancelled()?;
            let jobs = qemu.jobs()?;
            let found = MirrorProgress::of(&self.mirrors, &jobs)?;
            let disks = DiskProgress { copied: found.copied_bytes, total: found.total_bytes };
            context.observer.progress(&Progress { disks: Some(disks), ..Progress::default() });
            if found.pending == 0 {
                return Ok(());
            }
            let speed = speed(context, found.pending);
            if std::mem::replace(&mut applied, speed) != speed {
                self.mirrors.iter().try_for_each(|mirror| qemu.set_mirror_speed(mirror, speed))?;
            }
            if found.copied_bytes != last.0 {
                last = (found.copied_bytes, Instant::now());
            }
            let may_stall = speed.is_some_and(|speed| speed < STEADY_SPEED);
            if !may_stall && last.1.elapsed() >= context.options.peer_timeout {
                let text =
                    format!("the other QEMU has taken nothing for {:.1} s", last.1.elapsed().as_secs_f64());
                return Err(self.mirrors[0].failed(text).into());
            }
            let is_ready = |event: &qmp::Event| event.name == "BLOCK_JOB_READY";
            // None, or a lost monitor, which the next query finds.
            let _ = qemu.client().wait_event(is_ready, PROGRESS_INTERVAL);
        }
    }

    /// Returns true if the source's migration has to wait for them.
    pub(super) fn are_active(&self) -> bool {
        !self.are_complete
    }

    /// Finds a disk that is not copied any more, and a migration that another user of the monitor had go on without them.
    pub(super) fn check(&self, qemu: &mut Qemu, migration: &MigrationInfo) -> Result<(), Error> {
        let goes_on =
            |status: &MigrationStatus| [MigrationStatus::DEVICE, MigrationStatus::COMPLETED].contains(status);
        if let (true, Some(mirror)) = (migration.status.as_ref().is_some_and(goes_on), self.mirrors.first()) {
            return Err(mirror.failed("another user of the monitor had the migration go on before").into());
        }
        // A QEMU that stops its guest does not reply for as long as that takes.
        let Some(jobs) = qemu.try_query(Qemu::jobs)? else { return Ok(()) };
        MirrorProgress::of(&self.mirrors, &jobs)?;
        Ok(())
    }

    /// Ends them when the guest is stopped and its migration waits: both disks are equal then, which is proven if that was requested.
    pub(super) fn complete(&mut self, qemu: &mut Qemu, cancel: &Cancel) -> Result<(), Error> {
        MirrorProgress::of(&self.mirrors, &qemu.jobs()?)?;
        self.mirrors.iter().try_for_each(|mirror| qemu.finish_mirror(mirror))?;
        let begun = Instant::now();
        loop {
            let jobs = qemu.jobs()?;
            let complete = self.mirrors.iter().map(|mirror| is_complete(mirror, &jobs));
            let complete: Vec<bool> = complete.collect::<Result<_, _>>()?;
            let Some(pending) = complete.iter().position(|complete| !complete) else { break };
            check_cancelled(cancel)?;
            if begun.elapsed() >= FLUSH_TIMEOUT {
                let text = format!("the last writes are not on its disk after {} s", FLUSH_TIMEOUT.as_secs());
                return Err(self.mirrors[pending].failed(text).into());
            }
            thread::sleep(FLUSH_INTERVAL);
        }
        if let Some(comparison) = self.comparison.take() {
            comparison.finish(qemu, cancel)?;
        }
        self.mirrors.iter().try_for_each(|mirror| qemu.remove_mirror(&mirror.job))?;
        self.are_complete = true;
        Ok(())
    }

    /// Closes their connections, for which jobs, writes of the guest and the end of its migration wait.
    pub(super) fn disconnect(&mut self) {
        self.forwarder = None;
        self.comparison = None;
    }

    /// Ends them in any state, once they are disconnected.
    ///
    /// # Errors
    /// A job does not end; the journal still has it.
    pub(super) fn end(self, qemu: &mut Qemu) -> Result<(), Error> {
        let Self { mirrors, entry, are_complete, .. } = self;
        if !are_complete {
            qemu.drop_mirrors(&Mirror::jobs(&mirrors))?;
        }
        entry.iter().for_each(JournalEntry::done);
        Ok(())
    }
}

/// Bytes per second at which each of this number of disks may be copied.
fn speed(context: &Context<'_>, disks: usize) -> Option<u64> {
    let changed = context.options.tuning.max_bandwidth();
    let all = changed.unwrap_or(context.options.transfer_options().max_bandwidth)?;
    Some((all / disks.max(1) as u64).max(1))
}

impl From<MirrorFailure> for Error {
    fn from(failure: MirrorFailure) -> Self {
        Self::DiskNotCopied { drive: failure.drive, text: failure.text }
    }
}

/// Disks of a destination that its source writes.
#[derive(Debug)]
pub(super) struct DiskExports {
    entry: Option<JournalEntry>,
    forwarder: Forwarder,
}

impl DiskExports {
    /// Offers the drives of this QEMU to those that connect to a listener; `None` if the request has none.
    pub(super) fn start(
        qemu: &mut Qemu,
        dir: &PrivateDir,
        context: &Context<'_>,
    ) -> Result<Option<Self>, Error> {
        let WritableDisks::Exported { listener } = &context.options.disks else { return Ok(None) };
        context.require_paths(qemu)?;
        let (drives, socket) = (qemu.written_drives()?, dir.join(EXPORT_SOCKET));
        let server = socket.clone();
        let far = FarEnds::By(Box::new(move |near, cancel| serve(near, &server, cancel)));
        let forwarder = Forwarder::start(Arc::clone(listener), far, Some(context.cancel))?;
        qemu.wait_for_replies();
        let entry = qemu.record(&UndoRecord::Exports);
        match qemu.export_drives(&drives, &socket) {
            Ok(()) => Ok(Some(Self { entry, forwarder })),
            Err(error) => {
                entry.iter().for_each(JournalEntry::done);
                Err(error.into())
            }
        }
    }

    /// Accepts that the source closes its connections: its guest is on its way.
    pub(super) fn expect_ends(&self) {
        self.forwarder.expect_ends();
    }

    /// Ends that.
    pub(super) fn end(&self, qemu: &mut Qemu) -> Result<(), Error> {
        qemu.end_exports()?;
        self.entry.iter().for_each(JournalEntry::done);
        Ok(())
    }
}
