//! The end of a guest's protection, in its QEMU, also of one whose keeper was killed.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use towline_qmp as qmp;
use towline_qmp::commands::{MigrationStatus, RunState};

use super::connection::Qemu;
use super::error::{Error, RecordOutcome};
use crate::arbiter::{Claim, Stake};
use crate::cards::HoldingCards;
use crate::journal::{ProtectionRecord, RuntimeDirectory, leftover_protection};
use crate::process::has_exited;
use crate::procfs::start_time;

/// Time for the guest to run.
const RUNS_WITHIN: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

impl Qemu {
    /// Ends the guest's checkpoints, or the copy before them: it runs when this returns. The way to its secondary is closed already, so that the
    /// monitor replies.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn end_checkpoints(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + RUNS_WITHIN;
        loop {
            let (migration, status) = self.migration_and_status()?;
            let migration = migration.status.unwrap_or(MigrationStatus::NONE);
            if migration.is_idle() && !self.cleans_up_migration()? {
                return if status.running || status.status == RunState::SHUTDOWN {
                    Ok(())
                } else {
                    self.cont()
                };
            }
            if Instant::now() >= deadline {
                let (socket, command) =
                    (self.socket().to_owned(), format!("the end of checkpoints ({migration})"));
                return Err(qmp::Error::Timeout { command, socket, waited: RUNS_WITHIN }.into());
            }
            if migration == MigrationStatus::COLO {
                // QEMU refuses it while its migration changes its state.
                match self.client().execute_raw("x-colo-lost-heartbeat", None) {
                    Ok(_) | Err(qmp::Error::Refusal { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            } else if [MigrationStatus::SETUP, MigrationStatus::ACTIVE].contains(&migration) {
                self.cancel_migration()?;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends the protection of a keeper that was killed, and decides who goes on with the guest.
    pub(super) fn end_protection(&mut self, record: &ProtectionRecord) -> Result<RecordOutcome, Error> {
        let generation = record.generation + 1;
        let claim = Claim { guest: &record.guest, generation, stake: Stake::Guest };
        let claim = || record.arbiter.claim(&claim, &record.claimant);
        // While a ferry takes checkpoints the guest runs, and its standby has no reason to claim it.
        let early = if ferry_lives(record) { Some(claim()) } else { None };
        if let Some(Err(error)) = &early {
            let left =
                "the guest is protected by another host on, since it is not decided whether that may end";
            return Ok(Err(format!("{left} ({error})")));
        }
        end_ferry(record);
        self.end_checkpoints()?;
        match early.unwrap_or_else(claim) {
            Ok(true) => {}
            Ok(false) => {
                let socket = self.socket().to_owned();
                self.quit()?;
                return Err(Error::GoesOnElsewhere { socket, generation });
            }
            Err(error) => {
                let left =
                    "the guest's output is held: it is not decided whether the host that protects it goes on";
                return Ok(Err(format!("{left} ({error})")));
            }
        }
        Ok(match HoldingCards::pass_all(&record.cards, generation) {
            Ok(()) => Ok(vec!["the guest is not protected any more, and its output goes".into()]),
            Err(error) => Err(format!("the guest's output is held: {error}; see that its card runs")),
        })
    }
}

/// Ends the ferry that a killed keeper has left in the QEMU of this monitor. A ferry that hangs while QEMU sends to it keeps QEMU's monitor from replying, so that it
/// is found by its journal alone.
pub(super) fn end_left_ferry(monitor: &Path) {
    let protection = RuntimeDirectory::open().ok().and_then(|found| leftover_protection(&found, monitor));
    protection.iter().for_each(end_ferry);
}

/// Returns true if the ferry has outlived its keeper.
fn ferry_lives(record: &ProtectionRecord) -> bool {
    // It is killed: a process that is not known to be it is another one.
    start_time(record.ferry_pid).is_ok_and(|found| found == record.ferry_start_time)
        && !has_exited(record.ferry_pid, record.ferry_start_time)
}

/// Ends a ferry that has outlived its keeper.
fn end_ferry(record: &ProtectionRecord) {
    if ferry_lives(record)
        && let Some(pid) = Pid::from_raw(record.ferry_pid)
    {
        let _ = kill_process(pid, Signal::KILL);
    }
}
