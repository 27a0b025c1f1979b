//! One protection of a guest, from its first copy to the loss of an end.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Map;
use towline_compat::checkpoints::CAPABILITY;
use towline_qmp as qmp;
use towline_qmp::commands::{Capability, Migrate, MigrationParameters, MigrationStatus};

use super::super::messages::{FerryRequest, FromFerry, Lost, Received, ToFerry};
use super::checks::check_guest;
use super::decision::{Decision, Keeper};
use super::process::FerryProcess;
use super::report::Report;
use super::request::{Error, ProtectEnd, ProtectObserver};
use crate::generations::ManagedGuest;
use crate::journal::{JournalEntry, ProtectionRecord, UndoRecord};
use crate::plan::PrivateDir;
use crate::qemu::{AppliedSettings, MigrationSettings, Qemu};
use crate::remote::{DepartingGuest, DiskPolicy, NewStandby, Place, RemoteHost};

/// Time for a step of the ferry, but for the first copy.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the first copy.
const COPY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Longest standstill for a checkpoint: then the ferry is taken for dead.
const STANDSTILL_MAX: Duration = Duration::from_secs(1);
/// Time for which a ferry whose standby replies may say nothing.
const SILENCE_BEYOND: Duration = Duration::from_secs(1);
/// Interval of looks at the monitor.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// QEMU's interval of requests, in milliseconds: the ferry replies when the next checkpoint is due.
const REQUEST_INTERVAL_MS: u64 = 5;
/// Time for which QEMU may stop the guest at the end of the first copy, in milliseconds.
const DOWNTIME_MS: u64 = 100;
/// Capabilities with which no checkpoints are taken here.
const OFF: [Capability; 4] =
    [Capability::MULTIFD, Capability::XBZRLE, Capability::POSTCOPY_RAM, Capability::X_IGNORE_SHARED];

/// End of an attempt.
pub(super) enum AttemptEnd {
    Done(ProtectEnd),
    /// The guest runs on here, in a new generation, and its output goes.
    Lost {
        reason: String,
    },
}

/// Reason for which checkpoints have ended.
enum Ending {
    Cancelled,
    GuestEnded,
    Died,
    Lost { reason: String },
}

/// A protection under way.
pub(super) struct Attempt<'a, 'k> {
    keeper: &'a mut Keeper<'k>,
    host: RemoteHost,
    cards: Vec<PathBuf>,
    ferry: FerryProcess,
    settings: Option<AppliedSettings>,
    entry: Option<JournalEntry>,
    directory: PrivateDir,
    /// The standby may take the guest over.
    may_be_taken: bool,
    /// Emulation loses writes to the first pass of a guest that runs.
    is_emulated: bool,
    qemu: Qemu,
}

impl<'a, 'k> Attempt<'a, 'k> {
    /// Prepares both hosts; nothing of the guest is changed.
    pub(super) fn begin(keeper: &'a mut Keeper<'k>) -> Result<Self, Error> {
        let request = keeper.request;
        let interrupt = Some(keeper.cancel.descriptor());
        let place = Place::Guest(request.guest.clone());
        let policy = DiskPolicy::VouchedFor;
        let guest =
            DepartingGuest::of(&request.socket, place, policy, request.map.as_ref(), interrupt.clone())?;
        let cards = guest.card_controls();
        guest.qemu().map_or(Ok(()), |qemu| check_guest(qemu, request, cards.len()))?;
        let mut host =
            RemoteHost::connect(&request.target, &request.ssh, request.timeouts, interrupt.clone())?;
        let fit = host.prepare(&guest, 0)?;
        guest.check(&fit, 0, &host.name(), &Notices(keeper.observer))?;
        let is_emulated = guest.qemu().is_none_or(|qemu| qemu.kvm != Some(true));
        drop(guest);
        let options = qmp::Options { interrupt, ..qmp::Options::default() };
        let qemu = Qemu::connect(&request.socket, &options)?;
        if let Some(managed) = ManagedGuest::of_qemu(&qemu)? {
            return Err(managed.refuse().into());
        }
        let ferry = FerryProcess::start(&request.ferry)?;
        let directory = PrivateDir::for_qemu(&qemu)?;
        let (settings, entry) = (None, None);
        Ok(Self {
            keeper,
            host,
            cards,
            ferry,
            settings,
            entry,
            directory,
            may_be_taken: false,
            is_emulated,
            qemu,
        })
    }

