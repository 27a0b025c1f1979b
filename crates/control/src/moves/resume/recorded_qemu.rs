//! The QEMU of one end of an interrupted move, if it is on this host and proven to be the recorded one.

use std::thread;
use std::time::{Duration, Instant};

use towline_qmp as qmp;
use towline_qmp::commands::{MigrationStatus, RunState, Status};

use super::super::{Error, MoveEnd, MoveRecord};
use crate::qemu::{self, Qemu, is_live};
use crate::switchover::{DestinationStatus, FinalRunState, RunFailure, SourceStatus};

/// Timeout for a guest to run after `cont`.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// See the module's text.
#[derive(Debug)]
pub(super) enum RecordedQemu {
    Qemu(Box<Qemu>),
    /// The process has exited.
    Exited,
    /// The state is unknown, for this reason.
    Unknown(String),
    /// The end is on another host, or an image.
    Elsewhere,
}

/// A guest that could not be started.
#[derive(Debug)]
pub(super) struct NotRun {
    pub(super) failure: RunFailure,
    pub(super) error: Error,
}

impl RecordedQemu {
    /// Connects, repairs what a killed towline left changed, and checks that it is the recorded QEMU.
    pub(super) fn open(end: &MoveEnd, record: &MoveRecord) -> Self {
        let MoveEnd::Qemu { socket, pid, .. } = end else { return Self::Elsewhere };
        if !record.is_of_this_namespace() {
            return Self::Unknown(format!(
                "the move was recorded in another pid namespace, or one that /proc does not name, so that the process of {end} cannot be identified from \
                 here: run `towline resume` where the move was made"
            ));
        }
        if end.has_exited() {
            return Self::Exited;
        }
        if pid.is_none() {
            return Self::Unknown(format!(
                "the process of {end} could not be identified when the move was recorded, so that another QEMU may have its socket now: look at it, \
                 act by its monitor, and `--forget` the record"
            ));
        }
        match Qemu::connect(socket, &qmp::Options::default()) {
            Ok(qemu) if end.is_same_qemu(&MoveEnd::qemu(&qemu)) => Self::Qemu(Box::new(qemu)),
            Ok(_) => Self::Unknown(format!("{} belongs to another process", socket.display())),
            Err(_) if end.has_exited() => Self::Exited,
            Err(error) => Self::Unknown(error.to_string()),
        }
    }

    /// Notes that the QEMU of this end, whose state was not known, has exited since: one with much memory takes seconds for that once its
    /// monitor is closed.
    pub(super) fn note_exit(&mut self, end: &MoveEnd, record: &MoveRecord) {
        if matches!(self, Self::Unknown(_)) && record.has_exited(end) {
            *self = Self::Exited;
        }
    }

