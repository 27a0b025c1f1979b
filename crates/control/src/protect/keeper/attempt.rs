//! One protection of a guest, from its first copy to the loss of an end.

mod copy;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use towline_qmp::{self as qmp, Event};

use super::super::messages::{FromFerry, Lost, Received};
use super::decision::Keeper;
use super::mirrors::DiskMirrors;
use super::process::{FERRY_ENDED, FerryProcess};
use super::report::Report;
use super::request::{Error, ProtectEnd, check_departing};
use crate::arbiter::Stake;
use crate::cards::HoldingCards;
use crate::generations::ManagedGuest;
use crate::journal::JournalEntry;
use crate::plan::PrivateDir;
use crate::protect::DISKS;
use crate::qemu::{AppliedSettings, Qemu};
use crate::remote::{DepartingGuest, NewGuest, Place, RemoteHost};

/// A pause for a checkpoint is taken for the ferry's death this long before the other host does so, and not sooner than that after it
/// began: the guest then runs on here.
const PAUSE_MARGIN: Duration = Duration::from_secs(1);
/// Time for a QEMU whose connection has ended to say why.
const ENDS_WITHIN: Duration = Duration::from_millis(300);
/// Time for which a ferry whose standby replies may say nothing.
const SILENCE_BEYOND: Duration = Duration::from_secs(1);
/// Interval of looks at the monitor.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Interval of looks at a guest that is copied.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Time for the other host's word that it does not take the guest over; of a guest that may stand.
const RELEASED_WITHIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_millis(100)];
/// Time for a QEMU that is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// End of an attempt.
pub(super) enum AttemptEnd {
    Done(ProtectEnd),
    /// The guest runs on here, and its output goes.
    Lost {
        reason: String,
    },
}

/// Reason for which checkpoints have ended.
enum Ending {
    Cancelled,
    GuestEnded,
    Died,
    Lost { lost: Lost, reason: String },
}

impl Ending {
    /// The loss of a part of this host.
    fn here(reason: &str) -> Self {
        Self::Lost { lost: Lost::Here, reason: reason.to_owned() }
    }
}

/// A protection under way.
pub(super) struct Attempt<'a, 'k> {
    /// Ended first, and then the session, which may take seconds.
    ferry: FerryProcess,
    keeper: &'a mut Keeper<'k>,
    host: RemoteHost,
    cards: Vec<PathBuf>,
    mirrors: DiskMirrors,
    /// Notices about disks that stay here when the guest goes.
    disks_left: Vec<String>,
    settings: Option<AppliedSettings>,
    entry: Option<JournalEntry>,
    directory: PrivateDir,
    /// The standby may take the guest over.
    may_be_taken: bool,
    /// It has had a checkpoint.
    is_protected: bool,
    /// The guest was shut down, or its QEMU has received `quit`, and it was not reset since.
    was_shut_down: bool,
    /// Emulation loses writes to the first pass of a guest that runs.
    is_emulated: bool,
    qemu: Qemu,
}

