//! Undoes the changes that a killed towline left in a QEMU, by its journal.
//!
//! Settings can be restored only when no migration is in progress: one that the killed towline started is
//! cancelled; for any other it waits. Postcopy is left alone: it can be resumed, and cancelling it would
//! destroy the guest. Settings that another party has changed since stay.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use towline_channel::Cancel;
use towline_compat::facts::IncomingState;
use towline_qmp as qmp;
use towline_qmp::commands::{Capability, Cont, Migrate, MigrationInfo, MigrationStatus, RunState};

use super::checkpoints::end_left_ferry;
use super::connection::Qemu;
use super::device_tree::qom_children;
use super::error::{Error, RecordOutcome, RepairReport};
use super::migration::MIGRATION_CLEANUP_TIMEOUT;
use super::settings::Change;
use crate::journal::{
    ChangedValue, Error as JournalError, Journal, JournalEntry, RuntimeDirectory, UndoRecord, monotonic_ms,
    sweep,
};
use crate::temporary_names;

/// Timeout for an unrecorded migration to end without help, as it does soon if it was sent to the killed
/// towline.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// States in which a migration can be cancelled while the location of the guest is certain.
const CANCELLABLE: [MigrationStatus; 3] =
    [MigrationStatus::SETUP, MigrationStatus::ACTIVE, MigrationStatus::PRE_SWITCHOVER];
/// States of a migration that is known by its age.
const IN_PROGRESS: [MigrationStatus; 2] = [MigrationStatus::ACTIVE, MigrationStatus::PRE_SWITCHOVER];
/// Time for a device that was unplugged to be freed.
const PLUG_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl RepairReport {
    fn add(&mut self, entry: &JournalEntry, outcome: RecordOutcome) {
        match outcome {
            Ok(done) => {
                entry.done();
                self.done.extend(done);
            }
            Err(left) => self.left.push(left),
        }
    }
}

impl Qemu {
    /// Repairs the QEMU whose monitor is at `path`; returns `None` if there were no changes. Also removes the
    /// private directories of killed towlines.
    ///
    /// # Errors
    /// As [`Qemu::connect`], and as its journal.
    pub fn repair(path: impl AsRef<Path>, options: &qmp::Options) -> Result<Option<RepairReport>, Error> {
        let path = path.as_ref();
        end_left_ferry(path);
        temporary_names::temp_dir().iter().for_each(|place| drop(temporary_names::remove_abandoned(place)));
        let mut qemu = Self::inspect(path, options)?;
        qemu.take_journal(path)?;
        Ok(qemu.repaired.take())
    }

