//! `towline standby`: runs the newest image of a record once its guest's host is off.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use towline_control::arbiter::{NoAnswer, ask};
use towline_control::plan::Observer as _;
use towline_control::record::{Begun, Error, Holder, Place, RecordedInstant, Takeover, newest_takeover};
use towline_control::run::{Disks, Networks};

use crate::args::{StandbyArgs, StartArgs};
use crate::events::InterimEvent;
use crate::exit::Exit;
use crate::notify::Notifier;
use crate::progress::Reporter;
use crate::record::{newest, place_of};
use crate::run::RecordedRun;
use crate::{console, errors};

/// Shortest time without a new image after which that is reported.
const REPORTED_AFTER: Duration = Duration::from_secs(60);
/// Time for which a takeover that is complete is tried to be marked as such.
const MARKED_WITHIN: Duration = Duration::from_secs(60);
const MARK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the command.
pub(crate) fn run(args: &StandbyArgs) -> Result<Exit> {
    let place = place_of(&args.place)?;
    let reporter = Reporter::new(&args.output);
    let newest = newest(&place)?;
    let mut standby = Standby {
        args,
        place: &place,
        reporter: &reporter,
        last: newest,
        since: Instant::now(),
        longest: Duration::ZERO,
        said: [const { None }; 2],
    };
    let (takeover, newest) = standby.takeover()?;
    let age = SystemTime::now().duration_since(newest.at.into());
    reporter.event(InterimEvent::TakesOver {
        sequence: newest.sequence,
        at: newest.at.to_string(),
        age: age.as_ref().map_or(0, Duration::as_secs),
    });
    let age = age.map_or("ahead of the clock of this host".into(), |age| {
        format!("{} s ago by the clock of this host", age.as_secs())
    });
    reporter.line(&format!(
        "taking over from image {} of {}, {age}: what the guest has done since is lost",
        newest.sequence, newest.at
    ));
    let exit = run_from(args, &place, &takeover, &newest);
    let marked = match exit {
        Ok(Exit::Done) => mark(&takeover, &reporter),
        _ => takeover.withdraw(),
    };
    match marked {
        Ok(()) => exit,
        Err(error) => {
            let place =
                if matches!(exit, Ok(Exit::Done)) { "the guest runs here" } else { "it does not run here" };
            console::error(&format!(
                "{place}, and PLACE/takeovers does not say so: {}",
                errors::worded(&error)
            ));
            exit.map(|_| Exit::NeedsAttention)
        }
    }
}

/// Marks the guest as one that runs here: others wait for that.
fn mark(takeover: &Takeover, reporter: &Reporter) -> Result<(), Error> {
    let begun = Instant::now();
    let mut said = false;
    loop {
        match takeover.runs() {
            Err(error @ Error::Directory { .. }) if begun.elapsed() < MARKED_WITHIN => {
                if !std::mem::replace(&mut said, true) {
                    let error = errors::worded(&error);
                    reporter.notice(&format!(
                        "the guest runs here, and others cannot see that: {error}; it is tried again"
                    ));
                }
                thread::sleep(MARK_INTERVAL);
            }
            marked => return marked,
        }
    }
}

/// Runs the guest, detached, on overlays of the disks of that instant.
fn run_from(
    args: &StandbyArgs,
    place: &Place,
    takeover: &Takeover,
    newest: &RecordedInstant,
) -> Result<Exit> {
    let guest = RecordedRun {
        image: place.image(newest)?,
        start: StartArgs {
            detach: true,
            set: args.set.clone(),
            qemu: args.qemu.clone(),
            ..StartArgs::one(args.name.clone(), args.output)
        },
        is_trusted: args.trust_command_line,
        disks: Disks::Overlays(Some(takeover.overlays())),
        networks: Networks::Same,
    };
    guest.start(&|_, _, _| Ok(Exit::Done))
}

/// A standby that waits.
struct Standby<'a> {
    args: &'a StandbyArgs,
    place: &'a Place,
    reporter: &'a Reporter,
    last: RecordedInstant,
    /// The time at which that was found.
    since: Instant,
    /// Longest time between two images.
    longest: Duration,
    /// The last notice of the arbiter, and of the record; none is repeated.
    said: [Option<String>; 2],
}

impl Standby<'_> {
    /// Waits until the host of the guest is off, and takes it over with its newest image.
    fn takeover(&mut self) -> Result<(Takeover, RecordedInstant)> {
        let after = self.args.after;
        if let Some(other) = newest_takeover(self.place, after)?.filter(|other| other.runs) {
            return Err(Error::TakenOver(other).into());
        }
        let ready = format!(
            "standing by for {}, whose newest image is {} of {}",
            self.place, self.last.sequence, self.last.at
        );
        Notifier::from_environment().ready(&ready);
        self.reporter.line(&ready);
        loop {
            let begun = Instant::now();
            match self.begin() {
                Ok(Some(takeover)) => return Ok(takeover),
                Ok(None) => self.say(1, self.late()),
                Err(error)
                    if error.downcast_ref().is_some_and(|error| matches!(error, Error::TakenOver { .. })) =>
                {
                    return Err(error);
                }
                Err(error) => self.say(1, Some(errors::text(&error))),
            }
            thread::sleep(self.args.every.saturating_sub(begun.elapsed()));
        }
    }

    /// Takes the guest over if its host is off.
    fn begin(&mut self) -> Result<Option<(Takeover, RecordedInstant)>> {
        let is_off = match &self.args.arbiter {
            Some(command) => self.ask(command),
            None => true,
        };
        if let Some(other) = newest_takeover(self.place, self.args.after)? {
            return Err(too_late(other).into());
        }
        let newest = newest(self.place)?;
        if newest.sequence != self.last.sequence {
            self.longest = self.longest.max(self.since.elapsed());
            (self.last, self.since) = (newest, Instant::now());
        }
        if !is_off {
            return Ok(None);
        }
        match Takeover::begin(self.place, self.args.after)? {
            Begun::Here(takeover) => Ok(Some((takeover, newest))),
            Begun::There(other) => Err(too_late(other).into()),
        }
    }

    /// Notice of a record that makes no images.
    fn late(&self) -> Option<String> {
        let RecordedInstant { sequence, at, .. } = self.last;
        let is_late = self.since.elapsed() >= REPORTED_AFTER.max(self.longest * 3);
        is_late
            .then(|| format!("{}: no image since {sequence} of {at}; see its `towline record`", self.place))
    }

    fn say(&mut self, of: usize, text: Option<String>) {
        if self.said[of] != text {
            text.iter().for_each(|text| self.reporter.notice(text));
            self.said[of] = text;
        }
    }

    /// Asks whether the host of the guest is off and stays off.
    fn ask(&mut self, command: &str) -> bool {
        let image = self.last.sequence.to_string();
        let variables = [("TOWLINE_PLACE", self.place.to_string()), ("TOWLINE_IMAGE", image)];
        let answer = ask(command, &variables);
        let problem =
            answer.as_ref().err().filter(|no| !matches!(no, NoAnswer::Status { code: Some(1), .. }));
        self.say(
            0,
            problem.map(|problem| format!("the arbiter has not answered: {problem}; it is asked again")),
        );
        answer.is_ok()
    }
}

/// Another one is quicker, and may fail yet.
fn too_late(other: Holder) -> Error {
    if other.runs { Error::TakenOver(other) } else { Error::TakeoverBegun(other) }
}