impl<'a, 'k> Attempt<'a, 'k> {
    /// Prepares both hosts; nothing of the guest is changed, but for what a killed towline has left.
    pub(super) fn begin(keeper: &'a mut Keeper<'k>) -> Result<Self, Error> {
        let request = keeper.request;
        let interrupt = Some(keeper.cancel.descriptor());
        let options = qmp::Options { interrupt: interrupt.clone(), ..qmp::Options::default() };
        // Its journal is locked from here on: what follows is of one towline.
        let mut qemu = Qemu::connect(&request.socket, &options)?;
        if let Some(repaired) = qemu.repaired() {
            keeper.observer.notice(&repaired.to_string());
            if !repaired.left.is_empty() {
                return Err(Error::LeftByOther { left: repaired.left.join("; ") });
            }
        }
        keeper.left = None;
        if let Some(managed) = ManagedGuest::of_qemu(&qemu)? {
            return Err(managed.refuse().into());
        }
        // Of this QEMU: another one of the same monitor may have an older guest.
        let process = qemu.process().identity();
        let protection =
            process.map(|(pid, start_time)| format!("{}-{pid}-{start_time}", keeper.claimant.id));
        let place = Place::Guest(NewGuest { protection, ..request.guest.clone() });
        let guest = DepartingGuest::of_qemu(&mut qemu, place, DISKS, None)?;
        let cards = guest.card_controls();
        let name = guest.new_guest().map(|guest| guest.name.clone()).unwrap_or_default();
        check_departing(&guest, request.leaks_output)?;
        let mut host = RemoteHost::connect(&request.target, &request.ssh, request.timeouts, interrupt)?;
        // A cluster ends what waits for the guest before it gives it a generation.
        keeper.claim_new(&name, &cards)?;
        let fit = host.prepare(&guest, 0)?;
        guest.check(&fit, 0, &host.name(), keeper.observer)?;
        let is_emulated = guest.qemu().is_none_or(|facts| facts.kvm != Some(true));
        let disks_left = guest.disks_left();
        drop(guest);
        Ok(Self {
            ferry: FerryProcess::start(&request.ferry)?,
            keeper,
            host,
            cards,
            mirrors: DiskMirrors::of(&mut qemu)?,
            disks_left,
            settings: None,
            entry: None,
            directory: PrivateDir::for_qemu(&qemu)?,
            may_be_taken: false,
            is_protected: false,
            was_shut_down: false,
            is_emulated,
            qemu,
        })
    }

    /// Protects the guest until an end is lost, or `cancel`.
    pub(super) fn run(mut self) -> Result<AttemptEnd, Error> {
        self.qemu.client().set_interrupt(None);
        match self.copy().and_then(|()| self.watch()) {
            Ok(Ending::GuestEnded) => self.guest_has_ended(),
            Ok(Ending::Died) => self.died(),
            Ok(Ending::Cancelled) => {
                // Not for a guest that has just died.
                let is_there = self.qemu.status().is_ok();
                self.may_be_taken = !(is_there && self.host.release_standby(RELEASED_WITHIN[0]));
                match self.lose(Lost::Standby, "the other host has not confirmed the end".into())? {
                    AttemptEnd::Lost { .. } => Ok(AttemptEnd::Done(ProtectEnd::Cancelled)),
                    end => Ok(end),
                }
            }
            Ok(Ending::Lost { lost, reason }) => self.lose(lost, reason),
            Err(error) if self.may_be_taken => self.lose(Lost::Here, error.to_string()),
            // Never protected: it runs on, and its output goes.
            Err(error) => match self.lose(Lost::Standby, String::new())? {
                AttemptEnd::Lost { .. } => Err(error),
                end => Ok(end),
            },
        }
    }

    /// Watches the checkpoints, until they end.
    fn watch(&mut self) -> Result<Ending, Error> {
        let mut report = Report::default();
        let ending = self.watch_until(&mut report);
        report.rest().iter().for_each(|checkpoints| self.keeper.observer.checkpoints(checkpoints));
        ending
    }

    fn watch_until(&mut self, report: &mut Report) -> Result<Ending, Error> {
        let request = self.keeper.request;
        let silence_max = request.peer_timeout + request.epoch * 2 + SILENCE_BEYOND;
        let pause_max = request.peer_timeout.saturating_sub(PAUSE_MARGIN).max(PAUSE_MARGIN);
        let (mut stopping, mut heard) = (None, Instant::now());
        loop {
            match self.ferry.link.receive(LOOK_INTERVAL) {
                Received::Message(message) => {
                    heard = Instant::now();
                    match message {
                        FromFerry::Stopping { .. } => stopping = Some(heard),
                        FromFerry::Runs { pause_us, bytes, pages, epoch } => {
                            stopping = None;
                            report.took(epoch, pause_us, bytes, pages);
                        }
                        FromFerry::Acknowledged { latency_us, .. } => {
                            self.has_checkpoint();
                            report.acknowledged(latency_us);
                        }
                        FromFerry::Ended { lost, reason } => return Ok(self.ferry_has_ended(lost, reason)),
                        _ => return Err(out_of_turn()),
                    }
                }
                Received::End => return Ok(Ending::here(FERRY_ENDED)),
                Received::Nothing => {}
            }
            if let Some(checkpoints) = report.due() {
                self.keeper.observer.checkpoints(&checkpoints);
            }
            if self.keeper.cancel.is_cancelled() {
                return Ok(Ending::Cancelled);
            }
            let is_stuck = stopping.is_some_and(|since: Instant| since.elapsed() > pause_max);
            if is_stuck || heard.elapsed() > silence_max {
                return Ok(Ending::here("the process that takes checkpoints, or QEMU, hangs"));
            }
            if let Some(ending) = self.read_events(Duration::ZERO)? {
                return Ok(ending);
            }
        }
    }