    /// Starts a migration, after recording it. The record is completed when this QEMU's settings are
    /// restored.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn migrate(&mut self, command: &Migrate) -> Result<(), Error> {
        let entry = self.record(&UndoRecord::migration(&command.uri));
        self.has_seen_migration = false;
        let accepted = self.client.execute(command);
        if matches!(accepted, Err(qmp::Error::Refusal { .. }))
            && let Some(entry) = entry
        {
            entry.done();
        }
        accepted?;
        Ok(())
    }

    /// Queries the migration; `None` if QEMU does not reply now. Records once that a migration which this
    /// process has started was in progress after that time: a later towline only identifies it with one that
    /// began before. A cancellation ends the wait for the reply.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub fn watch_migration(&mut self, cancel: Option<&Cancel>) -> Result<Option<MigrationInfo>, Error> {
        let asked_ms = monotonic_ms();
        let migration = match cancel {
            Some(cancel) => self.try_query_until(cancel, Self::migration)?,
            None => self.try_query(Self::migration)?,
        };
        // One that began within the millisecond of the query could be another one: a later query tells.
        let is_known = migration.as_ref().is_some_and(|found| {
            let is_in_progress = found.status.as_ref().is_some_and(|status| IN_PROGRESS.contains(status));
            is_in_progress && began_before(found, monotonic_ms(), asked_ms)
        });
        if is_known
            && !std::mem::replace(&mut self.has_seen_migration, true)
            && let Some(journal) = &self.journal
            && let Err(error) = journal.migration_seen(asked_ms)
        {
            tracing::debug!(%error, "a later towline does not know this migration");
        }
        Ok(migration)
    }

    /// Removes the records of migrations: QEMU accepts settings only when no migration is in progress.
    pub(super) fn end_migrations(&self) {
        if let Some(journal) = &self.journal {
            journal.end_migrations();
        }
    }

    pub(super) fn take_journal(&mut self, path: &Path) -> Result<(), Error> {
        let directory = RuntimeDirectory::open().map_err(JournalError::from)?;
        let (journal, owner) = Journal::open(&directory, path, &self.process)?;
        self.journal = Some(journal.clone());
        sweep(&directory);
        if let Some(owner) = owner {
            self.repaired = Some(self.put_back(&journal, owner)?);
            self.refresh()?;
        }
        Ok(())
    }

    fn put_back(&mut self, journal: &Journal, owner: i32) -> Result<RepairReport, Error> {
        let mut repaired =
            RepairReport { socket: self.socket().to_owned(), owner, done: Vec::new(), left: Vec::new() };
        // No setting can be restored while its checkpoints are taken.
        for (entry, record) in journal.records() {
            if let UndoRecord::Protection(protection) = &record {
                repaired.add(&entry, self.end_protection(protection)?);
            }
        }
        let records = journal.records();
        let seen = records.iter().find_map(|(_, record)| match record {
            UndoRecord::Migration { seen_ms, .. } => *seen_ms,
            _ => None,
        });
        let has = |is_it: fn(&UndoRecord) -> bool| records.iter().any(|(_, record)| is_it(record));
        let pauses = has(pauses) && has(|record| matches!(record, UndoRecord::Migration { .. }));
        let busy = self.wait_until_idle(seen, pauses)?;
        for (entry, record) in records {
            if matches!(record, UndoRecord::Protection(_)) {
                continue;
            }
            let outcome = match (&busy, record.remove_files()) {
                (_, Some(Ok(done))) => Ok(vec![done]),
                (_, Some(Err(error))) => Err(format!("{}: {error}", name(&record))),
                (Some(text), None) => Err(format!("{}: {text}", name(&record))),
                (None, None) => self.undo(&record)?,
            };
            repaired.add(&entry, outcome);
        }
        Ok(repaired)
    }

    /// Waits until no migration is in progress, and cancels the one that was seen in progress at this time.
    /// Returns the reason if one still is. `pauses`: the killed towline let its migration wait before the switchover.
    fn wait_until_idle(&mut self, seen_ms: Option<u64>, pauses: bool) -> Result<Option<String>, Error> {
        let start = Instant::now();
        let mut cancelled = false;
        loop {
            let migration = self.migration()?;
            let status = migration.status.clone().unwrap_or(MigrationStatus::NONE);
            if status.is_idle() && !self.cleans_up_migration()? {
                return Ok(None);
            }
            if status.as_str().starts_with("postcopy") {
                return Ok(Some(format!("its migration is in postcopy (status {status})")));
            }
            if self.facts.incoming == IncomingState::Listening {
                return Ok(Some("it waits for a guest".into()));
            }
            let is_ours = seen_ms.is_some_and(|seen| began_before(&migration, monotonic_ms(), seen));
            // Nothing of the device state was sent.
            let has_paused = status == MigrationStatus::PRE_SWITCHOVER;
            // One that paused before it was seen in progress is ours as well.
            let is_unseen = pauses && seen_ms.is_none();
            let may_cancel = has_paused && (is_ours || is_unseen) || is_ours && !self.is_completing()?;
            let may_wait = status == MigrationStatus::FAILED;
            if !cancelled && (CANCELLABLE.contains(&status) && may_cancel || may_wait) {
                self.cancel_migration()?;
                cancelled = true;
            }
            let limit = if cancelled || status.is_idle() { MIGRATION_CLEANUP_TIMEOUT } else { END_TIMEOUT };
            if start.elapsed() >= limit {
                let waited = limit.as_secs();
                return Ok(Some(format!("its migration has not ended within {waited} s (status {status})")));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns true if the guest is stopped for the switchover: it may already run at a destination that does
    /// not depend on us.
    fn is_completing(&mut self) -> Result<bool, Error> {
        Ok(self.status()?.status == RunState::FINISH_MIGRATE)
    }

    /// Plugs in a device that a move has detached, in the QEMU that has the guest now; returns the text of
    /// what was done, or of what remains to be done.
    pub(crate) fn plug_in(&mut self, device: &UndoRecord) -> Result<Vec<String>, Error> {
        Ok(match (self.undo(device)?, device) {
            (Ok(done), _) => done,
            (Err(left), UndoRecord::Device { add, .. }) => {
                let socket = self.socket();
                vec![format!("{left}; plug it in at {socket}: `device_add` {}", Value::from(add.clone()))]
            }
            (Err(left), _) => vec![left],
        })
    }

    /// Undoes one change.
    fn undo(&mut self, record: &UndoRecord) -> Result<RecordOutcome, Error> {
        Ok(match record {
            UndoRecord::Settings { capabilities, parameters } => {
                self.put_settings_back(capabilities, parameters)?
            }
            UndoRecord::Device { path, add } => self.plug_again(path, add)?,
            UndoRecord::Migration { to, .. } => Ok(vec![format!("migration to {to} has ended")]),
            UndoRecord::Stopped { overlays } => self.run_on(overlays)?,
            UndoRecord::Mirrors { jobs } => match self.drop_mirrors(jobs) {
                Err(error @ Error::JobRuns { .. }) => Err(error.to_string()),
                dropped => dropped.map(|()| Ok(vec!["copies of its disks ended".into()]))?,
            },
            UndoRecord::Exports => {
                self.end_exports()?;
                Ok(vec!["its disks are not offered to others any more".into()])
            }
            UndoRecord::Protection(_) | UndoRecord::Directory { .. } => Ok(Vec::new()),
        })
    }

    /// Runs a guest that a killed towline has stopped, and says which files its drives have now.
    fn run_on(&mut self, overlays: &[PathBuf]) -> Result<RecordOutcome, Error> {
        let drives = if overlays.is_empty() { Vec::new() } else { self.drives()? };
        let is_used = |overlay: &Path| {
            let name = overlay.to_str();
            drives.iter().flat_map(|drive| &drive.files.chain).any(|file| Some(file.as_str()) == name)
        };
        let mut done: Vec<_> = overlays
            .iter()
            .map(|overlay| match is_used(overlay) {
                true => format!("the guest has overlay {} as its disk", overlay.display()),
                false => format!("overlay {} is not used; remove it", overlay.display()),
            })
            .collect();
        if self.status()?.status == RunState::PAUSED {
            self.client().execute(&Cont)?;
            done.push("the guest runs on".into());
        }
        Ok(Ok(done))
    }

    fn put_settings_back(
        &mut self,
        capabilities: &BTreeMap<Capability, ChangedValue<bool>>,
        parameters: &BTreeMap<String, ChangedValue<Value>>,
    ) -> Result<RecordOutcome, Error> {
        let (capabilities_now, parameters_now) = self.settings_now()?;
        let parameters_now = parameters_now.to_map();
        let mut done = Vec::new();
        let mut wanted = BTreeMap::new();
        for (name, changed) in capabilities {
            let now = capabilities_now.get(name);
            if let Some(before) = changed.before_if_unchanged_since(now, name.as_str(), &mut done) {
                wanted.insert(name.clone(), before);
            }
        }
        let mut wanted_parameters = Map::new();
        for (name, changed) in parameters {
            let now = parameters_now.get(name);
            if let Some(before) = changed.before_if_unchanged_since(now, name, &mut done) {
                wanted_parameters.insert(name.clone(), before);
            }
        }
        let put = Change::between(self, &wanted, &wanted_parameters)
            .and_then(|change| change.apply_best_effort(self));
        Ok(match put {
            Ok(()) => {
                done.extend(
                    wanted
                        .iter()
                        .map(|(name, state)| format!("{name} {}", if *state { "on" } else { "off" })),
                );
                done.extend(wanted_parameters.iter().map(|(name, value)| format!("{name} {value}")));
                Ok(done)
            }
            Err(Error::Qmp(error @ qmp::Error::Refusal { .. })) => {
                Err(format!("migration settings: {error}"))
            }
            Err(error) => return Err(error),
        })
    }

    fn plug_again(&mut self, path: &str, add: &Map<String, Value>) -> Result<RecordOutcome, Error> {
        let (place, device) = path.rsplit_once('/').unwrap_or_default();
        if qom_children(&mut self.client, place)?.iter().any(|child| child.name == device) {
            return Ok(Ok(vec![format!("device {device} is plugged in")]));
        }
        if self.status()?.status == RunState::POSTMIGRATE {
            return Ok(Ok(vec![format!("device {device} stays unplugged: the guest was migrated")]));
        }
        match self.plug(add) {
            Ok(()) => Ok(Ok(vec![format!("device {device} plugged again")])),
            Err(qmp::Error::Refusal { desc, .. }) => Ok(Err(format!("device {device} is unplugged: {desc}"))),
            Err(error) => Err(error.into()),
        }
    }

    /// Plugs a device in. QEMU refuses one in whose place another was until a moment ago: that has its chardev until QEMU has freed it.
    pub(crate) fn plug(&mut self, add: &Map<String, Value>) -> Result<(), qmp::Error> {
        let deadline = Instant::now() + PLUG_TIMEOUT;
        loop {
            match self.client.execute_raw("device_add", Some(add.clone())) {
                Err(qmp::Error::Refusal { .. }) if Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
                plugged => return plugged.map(drop),
            }
        }
    }
}

/// Returns true if this migration, which is in progress and was reported by `now_ms`, began before the other
/// time. A QEMU has one migration at a time, so one of another party began after the recorded one had ended.
fn began_before(migration: &MigrationInfo, now_ms: u64, seen_ms: u64) -> bool {
    // QEMU reports its age once it is set up.
    let age_ms = migration.total_time.and_then(|age| u64::try_from(age).ok());
    age_ms.is_some_and(|age| now_ms < seen_ms.saturating_add(age))
}

impl<T: Clone + PartialEq + fmt::Display> ChangedValue<T> {
    /// Value to restore; `None` if there is nothing to do. Adds other findings to `notes`.
    fn before_if_unchanged_since(&self, now: Option<&T>, name: &str, notes: &mut Vec<String>) -> Option<T> {
        match (&self.before, now) {
            (before, now) if before.as_ref() == now => None,
            (_, Some(now)) if *now != self.set => {
                notes.push(format!("{name} {now} stays: it was changed since"));
                None
            }
            (Some(before), _) => Some(before.clone()),
            (None, _) => {
                notes.push(format!("{name} {} stays: QEMU cannot unset it", self.set));
                None
            }
        }
    }
}

/// Returns true if a towline with this record lets its migration wait before the switchover.
fn pauses(record: &UndoRecord) -> bool {
    match record {
        UndoRecord::Mirrors { .. } => true,
        UndoRecord::Settings { capabilities, .. } => {
            capabilities.get(&Capability::PAUSE_BEFORE_SWITCHOVER).is_some_and(|changed| changed.set)
        }
        _ => false,
    }
}

fn name(record: &UndoRecord) -> String {
    match record {
        UndoRecord::Settings { capabilities, parameters } => {
            let names =
                capabilities.keys().map(Capability::as_str).chain(parameters.keys().map(String::as_str));
            names.collect::<Vec<_>>().join(", ")
        }
        UndoRecord::Device { path, .. } => format!("device {path}"),
        UndoRecord::Migration { to, .. } => format!("migration to {to}"),
        UndoRecord::Stopped { .. } => "run state".into(),
        UndoRecord::Mirrors { .. } => "copies of disks".into(),
        UndoRecord::Exports => "disks for others".into(),
        UndoRecord::Protection(_) => "protection".into(),
        UndoRecord::Directory { path, .. } => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both clocks have whole milliseconds: a migration may have begun up to one later than its age
    /// indicates.
    #[test]
    fn only_a_migration_that_began_before_the_recorded_one_was_seen_is_that_one() {
        let of_age = |age| MigrationInfo { total_time: age, ..MigrationInfo::default() };
        let is_ours = |age| began_before(&of_age(Some(age)), 10_000, 9_000);
        assert!(is_ours(5_000) && is_ours(1_001));
        assert!(!is_ours(1_000) && !is_ours(999) && !is_ours(0));
        assert!(!began_before(&of_age(None), 10_000, 9_000), "it is being set up");
        assert!(!began_before(&of_age(Some(-1)), 10_000, 9_000));
    }
}
