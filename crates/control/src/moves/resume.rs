//! Finishes an interrupted move: queries the QEMUs on this host, and carries out what `switchover::resume` decides.
//!
//! Every record of the move is locked first, so that no other towline works on it, and each action on a guest
//! is recorded before it is done.

mod interrupted;
mod recorded_qemu;

use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::record::{MoveEnd, MoveRecord};
use super::{Error, Id, RecordFile, record_file, text};
use crate::generations::ManagedGuest;
use crate::journal::RuntimeDirectory;
use crate::switchover::{
    Choice, Decision, FinalRunState, GuestState, InterruptedMove, MemorySharing, OtherEnd, Placement,
    Refusal, ResumeAction, RunFailure, Side, SourceStatus, ToDo,
};
use crate::temporary_names;
pub use interrupted::{InterruptedPostcopy, interrupted};
use recorded_qemu::{NotRun, RecordedQemu};

/// Time for which an end that is busy or does not reply is queried.
const EXAMINE_TIMEOUT: Duration = Duration::from_secs(10);
const EXAMINE_INTERVAL: Duration = Duration::from_millis(50);

/// An operator's choice for a move that cannot be finished without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeChoice {
    /// Start the guest at the end on this host, or at the named one.
    RunHere(Option<super::Role>),
    /// End the QEMU of that end: the guest is at the other one.
    Discard(Option<super::Role>),
    /// Remove the record; touch no QEMU.
    Forget,
    /// Decide with the state of the end on the other host.
    OtherEnd(OtherEnd),
}

/// Result of resuming a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The move.
    pub id: Id,
    /// Actions that were taken, and states that were found: one sentence each.
    pub done: Vec<String>,
    /// State of the guest, or the reason for which it is undecided.
    pub finding: Finding,
}

/// Result for the guest of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Finding {
    /// It is at its destination.
    AtDestination,
    /// It is at its source.
    AtSource,
    /// No QEMU on this host has it.
    Ended,
    /// The record was removed.
    Forgotten,
    /// The move is still undecided.
    Undecided {
        /// The guest by the evidence.
        state: GuestState,
        /// The same, and the commands to run.
        text: String,
    },
}

/// Finishes the move whose id begins with these digits, as far as the evidence or the choice allows.
///
/// # Errors
/// Nothing was done, or an action failed; the record still exists then.
pub fn resume(digits: &str, chosen: Option<ResumeChoice>) -> Result<Resumed, Error> {
    resume_in(&RuntimeDirectory::open()?, digits, chosen)
}

fn resume_in(
    directory: &RuntimeDirectory,
    digits: &str,
    chosen: Option<ResumeChoice>,
) -> Result<Resumed, Error> {
    let id = find(directory, digits)?;
    let mut files = Vec::new();
    for name in super::names_of(directory, &id) {
        match RecordFile::open(directory, &name) {
            // Another towline has just finished it.
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            opened => files.push(opened?),
        }
    }
    let Some(record) = merge(&files) else { return Err(Error::Unknown { id: digits.to_owned() }) };
    if chosen == Some(ResumeChoice::Forget) {
        forget(&mut files)?;
        let done = vec!["its record is removed; nothing else was touched".into()];
        return Ok(Resumed { id, done, finding: Finding::Forgotten });
    }
    let other_end = match chosen {
        Some(ResumeChoice::OtherEnd(other)) => Some(other),
        _ => None,
    };
    let choice = chosen.map(|chosen| choice(chosen, &record)).transpose()?.flatten();
    Resume {
        source: RecordedQemu::open(&record.source, &record),
        destination: RecordedQemu::open(&record.destination, &record),
        files,
        record,
        other_end,
        done: Vec::new(),
    }
    .run(choice)
}