    /// Protects the guest until an end is lost, or `cancel`.
    pub(super) fn run(mut self) -> Result<AttemptEnd, Error> {
        self.qemu.client().set_interrupt(None);
        let ending = match self.copy() {
            Ok(()) => self.watch(),
            Err(error) => Err(error),
        };
        match ending {
            Ok(Ending::GuestEnded) => {
                self.host.release_standby();
                Ok(AttemptEnd::Done(ProtectEnd::GuestEnded))
            }
            Ok(Ending::Died) => {
                // The standby sees that.
                self.ferry.kill();
                Ok(AttemptEnd::Done(ProtectEnd::Died))
            }
            Ok(Ending::Cancelled) => match self.host.release_standby() {
                true => self.end().map(|()| AttemptEnd::Done(ProtectEnd::Cancelled)),
                false => {
                    let end = self.lose("the other host has not confirmed the end".into())?;
                    Ok(match end {
                        AttemptEnd::Lost { .. } => AttemptEnd::Done(ProtectEnd::Cancelled),
                        end => end,
                    })
                }
            },
            Ok(Ending::Lost { reason }) => self.lose(reason),
            Err(error) if self.may_be_taken => self.lose(error.to_string()),
            Err(error) => {
                self.end()?;
                Err(error)
            }
        }
    }

    /// Copies the guest, and has checkpoints taken.
    fn copy(&mut self) -> Result<(), Error> {
        let request = self.keeper.request;
        let FromFerry::Certificate(certificate) = self.ferry.expect(STEP_TIMEOUT)? else {
            return Err(out_of_turn());
        };
        let stands = self.host.stand_by(&NewStandby {
            certificate,
            generation: self.keeper.generation,
            arbiter: request.arbiter.clone(),
            peer_timeout_ms: millis(request.peer_timeout),
            checkpoint_bytes_max: request.checkpoint_bytes_max,
        })?;
        let socket = self.directory.join("checkpoints.sock");
        self.ferry.send(&ToFerry::Begin(FerryRequest {
            standby: stands.address.to_string(),
            certificate: stands.certificate,
            socket: socket.clone(),
            cards: self.cards.clone(),
            generation: self.keeper.generation,
            epoch_ms: millis(request.epoch),
            ends_on_output: request.ends_on_output,
            peer_timeout_ms: millis(request.peer_timeout),
            checkpoint_bytes_max: request.checkpoint_bytes_max,
        }));
        let FromFerry::Listening = self.ferry.expect(STEP_TIMEOUT)? else { return Err(out_of_turn()) };
        self.record();
        let settings = self.new_settings();
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        if self.is_emulated {
            self.qemu.stop()?;
        }
        let uri = format!("unix:{}", socket.display());
        self.qemu.migrate(&Migrate::to_uri(uri))?;
        self.await_copy()?;
        self.await_secondary()?;
        self.ferry.send(&ToFerry::Go);
        Ok(())
    }

    fn new_settings(&self) -> MigrationSettings {
        let known = &self.qemu.facts().capabilities;
        let on = [Capability::new(CAPABILITY), Capability::RETURN_PATH].map(|name| (name, true));
        let off = OFF.into_iter().filter(|name| known.contains_key(name)).map(|name| (name, false));
        let capabilities: BTreeMap<_, _> = on.into_iter().chain(off).collect();
        let mut other = Map::new();
        other.insert("x-checkpoint-delay".into(), REQUEST_INTERVAL_MS.into());
        let parameters = MigrationParameters {
            max_bandwidth: Some(0),
            downtime_limit: Some(DOWNTIME_MS),
            tls_creds: Some(String::new()),
            other,
            ..MigrationParameters::default()
        };
        MigrationSettings { capabilities, parameters }
    }

    /// Records what another towline does if this process and the ferry are killed.
    fn record(&mut self) {
        let (ferry_pid, ferry_start_time) = self.ferry.identity();
        self.entry = self.qemu.record(&UndoRecord::Protection(ProtectionRecord {
            ferry_pid,
            ferry_start_time,
            cards: self.cards.clone(),
            generation: self.keeper.generation,
            arbiter: self.keeper.request.arbiter.clone(),
            claimant: self.keeper.claimant.clone(),
        }));
    }

    /// Waits until the standby has the first copy.
    fn await_copy(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + COPY_TIMEOUT;
        loop {
            match self.ferry.link.receive(LOOK_INTERVAL) {
                Received::Message(FromFerry::Copied) => return Ok(()),
                Received::Message(FromFerry::Ended { reason, .. }) => {
                    return Err(Error::NotProtected { reason });
                }
                Received::Message(_) => return Err(out_of_turn()),
                Received::End => {
                    return Err(Error::NotProtected {
                        reason: "the process that takes checkpoints has ended".into(),
                    });
                }
                Received::Nothing => {}
            }
            if self.keeper.cancel.is_cancelled() {
                return Err(Error::Cancelled);
            }
            if Instant::now() >= deadline {
                return Err(Error::NotProtected { reason: "the first copy takes too long".into() });
            }
        }
    }

