//! Copies of disks from one QEMU to another while the guest runs: QEMU's `blockdev-mirror` at the source, to the NBD server of the
//! destination's QEMU.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use towline_qmp as qmp;
use towline_qmp::commands::{
    AddNbdNode, BlockdevMirror, CancelJob, DeleteNode, DismissJob, ExportNode, Job, MigrateContinue,
    MigrationStatus, NbdAddress, NbdListenAddress, QueryJobs, SetJobSpeed, StartNbdServer, StopNbdServer,
};

use super::{Drive, Error, Qemu};

/// Name of the node and of the job of each disk, before its number.
const NAME: &str = "towline-disk-";
/// Timeout for a job to end: the target writes what it has not on its disk.
const END_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Status of a job whose target has everything, and gets each further write.
const READY: &str = "ready";
/// Status of a job that has ended.
const CONCLUDED: &str = "concluded";

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
    /// True once each target has everything.
    pub(crate) is_ready: bool,
}

/// A disk that was not copied.
#[derive(Debug)]
pub(crate) struct MirrorFailure {
    pub(crate) drive: String,
    pub(crate) text: String,
}

impl Mirror {
    /// The mirror of the drive with this number.
    pub(crate) fn of(number: usize, drive: &Drive) -> Self {
        Self { drive: drive.name.clone(), job: format!("{NAME}{number}") }
    }

    fn failed(&self, text: impl Into<String>) -> MirrorFailure {
        MirrorFailure { drive: self.drive.clone(), text: text.into() }
    }
}

impl Qemu {
    /// Starts to copy a drive to the export of its name of the NBD server on this socket, at up to this many bytes per second.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn start_mirror(
        &mut self,
        mirror: &Mirror,
        drive: &Drive,
        server: &Path,
        speed: Option<u64>,
    ) -> Result<(), Error> {
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
            auto_dismiss: false,
        })?;
        Ok(())
    }

    /// Changes the speed of these jobs, in bytes per second.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn set_mirror_speed(&mut self, mirrors: &[Mirror], speed: Option<u64>) -> Result<(), Error> {
        for mirror in mirrors {
            let speed = speed.unwrap_or(0);
            self.client().execute(&SetJobSpeed { device: mirror.job.clone(), speed })?;
        }
        Ok(())
    }

    /// State of these jobs, or the first that has failed.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn mirror_progress(
        &mut self,
        mirrors: &[Mirror],
    ) -> Result<Result<MirrorProgress, MirrorFailure>, Error> {
        let jobs = self.client().execute(&QueryJobs)?;
        let mut progress = MirrorProgress { is_ready: true, ..MirrorProgress::default() };
        for mirror in mirrors {
            match job_of(mirror, &jobs) {
                None => return Ok(Err(mirror.failed("another user of the monitor has ended its job"))),
                Some(job) if job.status == CONCLUDED => return Ok(Err(mirror.failed(reason(job)))),
                Some(job) => {
                    progress.copied_bytes += job.current_progress;
                    progress.total_bytes += job.total_progress;
                    progress.is_ready &= job.status == READY;
                }
            }
        }
        Ok(Ok(progress))
    }

    /// Ends these jobs once the guest is stopped: each target has all of its disk then, on its storage.
    ///
    /// # Errors
    /// [`Error::Qmp`]; one that failed is in the result.
    pub(crate) fn complete_mirrors(
        &mut self,
        mirrors: &[Mirror],
    ) -> Result<Result<(), MirrorFailure>, Error> {
        if let Err(failure) = self.mirror_progress(mirrors)? {
            return Ok(Err(failure));
        }
        for mirror in mirrors {
            self.client().execute(&CancelJob { device: mirror.job.clone(), force: false })?;
        }
        for mirror in mirrors {
            match self.await_end(&mirror.job)? {
                Some(job) if job.status == CONCLUDED && job.error.is_none() => {}
                Some(job) => return Ok(Err(mirror.failed(reason(&job)))),
                None => return Ok(Err(mirror.failed("its job has ended with an unknown result"))),
            }
            self.remove_mirror(&mirror.job)?;
        }
        Ok(Ok(()))
    }

    /// Ends these jobs, whether they are there or not, and removes their nodes. The guest keeps its own disks.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn drop_mirrors(&mut self, jobs: &[String]) -> Result<(), Error> {
        let found = self.client().execute(&QueryJobs)?;
        for job in found.iter().filter(|found| jobs.contains(&found.id)) {
            if job.status != CONCLUDED {
                unless_refused(
                    self.client().execute(&CancelJob { device: job.id.clone(), force: true }).map(drop),
                )?;
            }
            self.await_end(&job.id)?;
        }
        jobs.iter().try_for_each(|job| self.remove_mirror(job))
    }

    /// Removes an ended job and its node, if they are there.
    fn remove_mirror(&mut self, job: &str) -> Result<(), Error> {
        unless_refused(self.client().execute(&DismissJob { id: job.to_owned() }).map(drop))?;
        unless_refused(self.client().execute(&DeleteNode { node_name: job.to_owned() }).map(drop))
    }

    /// Waits until a job has ended; `None`: there is none any more.
    fn await_end(&mut self, id: &str) -> Result<Option<Job>, Error> {
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            let job = self.client().execute(&QueryJobs)?.into_iter().find(|job| job.id == id);
            match job {
                Some(job) if job.status != CONCLUDED && Instant::now() < deadline => {
                    thread::sleep(POLL_INTERVAL);
                }
                job => return Ok(job),
            }
        }
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
    /// [`Error::Qmp`].
    pub(crate) fn export_drives(&mut self, drives: &[Drive], socket: &Path) -> Result<(), Error> {
        let addr = NbdListenAddress::Unix { path: socket.to_owned() };
        self.client().execute(&StartNbdServer { addr })?;
        for (number, drive) in drives.iter().enumerate() {
            self.client().execute(&ExportNode {
                id: format!("{NAME}{number}"),
                node_name: drive.node.clone(),
                name: drive.name.clone(),
                writable: true,
            })?;
        }
        Ok(())
    }

    /// Ends QEMU's NBD server, if it runs.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn end_exports(&mut self) -> Result<(), Error> {
        unless_refused(self.client().execute(&StopNbdServer).map(drop))
    }
}

fn job_of<'a>(mirror: &Mirror, jobs: &'a [Job]) -> Option<&'a Job> {
    jobs.iter().find(|job| job.id == mirror.job)
}

fn reason(job: &Job) -> String {
    match &job.error {
        Some(error) => error.clone(),
        None => format!("its job was ended ({})", job.status),
    }
}

/// Accepts a refusal: there is nothing to end.
fn unless_refused(result: Result<(), qmp::Error>) -> Result<(), Error> {
    match result {
        Err(qmp::Error::Refusal { desc, .. }) => {
            tracing::debug!(desc, "nothing to end");
            Ok(())
        }
        result => Ok(result?),
    }
}