fn find(directory: &RuntimeDirectory, digits: &str) -> Result<Id, Error> {
    if digits.is_empty() {
        return Err(Error::Unknown { id: digits.to_owned() });
    }
    let (records, bad) = record_file::list(directory);
    let mut found: Vec<Id> =
        records.into_iter().map(|record| record.id).filter(|id| id.begins_with(digits)).collect();
    found.sort();
    found.dedup();
    match <[Id; 1]>::try_from(found) {
        Ok([id]) => Ok(id),
        // A record that cannot be read may be the one that is meant.
        Err(found) if found.is_empty() => {
            let named = bad.into_iter().find(|error| match error {
                Error::Format { path, .. } | Error::Io { path, .. } => {
                    path.file_name().is_some_and(|name| name.to_string_lossy().contains(digits))
                }
                _ => false,
            });
            Err(named.unwrap_or(Error::Unknown { id: digits.to_owned() }))
        }
        Err(found) => Err(Error::Ambiguous { id: digits.to_owned(), found }),
    }
}

/// Merges the records of a move, both of whose ends may be on this host.
fn merge(files: &[RecordFile]) -> Option<MoveRecord> {
    let furthest = files.iter().map(RecordFile::record).max_by_key(|record| record.stage)?;
    let mut joined = furthest.clone();
    for record in files.iter().map(RecordFile::record) {
        if matches!(record.source, MoveEnd::Qemu { .. }) {
            joined.source = record.source.clone();
            joined.guest_plan.quit = record.guest_plan.quit;
            joined.source_vcpu_switches = record.source_vcpu_switches;
        }
        if matches!(record.destination, MoveEnd::Qemu { .. }) {
            joined.destination = record.destination.clone();
        }
    }
    Some(joined)
}

fn forget(files: &mut [RecordFile]) -> Result<(), Error> {
    files.iter_mut().try_for_each(RecordFile::remove)
}

/// The side that is meant: that of this host unless it is named. `None`: none is chosen.
fn choice(chosen: ResumeChoice, record: &MoveRecord) -> Result<Option<Choice>, Error> {
    let side = |role: Option<super::Role>, option: &str| match role {
        Some(super::Role::Source) => Ok(Side::Source),
        Some(super::Role::Destination) => Ok(Side::Destination),
        _ => text::only_side(record).ok_or_else(|| Error::Refused {
            text: format!(
                "both ends are on this host: name one, `{option}=source` or `{option}=destination`"
            ),
        }),
    };
    Ok(match chosen {
        ResumeChoice::RunHere(role) => Some(Choice::Run(side(role, "--run-here")?)),
        ResumeChoice::Discard(role) => Some(Choice::Discard(side(role, "--discard")?)),
        ResumeChoice::OtherEnd(_) if text::only_side(record).is_none() => {
            return Err(Error::Refused { text: "both ends are on this host, and are queried".into() });
        }
        ResumeChoice::OtherEnd(_) | ResumeChoice::Forget => None,
    })
}

struct Resume {
    files: Vec<RecordFile>,
    record: MoveRecord,
    source: RecordedQemu,
    destination: RecordedQemu,
    other_end: Option<OtherEnd>,
    done: Vec<String>,
}

impl Resume {
    fn run(mut self, mut choice: Option<Choice>) -> Result<Resumed, Error> {
        self.done.extend(self.source.repaired().into_iter().chain(self.destination.repaired()));
        let started = Instant::now();
        loop {
            let case = self.examine();
            let action = match choice {
                Some(chosen) => match case.apply(chosen) {
                    Ok(action) => action,
                    Err(Refusal::Evidence(state))
                        if state.to_do == ToDo::Wait && started.elapsed() < EXAMINE_TIMEOUT =>
                    {
                        ResumeAction::Wait(state)
                    }
                    Err(reason) => {
                        return Err(Error::Refused { text: text::refusal(chosen, reason, &self.record) });
                    }
                },
                None => case.next_action(),
            };
            match action {
                ResumeAction::Wait(_) if started.elapsed() < EXAMINE_TIMEOUT => {
                    thread::sleep(EXAMINE_INTERVAL);
                    continue;
                }
                ResumeAction::Wait(state) | ResumeAction::NeedsChoice(state) => {
                    return Ok(self.undecided(state));
                }
                ResumeAction::RunDestination => self.run_destination(&case)?,
                ResumeAction::RunSource => return self.run_source(),
                ResumeAction::Quit(side) => self.quit(side)?,
                ResumeAction::AtDestination(placement) => return self.at_destination(placement, case),
                ResumeAction::AtSource => return self.at_source(),
                ResumeAction::Gone => return self.finish_without_guest(),
            }
            // The choice is carried out; the next state follows from the evidence.
            choice = None;
        }
    }

