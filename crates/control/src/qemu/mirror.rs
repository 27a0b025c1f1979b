//! Copies of disks from one QEMU to another while the guest runs: QEMU's `blockdev-mirror` at the source, to the NBD server of the
//! destination's QEMU.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use towline_qmp as qmp;
use towline_qmp::commands::{
    AddNbdNode, BlockdevMirror, CancelJob, DeleteNode, DismissJob, Empty, ExportNode, Job, MigrateContinue,
    MigrationStatus, NbdAddress, NbdListenAddress, QueryExports, QueryJobs, RunState, SetJobSpeed,
    StartNbdServer, StopNbdServer,
};

use super::{Drive, Error, Qemu};
use crate::journal::{JournalEntry, UndoRecord};

/// Name of the node, the job, the export and the bitmaps of each disk, before its number.
pub(super) const NAME: &str = "towline-disk-";
/// The first QEMU that accepts that a mirror's target is all zeros.
const TARGET_IS_ZERO_SINCE: (u32, u32) = (10, 1);
/// Timeout for jobs to end that are cancelled.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Status of a job whose target has everything, and gets each further write.
const READY: &str = "ready";
/// Status of a job that has ended.
const CONCLUDED: &str = "concluded";
/// Reaction of a job to an error: a pause. One that failed by itself would corrupt QEMU's memory if the guest writes at
/// that moment (docs/upstream.md): it ends when the guest is stopped.
const PAUSE: &str = "stop";
/// State of the input and output of a job without errors.
const OK: &str = "ok";
/// Reason of a job that ended without an error.
const ENDED_BY_OTHERS: &str = "another user of the monitor has ended its job";

/// A disk that is copied by a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirror {
    /// The drive, for people.
    pub(crate) drive: String,
    /// The job, and the node that it writes to.
    pub(crate) job: String,
}

/// State of all jobs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MirrorProgress {
    pub(crate) copied_bytes: u64,
    pub(crate) total_bytes: u64,
    /// Number of jobs whose target does not have everything yet.
    pub(crate) pending: usize,
    /// Number of those whose target may get a write after it is done; `None`: QEMU does not tell.
    pub(crate) unsynced: Option<usize>,
}

/// A disk that is not copied.
#[derive(Debug)]
pub(crate) struct MirrorFailure {
    pub(crate) drive: String,
    pub(crate) text: String,
}

impl Mirror {
    /// The mirrors of these drives.
    pub(crate) fn of(drives: &[Drive]) -> Vec<Self> {
        let mirror = |(number, drive): (usize, &Drive)| Self {
            drive: drive.name.clone(),
            job: format!("{NAME}{number}"),
        };
        drives.iter().enumerate().map(mirror).collect()
    }

    /// The jobs of these mirrors.
    pub(crate) fn jobs(mirrors: &[Self]) -> Vec<String> {
        mirrors.iter().map(|mirror| mirror.job.clone()).collect()
    }

    pub(crate) fn failed(&self, text: impl Into<String>) -> MirrorFailure {
        MirrorFailure { drive: self.drive.clone(), text: text.into() }
    }

    fn of_jobs<'a>(&self, jobs: &'a [Job]) -> Result<&'a Job, MirrorFailure> {
        let job = jobs.iter().find(|job| job.id == self.job);
        job.ok_or_else(|| self.failed(ENDED_BY_OTHERS))
    }
}

impl MirrorProgress {
    /// State of these mirrors by QEMU's jobs.
    ///
    /// # Errors
    /// The first that has ended.
    pub(crate) fn of(mirrors: &[Mirror], jobs: &[Job]) -> Result<Self, MirrorFailure> {
        let mut progress = Self { unsynced: Some(0), ..Self::default() };
        for mirror in mirrors {
            let job = mirror.of_jobs(jobs)?;
            if job.status == CONCLUDED || job.io_status != OK {
                return Err(mirror.failed(reason(job)));
            }
            progress.copied_bytes += job.offset;
            progress.total_bytes += job.len;
            progress.pending += usize::from(job.status != READY);
            let unsynced = job.actively_synced.map(|is_synced| usize::from(!is_synced));
            progress.unsynced = progress.unsynced.zip(unsynced).map(|(others, this)| others + this);
        }
        Ok(progress)
    }
}

/// Returns true once this mirror has ended with all of its disk.
///
/// # Errors
/// It has failed.
pub(crate) fn is_complete(mirror: &Mirror, jobs: &[Job]) -> Result<bool, MirrorFailure> {
    let job = mirror.of_jobs(jobs)?;
    if job.error.is_some() || job.io_status != OK {
        return Err(mirror.failed(reason(job)));
    }
    Ok(job.status == CONCLUDED)
}