    /// Reason for which its state is not known.
    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Unknown(reason) => Some(reason),
            _ => None,
        }
    }

    /// Returns true if its QEMU is, or was, on this host.
    pub(super) fn is_on_this_host(&self) -> bool {
        !matches!(self, Self::Elsewhere)
    }

    /// Returns true if its monitor is connected.
    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Qemu(_))
    }

    /// Report of repaired changes of an earlier towline.
    pub(super) fn repaired(&self) -> Option<String> {
        match self {
            Self::Qemu(qemu) => qemu.repaired().map(ToString::to_string),
            _ => None,
        }
    }

    /// Its status by its migration and its guest; `None`: it is elsewhere.
    fn status<T>(
        &mut self,
        exited: T,
        unknown: T,
        of: impl FnOnce(Option<MigrationStatus>, &Status) -> T,
    ) -> Option<T> {
        let qemu = match self {
            Self::Qemu(qemu) => qemu,
            Self::Exited => return Some(exited),
            Self::Unknown(_) => return Some(unknown),
            Self::Elsewhere => return None,
        };
        Some(match qemu.try_query(Qemu::migration_and_status) {
            Ok(Some((migration, guest))) => of(migration.status, &guest),
            Ok(None) => unknown,
            Err(_) if qemu.has_exited(Duration::ZERO) => exited,
            Err(error) => {
                *self = Self::Unknown(error.to_string());
                unknown
            }
        })
    }

    pub(super) fn source_status(&mut self) -> Option<SourceStatus> {
        self.status(SourceStatus::Exited, SourceStatus::Unknown, |migration, guest| match migration {
            _ if guest.status == RunState::FINISH_MIGRATE => SourceStatus::Migrating,
            Some(done) if done == MigrationStatus::COMPLETED && guest.status == RunState::POSTMIGRATE => {
                SourceStatus::Completed
            }
            Some(done) if done == MigrationStatus::COMPLETED => SourceStatus::CompletedThenResumed,
            Some(under_way) if !under_way.is_idle() => SourceStatus::Migrating,
            _ => SourceStatus::HasGuest,
        })
    }

    /// Number of times that the threads of its vCPUs have been scheduled, if that is known.
    pub(super) fn vcpu_switches(&self) -> Option<u64> {
        match self {
            Self::Qemu(qemu) => qemu.vcpu_threads().switches(),
            _ => None,
        }
    }

    pub(super) fn destination_status(&mut self) -> Option<DestinationStatus> {
        self.status(DestinationStatus::Exited, DestinationStatus::Unknown, |migration, guest| {
            let is_live = is_live(guest);
            if (is_live || is_ready(guest)) && migration.as_ref().is_some_and(MigrationStatus::is_postcopy) {
                DestinationStatus::LacksMemory(FinalRunState::running_if(is_live))
            } else if is_live {
                // It may have been migrated again since, and that may have failed.
                DestinationStatus::Running
            } else if guest.status == RunState::INMIGRATE && migration == Some(MigrationStatus::FAILED) {
                DestinationStatus::Failed
            } else if guest.status == RunState::INMIGRATE {
                DestinationStatus::Loading
            } else if is_ready(guest) {
                DestinationStatus::Loaded
            } else {
                // It is being migrated, or was, or has stopped by itself.
                DestinationStatus::Stopped
            }
        })
    }

    /// Starts the guest and checks that it runs.
    pub(super) fn run(&mut self) -> Result<(), NotRun> {
        let sent = self.qemu().and_then(Qemu::cont);
        sent.map_err(|error| NotRun { failure: failure_of(&error), error: error.into() })?;
        self.await_live().map_err(|error| NotRun { failure: RunFailure::Unknown, error })
    }

    fn await_live(&mut self) -> Result<(), Error> {
        let qemu = self.qemu()?;
        let started = Instant::now();
        loop {
            let status = qemu.try_query(Qemu::status)?;
            if status.as_ref().is_some_and(is_live) {
                return Ok(());
            }
            if started.elapsed() >= RUN_TIMEOUT {
                let status = status.as_ref().map_or("nothing", |status| status.status.as_str());
                return Err(Error::NotRunning {
                    socket: qemu.socket().to_owned(),
                    status: status.to_owned(),
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends QEMU.
    pub(super) fn quit(&mut self) -> Result<(), Error> {
        self.qemu()?.quit()?;
        *self = Self::Exited;
        Ok(())
    }

    /// The QEMU, for an action on its guest.
    pub(super) fn qemu(&mut self) -> Result<&mut Qemu, qemu::Error> {
        match self {
            Self::Qemu(qemu) => Ok(qemu),
            _ => Err(qemu::Error::OtherProcess { socket: "a QEMU that is not connected".into() }),
        }
    }
}

/// Returns what an error of `cont` says about the guest: only QEMU's own refusal proves that it has not run.
fn failure_of(error: &qemu::Error) -> RunFailure {
    match error {
        qemu::Error::Qmp(qmp::Error::Refusal { .. }) | qemu::Error::OtherProcess { .. } => {
            RunFailure::Refused
        }
        _ => RunFailure::Unknown,
    }
}

/// Returns true if the guest can be started, and was stopped by a command only.
fn is_ready(status: &Status) -> bool {
    [RunState::PAUSED, RunState::PRELAUNCH].contains(&status.status)
}