    fn examine(&mut self) -> InterruptedMove {
        let run_state = FinalRunState::running_if(self.record.guest_plan.run);
        let mut case = InterruptedMove::new(self.record.stage, run_state);
        if self.record.guest_plan.shared_memory {
            case.memory = MemorySharing::Shared;
        }
        self.source.note_exit(&self.record.source, &self.record);
        self.destination.note_exit(&self.record.destination, &self.record);
        case.source = self.source.source_status();
        if case.source == Some(SourceStatus::Completed) && !self.is_completion_ours() {
            case.source = Some(SourceStatus::CompletedByOthers);
        }
        case.destination = self.destination.destination_status();
        self.other_end.map_or(case, |other| case.with_other_end(other))
    }

    /// Returns true if the source's completed migration is known to be that of this move, or if no guest is run because of it.
    fn is_completion_ours(&self) -> bool {
        let MoveRecord { stage, guest_plan, source_vcpu_switches, .. } = &self.record;
        match (*stage, guest_plan.live) {
            (Decision::Left, _) => true,
            (_, false) => !guest_plan.run,
            (_, true) => {
                source_vcpu_switches.is_some() && *source_vcpu_switches == self.source.vcpu_switches()
            }
        }
    }

    /// Makes the stage durable in every record on this host.
    fn write(&mut self, stage: Decision) -> Result<(), Error> {
        for file in &mut self.files {
            let record = file.record().at_stage(stage);
            file.write(record)?;
        }
        self.record.stage = stage;
        Ok(())
    }

    fn run_destination(&mut self, case: &InterruptedMove) -> Result<(), Error> {
        let managed = self.record.destination.managed()?;
        self.write(Decision::Run)?;
        // One that may have run keeps that stage: it has the generation then.
        if let Some(Err(error)) = managed.as_ref().map(ManagedGuest::enter) {
            self.write(case.decision_after(RunFailure::Refused))?;
            return Err(error.into());
        }
        if let Err(NotRun { failure, error }) = self.destination.run() {
            self.write(case.decision_after(failure))?;
            return Err(error);
        }
        self.done.push(format!("{} runs the guest", self.record.destination));
        Ok(())
    }

    fn run_source(mut self) -> Result<Resumed, Error> {
        self.end_destination_in_shared_memory()?;
        if let Some(guest) = self.record.source.managed()? {
            guest.take_back()?;
        }
        self.source.run().map_err(|not_run| not_run.error)?;
        self.done.push(format!("{} runs the guest", self.record.source));
        self.plug_in_devices(Side::Source)?;
        if self.destination.is_open() {
            self.done.push(format!(
                "{} holds an older state of it, paused: end it (`quit`)",
                self.record.destination
            ));
        }
        self.finish(Finding::AtSource)
    }

    /// Ends the new QEMU of an upgrade whose guest is in the old one: running it, it would write into the guest's memory.
    fn end_destination_in_shared_memory(&mut self) -> Result<(), Error> {
        let ends = self.record.guest_plan.shared_memory && self.destination.is_open();
        if ends { self.quit(Side::Destination) } else { Ok(()) }
    }

    fn quit(&mut self, side: Side) -> Result<(), Error> {
        let (opened, end) = match side {
            Side::Source => (&mut self.source, &self.record.source),
            Side::Destination => (&mut self.destination, &self.record.destination),
        };
        opened.quit()?;
        self.done.push(format!("{end} is ended"));
        Ok(())
    }