impl Qemu {
    /// Starts to copy a drive to the export of its name of the NBD server on this socket, at up to this many bytes per second. `is_zero`: it
    /// is all zeros, of which that server does not tell.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn start_mirror(
        &mut self,
        mirror: &Mirror,
        drive: &Drive,
        server: &Path,
        speed: Option<u64>,
        is_zero: bool,
    ) -> Result<(), Error> {
        let version = &self.facts().version.qemu;
        let target_is_zero = is_zero && (version.major, version.minor) >= TARGET_IS_ZERO_SINCE;
        let server = NbdAddress::Unix { path: server.to_owned() };
        let node = AddNbdNode { node_name: mirror.job.clone(), server, export: drive.name.clone() };
        self.client().execute(&node)?;
        self.client().execute(&BlockdevMirror {
            job_id: mirror.job.clone(),
            device: drive.node.clone(),
            target: mirror.job.clone(),
            sync: "full",
            copy_mode: "write-blocking",
            speed: speed.unwrap_or(0),
            on_target_error: PAUSE,
            on_source_error: PAUSE,
            auto_dismiss: false,
            target_is_zero,
        })?;
        Ok(())
    }

    /// Changes the speed of a job, in bytes per second. One that has just ended has none.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn set_mirror_speed(&mut self, mirror: &Mirror, speed: Option<u64>) -> Result<(), Error> {
        let device = mirror.job.clone();
        unless_refused(self.client().execute(&SetJobSpeed { device, speed: speed.unwrap_or(0) }))
    }

    /// QEMU's jobs.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn jobs(&mut self) -> Result<Vec<Job>, Error> {
        Ok(self.client().execute(&QueryJobs)?)
    }

    /// Has this job end once its target has everything, which it then has on its storage.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn finish_mirror(&mut self, mirror: &Mirror) -> Result<(), Error> {
        self.client().execute(&CancelJob { device: mirror.job.clone(), force: false })?;
        Ok(())
    }

    /// Ends these jobs, whether they are there or not, and removes them with their nodes, and what compares their disks. The guest keeps
    /// its own disks, and is stopped for a moment. Close the connections to the target before, for which a job and the guest's writes wait;
    /// and wait for the end of a migration, which may have the guest run on.
    ///
    /// # Errors
    /// [`Error::Qmp`]; [`Error::JobRuns`].
    pub(crate) fn drop_mirrors(&mut self, jobs: &[String]) -> Result<(), Error> {
        let is_running = |job: &&Job| jobs.contains(&job.id) && job.status != CONCLUDED;
        if self.jobs()?.iter().any(|job| is_running(&job)) {
            self.while_stopped(|qemu| qemu.cancel_jobs(is_running))?;
        }
        jobs.iter().try_for_each(|job| self.remove_mirror(job))?;
        self.end_comparison()
    }

    /// Does this while the guest, if it runs, is stopped, with none of its writes on their way.
    fn while_stopped(&mut self, act: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<(), Error> {
        if self.status()?.status != RunState::RUNNING {
            return act(self);
        }
        // A cancelled command does not leave it stopped.
        self.wait_for_replies();
        let entry = self.record(&UndoRecord::Stopped { overlays: Vec::new() });
        let done = self.stop().and_then(|()| act(self));
        self.cont()?;
        entry.iter().for_each(JournalEntry::done);
        done
    }

    fn cancel_jobs(&mut self, is_running: impl Fn(&&Job) -> bool) -> Result<(), Error> {
        for job in self.jobs()?.iter().filter(&is_running) {
            unless_refused(self.client().execute(&CancelJob { device: job.id.clone(), force: true }))?;
        }
        let deadline = Instant::now() + END_TIMEOUT;
        while let Some(job) = self.jobs()?.iter().find(&is_running) {
            if Instant::now() >= deadline {
                return Err(Error::JobRuns { socket: self.socket().to_owned(), job: job.id.clone() });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Removes an ended job and its node, if they are there.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn remove_mirror(&mut self, job: &str) -> Result<(), Error> {
        unless_refused(self.client().execute(&DismissJob { id: job.to_owned() }))?;
        unless_refused(self.client().execute(&DeleteNode { node_name: job.to_owned() }))
    }

    /// Has a migration that waits before its switchover go on.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn continue_migration(&mut self) -> Result<(), Error> {
        self.client().execute(&MigrateContinue { state: MigrationStatus::PRE_SWITCHOVER })?;
        Ok(())
    }

    /// Has QEMU's NBD server offer these drives by their names, to be written, on a socket.
    ///
    /// # Errors
    /// [`Error::Qmp`]: also if another user has started the server.
    pub(crate) fn export_drives(&mut self, drives: &[Drive], socket: &Path) -> Result<(), Error> {
        let addr = NbdListenAddress::Unix { path: socket.to_owned() };
        self.client().execute(&StartNbdServer { addr })?;
        for (number, drive) in drives.iter().enumerate() {
            let exported = self.client().execute(&ExportNode {
                id: format!("{NAME}{number}"),
                node_name: drive.node.clone(),
                name: drive.name.clone(),
                writable: true,
                bitmaps: Vec::new(),
            });
            if let Err(error) = exported {
                unless_refused(self.client().execute(&StopNbdServer))?;
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Ends QEMU's NBD server, if it offers drives for towline.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn end_exports(&mut self) -> Result<(), Error> {
        let exports = self.client().execute(&QueryExports)?;
        if exports.iter().any(|export| export.id.starts_with(NAME)) {
            unless_refused(self.client().execute(&StopNbdServer))?;
        }
        Ok(())
    }
}

fn reason(job: &Job) -> String {
    match (&job.error, job.io_status.as_str()) {
        (Some(error), _) => error.clone(),
        (None, OK) => ENDED_BY_OTHERS.into(),
        (None, "nospace") => "No space left on device".into(),
        (None, _) => "an error of the connection, or of one of the disks".into(),
    }
}

/// Accepts a refusal: there is nothing to end.
pub(super) fn unless_refused(result: Result<Empty, qmp::Error>) -> Result<(), Error> {
    match result {
        Err(qmp::Error::Refusal { desc, .. }) => {
            tracing::debug!(desc, "nothing to end");
            Ok(())
        }
        result => Ok(result.map(drop)?),
    }
}