    /// Waits until QEMU awaits its secondary: a message that comes earlier may be lost.
    fn await_secondary(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let status = self.qemu.migration()?.status.unwrap_or(MigrationStatus::NONE);
            if status == MigrationStatus::COLO {
                return Ok(());
            }
            if status.is_idle() || Instant::now() >= deadline {
                let reason = format!("QEMU's migration is {status} after the first copy, expected colo");
                return Err(Error::NotProtected { reason });
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Watches the checkpoints, until they end.
    fn watch(&mut self) -> Result<Ending, Error> {
        let silence_max = self.keeper.request.peer_timeout + self.keeper.request.epoch * 2 + SILENCE_BEYOND;
        let (mut stopping, mut heard) = (None, Instant::now());
        let mut report = Report::default();
        loop {
            match self.ferry.link.receive(LOOK_INTERVAL) {
                Received::Message(message) => {
                    heard = Instant::now();
                    match message {
                        FromFerry::Stopping { .. } => {
                            self.may_be_taken = true;
                            stopping = Some(heard);
                        }
                        FromFerry::Runs { pause_us, bytes, pages, epoch } => {
                            stopping = None;
                            report.took(epoch, pause_us, bytes, pages);
                        }
                        FromFerry::Acknowledged { epoch, latency_us } => {
                            if epoch == 1 {
                                self.keeper.observer.protected(self.keeper.generation);
                            }
                            report.acknowledged(latency_us);
                        }
                        FromFerry::Ended { lost: Lost::Guest, .. } => return Ok(self.guest_ended()),
                        FromFerry::Ended { reason, .. } => return Ok(Ending::Lost { reason }),
                        _ => return Err(out_of_turn()),
                    }
                }
                Received::End => {
                    return Ok(Ending::Lost {
                        reason: "the process that takes checkpoints has ended".into(),
                    });
                }
                Received::Nothing => {}
            }
            if let Some(checkpoints) = report.due() {
                self.keeper.observer.checkpoints(&checkpoints);
            }
            if self.keeper.cancel.is_cancelled() {
                return Ok(Ending::Cancelled);
            }
            let is_stuck = stopping.is_some_and(|since: Instant| since.elapsed() > STANDSTILL_MAX);
            if is_stuck || heard.elapsed() > silence_max {
                return Ok(Ending::Lost { reason: "the process that takes checkpoints hangs".into() });
            }
            if let Some(ending) = self.read_events(Duration::ZERO)? {
                return Ok(ending);
            }
        }
    }

    /// Reads what the monitor reports: of an end, or of each standstill.
    fn read_events(&mut self, within: Duration) -> Result<Option<Ending>, Error> {
        loop {
            match self.qemu.client().next_event(within) {
                Ok(None) => return Ok(None),
                Ok(Some(event)) if event.name == "SHUTDOWN" => return Ok(Some(Ending::GuestEnded)),
                Ok(Some(_)) => {}
                Err(error) if error.is_disconnected() => return Ok(Some(Ending::Died)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The way to QEMU has ended: a guest that was shut down, and a QEMU that received `quit`, say so.
    fn guest_ended(&mut self) -> Ending {
        match self.read_events(STANDSTILL_MAX) {
            Ok(Some(ending)) => ending,
            // It lives, and its checkpoints have failed.
            _ => Ending::Lost { reason: "QEMU takes no more checkpoints; its own log says why".into() },
        }
    }

    /// The standby may take the guest over: decides that.
    fn lose(mut self, reason: String) -> Result<AttemptEnd, Error> {
        self.ferry.kill();
        self.run_on()?;
        if self.may_be_taken && self.keeper.decide()? == Decision::There {
            self.qemu.quit()?;
            self.settings.take().into_iter().for_each(AppliedSettings::leave_applied);
            let generation = self.keeper.generation + 1;
            return Ok(AttemptEnd::Done(ProtectEnd::TakenOver { generation, reason }));
        }
        self.finish()?;
        Ok(AttemptEnd::Lost { reason })
    }

    /// Ends a protection that the standby has not, or not any more.
    fn end(mut self) -> Result<(), Error> {
        self.ferry.kill();
        self.run_on()?;
        self.finish()
    }

    /// Has the guest's output go, and restores QEMU's settings.
    fn finish(mut self) -> Result<(), Error> {
        let passed = self.keeper.pass(&self.cards);
        if passed.is_ok() {
            self.entry.iter().for_each(JournalEntry::done);
        }
        let restored = self.settings.take().map_or(Ok(()), |settings| settings.restore(&mut self.qemu));
        if let Err(error) = restored {
            self.keeper.observer.notice(&error.to_string());
        }
        passed
    }

    /// Ends the checkpoints in QEMU: the guest runs afterwards.
    fn run_on(&mut self) -> Result<(), Error> {
        self.qemu.end_checkpoints()?;
        Ok(())
    }
}

fn out_of_turn() -> Error {
    Error::NotProtected { reason: "the process that takes checkpoints is another version of towline".into() }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Notices of a comparison.
struct Notices<'a>(&'a dyn ProtectObserver);

impl crate::plan::Observer for Notices<'_> {
    fn notice(&self, text: &str) {
        self.0.notice(text);
    }
}