    /// Completes the move: its source is ended if that was requested.
    fn at_destination(mut self, placement: Placement, case: InterruptedMove) -> Result<Resumed, Error> {
        let state = if placement == Placement::Running {
            "runs the guest"
        } else {
            "holds the guest, paused, as requested"
        };
        if placement == Placement::Paused {
            self.destination.qemu()?.activate_drives()?;
        }
        let text = format!("{} {state}", self.record.destination);
        if self.done.last() != Some(&text) {
            self.done.push(text);
        }
        let has_source = self.source.is_on_this_host() && case.source == Some(SourceStatus::Completed);
        let quits = has_source && self.record.guest_plan.quit;
        if quits {
            self.quit(Side::Source)?;
        }
        if quits || case.source == Some(SourceStatus::Exited) {
            self.publish_sockets();
        }
        self.plug_in_devices(Side::Destination)?;
        if quits || !has_source {
            return self.finish(Finding::AtDestination);
        }
        self.done.push(format!("{} is paused (postmigrate), with an older state of it", self.record.source));
        if placement != Placement::Running {
            return self.finish(Finding::AtDestination);
        }
        for file in &mut self.files {
            if matches!(file.record().source, MoveEnd::Qemu { .. }) {
                record_file::record_left_source(file)?;
            } else {
                file.remove()?;
            }
        }
        Ok(Resumed { id: self.record.id, done: self.done, finding: Finding::AtDestination })
    }

    /// Plugs in the devices that were detached for the move, in the QEMU that has the guest.
    fn plug_in_devices(&mut self, side: Side) -> Result<(), Error> {
        let opened = if side == Side::Source { &mut self.source } else { &mut self.destination };
        for device in &self.record.devices {
            self.done.extend(opened.qemu()?.plug_in(device)?);
        }
        Ok(())
    }

    /// Gives the sockets of an upgraded guest's QEMU the names of those of the old one, which has exited.
    fn publish_sockets(&mut self) {
        let MoveEnd::Qemu { pid: Some(pid), .. } = self.record.destination else { return };
        let published = temporary_names::publish_staging_names(pid.cast_unsigned());
        self.done.extend(published.iter().map(|path| format!("{} is the new QEMU's", path.display())));
    }

    fn at_source(mut self) -> Result<Resumed, Error> {
        self.end_destination_in_shared_memory()?;
        let MoveRecord { id, source, destination, .. } = &self.record;
        self.done.push(format!("{source} has the guest"));
        let older = if self.destination.is_open() {
            format!("{destination} holds an older state of it, paused: end it (`quit`)")
        } else {
            format!("what {destination} holds of it must not run: there, `towline resume {id} --discard`")
        };
        if self.record.stage != Decision::Left {
            self.done.push(older);
        }
        self.finish(Finding::AtSource)
    }

    fn finish_without_guest(mut self) -> Result<Resumed, Error> {
        let ends = [(&self.source, &self.record.source), (&self.destination, &self.record.destination)];
        for (opened, end) in ends {
            let text = format!("{end} is ended");
            if opened.is_on_this_host() && !self.done.contains(&text) {
                self.done.push(format!("{end} has exited, or holds nothing of the guest"));
            }
        }
        self.finish(Finding::Ended)
    }

    fn finish(mut self, finding: Finding) -> Result<Resumed, Error> {
        forget(&mut self.files)?;
        Ok(Resumed { id: self.record.id, done: self.done, finding })
    }

    fn undecided(self, state: GuestState) -> Resumed {
        let reasons = [&self.source, &self.destination].into_iter().filter_map(RecordedQemu::reason);
        let mut text = text::explain(state, &self.record);
        for reason in reasons {
            text = format!("{text} ({reason})");
        }
        Resumed { id: self.record.id, done: self.done, finding: Finding::Undecided { state, text } }
    }
}

#[cfg(test)]
mod tests;
