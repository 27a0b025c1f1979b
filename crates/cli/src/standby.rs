//! `towline standby`: runs the newest image of a record once its guest's host is off.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, anyhow};
use towline_channel::Cancel;
use towline_control::plan::Observer as _;
use towline_control::record::{InstantChoice, Place, RecordedInstant, Takeover};
use towline_control::run::{Disks, Networks};

use crate::args::{Output, StandbyArgs, StartArgs};
use crate::errors;
use crate::events::InterimEvent;
use crate::exit::Exit;
use crate::notify::Notifier;
use crate::progress::Reporter;
use crate::record::place_of;
use crate::report::ReportArgs;
use crate::run::RecordedRun;

/// Longest run of the program that is asked.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time without a new image after which that is reported.
const REPORTED_AFTER: Duration = Duration::from_secs(60);
/// Bytes of the program's messages that are shown.
const MESSAGE_MAX: u64 = 1 << 10;

/// Runs the command.
pub(crate) fn run(args: &StandbyArgs) -> Result<Exit> {
    let place = place_of(&args.place)?;
    let reporter = Reporter::new(&args.output);
    if let Some(command) = &args.arbiter {
        Standby { args, place: &place, reporter: &reporter }.wait(command)?;
    }
    // After its host is off: no later image comes.
    let newest = newest(&place)?;
    let takeover = Takeover::begin(&place, &newest)?;
    let age = SystemTime::now().duration_since(newest.at.into()).unwrap_or_default();
    reporter.event(InterimEvent::TakesOver {
        sequence: newest.sequence,
        at: newest.at.to_string(),
        age: age.as_secs(),
    });
    reporter.line(&format!(
        "taking over from image {} of {}, {} s ago by the clock of this host: what the guest has done since is lost",
        newest.sequence,
        newest.at,
        age.as_secs()
    ));
    let Output { json, quiet } = args.output;
    let guest = RecordedRun {
        image: place.image(&newest)?,
        start: StartArgs {
            name: args.name.clone(),
            count: 1,
            detach: true,
            set: args.set.clone(),
            qemu: args.qemu.clone(),
            report: ReportArgs::default(),
            output: Output { json, quiet },
        },
        is_trusted: args.trust_command_line,
        disks: Disks::Overlays(None),
        networks: Networks::Same,
    };
    let exit = guest.start(&|_, _, _| Ok(Exit::Done));
    match exit {
        Ok(Exit::Done | Exit::NeedsAttention) => {}
        // It has not run here.
        _ => takeover.withdraw()?,
    }
    exit
}

fn newest(place: &Place) -> Result<RecordedInstant> {
    let instants = place.instants(&Cancel::new()?)?;
    InstantChoice::Newest
        .of(&instants)
        .ok_or_else(|| anyhow!("{place}: nothing is recorded there (`towline record`)"))
}

/// A standby that waits.
struct Standby<'a> {
    args: &'a StandbyArgs,
    place: &'a Place,
    reporter: &'a Reporter,
}

impl Standby<'_> {
    /// Returns once the host of the guest is off.
    fn wait(&self, command: &str) -> Result<()> {
        let notifier = Notifier::from_environment();
        let mut last = (newest(self.place)?, Instant::now());
        let ready = format!(
            "standing by for {}, whose newest image is {} of {}",
            self.place, last.0.sequence, last.0.at
        );
        notifier.ready(&ready);
        self.reporter.line(&ready);
        let mut said = None;
        loop {
            let begun = Instant::now();
            let mut problem = match ask(command, self.place, &last.0) {
                Ok(true) => return Ok(()),
                Ok(false) => None,
                Err(error) => {
                    Some(format!("the arbiter has not answered: {}; it is asked again", errors::text(&error)))
                }
            };
            match newest(self.place) {
                Ok(newest) if newest.sequence != last.0.sequence => last = (newest, Instant::now()),
                Ok(_) if last.1.elapsed() < REPORTED_AFTER => {}
                Ok(newest) => {
                    let text = || {
                        format!(
                            "{}: no image since {} of {}; see its `towline record`",
                            self.place, newest.sequence, newest.at
                        )
                    };
                    problem = problem.or_else(|| Some(text()));
                }
                Err(error) => problem = Some(errors::text(&error)),
            }
            if problem != said {
                problem.iter().for_each(|problem| self.reporter.notice(problem));
                said = problem;
            }
            thread::sleep(self.args.every.saturating_sub(begun.elapsed()));
        }
    }
}

/// Asks whether the host of the guest is off and stays off.
fn ask(command: &str, place: &Place, newest: &RecordedInstant) -> Result<bool> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .env("TOWLINE_PLACE", place.to_string())
        .env("TOWLINE_IMAGE", newest.sequence.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("sh")?;
    let answer = answer_of(&mut child);
    if answer.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    answer
}

fn answer_of(child: &mut Child) -> Result<bool> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        match child.try_wait()? {
            None if Instant::now() >= deadline => {
                return Err(anyhow!("no end within {} s", ANSWER_WITHIN.as_secs()));
            }
            None => thread::sleep(POLL_INTERVAL),
            Some(status) => {
                return match status.code() {
                    Some(0) => Ok(true),
                    Some(1) => Ok(false),
                    _ => Err(anyhow!("{status}: {}", message(child))),
                };
            }
        }
    }
}

/// The end of what a program has said.
fn message(child: &mut Child) -> String {
    let mut text = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // Not from a process that the program has left.
        let _ = rustix::io::ioctl_fionbio(&stderr, true);
        let _ = stderr.take(MESSAGE_MAX).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).trim().to_owned()
}