    /// The other host has had a checkpoint.
    fn has_checkpoint(&mut self) {
        if !self.is_protected {
            (self.is_protected, self.keeper.has_protected) = (true, true);
            self.keeper.observer.protected(self.keeper.generation);
        }
    }

    /// Reads the monitor's next event. QEMU says that it ends before it closes what another part could miss. A guest that was shut down
    /// without the end of its QEMU runs again once it was reset.
    fn next_event(&mut self, within: Duration) -> Result<Option<Event>, qmp::Error> {
        let event = self.qemu.client().next_event(within)?;
        match event.as_ref().map(|event| event.name.as_str()) {
            Some("SHUTDOWN") => self.was_shut_down = true,
            Some("RESET") => self.was_shut_down = false,
            _ => {}
        }
        Ok(event)
    }

    /// Reads the monitor's events for this time: of an end, or of each pause.
    fn read_events(&mut self, within: Duration) -> Result<Option<Ending>, Error> {
        let deadline = Instant::now() + within;
        loop {
            match self.next_event(deadline.saturating_duration_since(Instant::now())) {
                Ok(None) => return Ok(self.was_shut_down.then_some(Ending::GuestEnded)),
                // Its QEMU may reply to no query any more.
                Ok(Some(_)) if self.was_shut_down => {}
                Ok(Some(event)) => match self.mirrors.check_after(&event, &mut self.qemu) {
                    Err(error @ Error::DiskNotCopied { .. }) => {
                        return Ok(Some(Ending::here(&error.to_string())));
                    }
                    checked => checked?,
                },
                Err(error) if error.is_disconnected() && self.qemu.has_exited(ENDS_WITHIN) => {
                    return Ok(Some(if self.was_shut_down { Ending::GuestEnded } else { Ending::Died }));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The ferry takes no more checkpoints. If its QEMU ends, its monitor says so, which may be a proxy's.
    fn ferry_has_ended(&mut self, lost: Lost, reason: String) -> Ending {
        if lost == Lost::Here
            && let Ok(Some(ending)) = self.read_events(ENDS_WITHIN)
        {
            return ending;
        }
        Ending::Lost { lost, reason }
    }

    /// Returns true if the guest has ended by all events so far.
    fn has_ended(&mut self) -> bool {
        while let Ok(Some(_)) = self.next_event(Duration::ZERO) {}
        self.was_shut_down
    }

    /// The guest was shut down. Its last output goes, unless the other host takes it for dead.
    fn guest_has_ended(mut self) -> Result<AttemptEnd, Error> {
        let is_released = self.host.release_standby(RELEASED_WITHIN[1]);
        if !is_released && self.may_be_taken && !self.keeper.decide(Stake::LastOutput)? {
            return Ok(self.lost("the guest was shut down here at the same time".into()));
        }
        self.ferry.kill();
        // A QEMU with -no-shutdown lives.
        if !self.qemu.has_exited(ENDS_WITHIN) && self.qemu.end_checkpoints().is_ok() {
            self.end_mirrors();
            let settings = self.settings.take();
            let _ = settings.map(|settings| settings.restore(&mut self.qemu));
        }
        self.leave_settings();
        if let Err(error) = HoldingCards::pass_all(&self.cards, self.keeper.generation) {
            self.keeper.observer.notice(&format!("the last output of the guest is held: {error}"));
        }
        self.entry.iter().for_each(JournalEntry::done);
        Ok(AttemptEnd::Done(ProtectEnd::GuestEnded))
    }

    /// The QEMU has died, and the ferry's end tells the standby.
    fn died(mut self) -> Result<AttemptEnd, Error> {
        self.ferry.kill();
        self.leave_settings();
        // It may have a checkpoint that it has not confirmed.
        match self.is_protected || self.may_be_taken {
            true => Ok(AttemptEnd::Done(ProtectEnd::Died { is_confirmed: self.is_protected })),
            false => {
                Err(Error::NotProtected { reason: "its QEMU has died before the first checkpoint".into() })
            }
        }
    }

    /// Ends a protection: decides which host goes on if the standby may take the guest over, and has it run on here if it is ours.
    /// A standby that is not lost may give it up.
    fn lose(mut self, lost: Lost, reason: String) -> Result<AttemptEnd, Error> {
        if self.has_ended() {
            return self.guest_has_ended();
        }
        if self.is_protected {
            self.keeper.observer.losing();
        }
        self.ferry.kill();
        if self.may_be_taken {
            // Cards that were started again since may pass.
            let _ = HoldingCards::hold(&self.cards, self.keeper.generation);
        }
        // Nothing is claimed or given up for a QEMU that does not reply: it may be about to die, and the standby has its guest. Before the
        // copy of its memory the guest may be stopped by its user.
        while let Some(Err(error)) = self.entry.is_some().then(|| self.qemu.end_checkpoints()) {
            if self.has_ended() {
                return self.guest_has_ended();
            }
            let is_disconnected = self.qemu.client().check_connected().is_err();
            if self.qemu.has_exited(ENDS_WITHIN) || is_disconnected && self.qemu.process().kill(KILL_TIMEOUT)
            {
                return self.died();
            }
            self.keeper.observer.notice(&format!("the guest may be stopped: {error}; it is tried again"));
            if self.keeper.cancel.is_cancelled() {
                return Err(Error::Stopped(Box::new(error)));
            }
            thread::sleep(STATUS_INTERVAL);
        }
        self.end_mirrors();
        if self.may_be_taken && lost == Lost::Here {
            self.may_be_taken = !self.host.release_standby(RELEASED_WITHIN[1]);
        }
        if self.may_be_taken && !self.keeper.decide(Stake::Guest)? {
            return Ok(self.lost(reason));
        }
        self.finish()?;
        Ok(AttemptEnd::Lost { reason })
    }

    /// The other host has the guest: it is ended here.
    fn lost(&mut self, reason: String) -> AttemptEnd {
        self.ferry.kill();
        if self.qemu.quit().is_err() && !self.qemu.process().kill(KILL_TIMEOUT) {
            self.keeper
                .observer
                .notice("the guest's QEMU cannot be ended here; kill it: its output stays held");
        }
        self.leave_settings();
        self.disks_left.iter().for_each(|notice| self.keeper.observer.notice(notice));
        AttemptEnd::Done(ProtectEnd::TakenOver { generation: self.keeper.generation + 1, reason })
    }

    /// Has the guest's output go, and restores QEMU's settings.
    fn finish(mut self) -> Result<(), Error> {
        let passed = HoldingCards::pass_all(&self.cards, self.keeper.generation);
        if passed.is_ok() {
            self.entry.iter().for_each(JournalEntry::done);
        }
        let restored = self.settings.take().map_or(Ok(()), |settings| settings.restore(&mut self.qemu));
        if let Err(error) = restored {
            self.keeper.observer.notice(&error.to_string());
        }
        passed.map_err(Error::Card)
    }

    fn end_mirrors(&mut self) {
        if let Err(error) = self.mirrors.end(&mut self.qemu) {
            self.keeper.observer.notice(&format!("the guest's disks may still be copied: {error}"));
        }
    }

    fn leave_settings(&mut self) {
        self.settings.take().into_iter().for_each(AppliedSettings::leave_applied);
    }
}

fn out_of_turn() -> Error {
    Error::NotProtected { reason: "a message of the process that takes checkpoints was not expected".into() }
}
