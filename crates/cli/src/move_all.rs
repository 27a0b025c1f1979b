//! `towline move --all`: every guest of this user goes to another host, several at a time.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use towline_channel::Cancel;
use towline_control::plan::CopyRequest;
use towline_control::remote::{NewGuest, Place};
use towline_launch::{RunningGuest, RuntimeError, RuntimeRoot};
use towline_migration::{Tuning, parallel};

use crate::args::MoveArgs;
use crate::endpoint::{Endpoint, SshEndpoint};
use crate::events::{FailedPart, FinalEvent, Reason};
use crate::exit::{Exit, UsageError};
use crate::lock::lock;
use crate::outcome::{Destinations, Results};
use crate::progress::Reporter;
use crate::remote::{PlaceOptions, RemoteCopy};
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::{errors, request};

/// Reason that these moves are not confined.
const UNCONFINED: &str = "ssh would be confined with this process";

/// A guest that is moved.
struct Departure<'a> {
    guest: &'a RunningGuest,
    end: SshEndpoint,
    reporter: &'a Reporter,
}

/// A row of the table at the end.
struct Row<'a> {
    name: &'a str,
    exit: Exit,
    took: Duration,
    text: String,
}

impl<'a> Row<'a> {
    /// Reports a guest whose state cannot be read; the others are moved.
    fn of_unreadable(error: &'a RuntimeError, reporter: &Reporter) -> Self {
        let (path, name) = match error {
            RuntimeError::State { path, .. } => {
                (path.display().to_string(), path.parent().and_then(|guest| guest.file_name()?.to_str()))
            }
            _ => Default::default(),
        };
        let text = error.to_string();
        let exit = reporter.failed_with(FailedPart::File { path }, &text, Reason::Other, Exit::Failed);
        Self { name: name.unwrap_or_default(), exit, took: Duration::ZERO, text }
    }
}

/// One bandwidth for all moves that are in progress.
struct Budget {
    bytes_per_second: Option<u64>,
    shares: Mutex<Vec<(usize, Tuning)>>,
}

impl Budget {
    /// Gives this move its share, and the others what is left.
    fn enter(&self, n: usize, tuning: &Tuning) {
        lock(&self.shares).push((n, tuning.clone()));
        self.divide();
    }

    fn leave(&self, n: usize) {
        lock(&self.shares).retain(|(other, _)| *other != n);
        self.divide();
    }

    fn divide(&self) {
        let shares = lock(&self.shares);
        let Some(all) = self.bytes_per_second else { return };
        for (_, tuning) in shares.iter() {
            tuning.set_max_bandwidth(Some((all / shares.len() as u64).max(1)));
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &MoveArgs, all: &Endpoint) -> Result<Exit> {
    let Endpoint::Ssh(host) = all else {
        bail!(UsageError(format!("--all {all}: expected another host, as ssh:HOST")));
    };
    if !matches!(&host.place, Place::Guest(guest) if guest.name.is_empty()) {
        bail!(UsageError(format!(
            "--all {all}: the guests keep their names; leave out what follows the host"
        )));
    }
    if args.transfer.report.report.is_some() || args.transfer.observability.is_requested() {
        bail!(UsageError(
            "--report, --qmp and --metrics are for one guest: leave them out with --all".into(),
        ));
    }
    let options = request::of_move(args, all).map_err(UsageError)?;
    args.transfer.sandbox.log_unconfined(UNCONFINED);
    let cancel = cancel_on_signals(SignalEffects::of_copy(&args.transfer, &[all]))?;
    let (mut guests, mut unreadable) = (Vec::new(), Vec::new());
    for guest in RuntimeRoot::of_user().guests()? {
        match guest {
            Ok(guest) => guests.push(guest),
            Err(error) => unreadable.push(error),
        }
    }
    let to = |guest: &RunningGuest| {
        let place = Place::Guest(NewGuest { name: guest.name.clone(), ..NewGuest::default() });
        SshEndpoint { place, ..host.clone() }
    };
    let ends: Vec<SshEndpoint> = guests.iter().map(to).collect();
    let reporters = Reporter::several(&args.output, &ends);
    let departures = guests.iter().zip(ends).zip(&reporters);
    let departures: Vec<_> =
        departures.map(|((guest, end), reporter)| Departure { guest, end, reporter }).collect();
    let reporter = Reporter::new(&args.output);
    let unreadable: Vec<_> = unreadable.iter().map(|error| Row::of_unreadable(error, &reporter)).collect();
    let mut rows = move_each(args, &options, &departures, &cancel);
    rows.extend(unreadable);
    Ok(report(&reporter, all, &rows))
}

/// Moves the guests, `--parallel` at a time. Rows are in the order of the guests.
fn move_each<'a>(
    args: &MoveArgs,
    options: &CopyRequest,
    departures: &[Departure<'a>],
    cancel: &Cancel,
) -> Vec<Row<'a>> {
    let budget = Budget { bytes_per_second: args.transfer.max_bandwidth, shares: Mutex::default() };
    let one = |(n, departure): &(usize, &Departure<'a>)| {
        let begun = Instant::now();
        let options = CopyRequest { tuning: Tuning::default(), ..options.clone() };
        budget.enter(*n, &options.tuning);
        let moved = move_one(args, options, departure, cancel);
        budget.leave(*n);
        let (exit, text) = moved.unwrap_or_else(|error| (Exit::of_error(&error), errors::text(&error)));
        Ok::<_, Infallible>(Row { name: &departure.guest.name, exit, took: begun.elapsed(), text })
    };
    let departures: Vec<_> = departures.iter().enumerate().collect();
    let Ok(rows) = parallel::for_each(&departures, args.parallel, || &one);
    rows
}

/// Moves a guest, and reports that. Returns its exit status, and a text for the table.
fn move_one(
    args: &MoveArgs,
    options: CopyRequest,
    departure: &Departure<'_>,
    cancel: &Cancel,
) -> Result<(Exit, String)> {
    let Departure { guest, end, reporter } = departure;
    if cancel.is_cancelled() {
        return Ok((Exit::Failed, "not begun: cancelled".into()));
    }
    let place = PlaceOptions::of_move(args, cancel.descriptor());
    let moved = RemoteCopy::move_guest(end, &place, &guest.qmp, options, cancel, reporter)?;
    reporter.finish();
    let (source, destination) = (Endpoint::Qmp(guest.qmp.clone()), Endpoint::Ssh(end.clone()));
    let results = Results { destinations: Destinations::Several, ..Results::of("moved", reporter, &source) };
    let text = match &moved {
        Ok(report) => {
            report.downtime_ms.map_or_else(String::new, |downtime| format!("downtime {downtime} ms"))
        }
        Err(failure) => errors::failure_text(failure),
    };
    Ok((results.report(&destination, &moved), text))
}

/// Reports all moves.
fn report(reporter: &Reporter, all: &Endpoint, rows: &[Row<'_>]) -> Exit {
    let completed = rows.iter().filter(|row| row.exit == Exit::Done).count();
    let exit = rows.iter().map(|row| row.exit).max().unwrap_or(Exit::Done);
    for Row { name, exit, took, text } in rows {
        let state = match exit {
            Exit::Done => "moved",
            // It may be there, or paused at both ends.
            Exit::NeedsAttention => "look",
            _ => "stays",
        };
        let text = text.lines().next().unwrap_or_default();
        reporter.line(&format!("{name:<20} {state:<6} {:>7.1} s  {text}", took.as_secs_f64()));
    }
    reporter.line(&format!("{completed} of {} guests moved to {all}", rows.len()));
    reporter.result(FinalEvent::All { completed, failed: rows.len() - completed }, exit)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};
    use crate::console::tests::without_threads;

    #[test]
    fn guests_are_moved_where_no_thread_can_be_started() {
        const NAME: &str = "move_all::tests::guests_are_moved_where_no_thread_can_be_started";
        if let Some(output) = without_threads(NAME) {
            return assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let parsed =
            Args::try_parse_from("towline move --quiet --all ssh:b --parallel 3".split(' ')).unwrap();
        let Command::Move(args) = parsed.command else { panic!() };
        let Some(Endpoint::Ssh(end)) = args.all.clone() else { panic!() };
        let options = request::of_move(&args, &Endpoint::Ssh(end.clone())).unwrap();
        let guest = RunningGuest {
            name: "web".into(),
            pid: 0,
            start_time: 0,
            owner_pid: 0,
            is_detached: true,
            qmp: "a.qmp".into(),
            image: None,
            generations: None,
        };
        let reporter = Reporter::new(&args.output);
        let departure = || Departure { guest: &guest, end: end.clone(), reporter: &reporter };
        let cancel = Cancel::new().unwrap();
        cancel.cancel();
        let rows = move_each(&args, &options, &[departure(), departure(), departure()], &cancel);
        assert_eq!(rows.iter().filter(|row| row.text == "not begun: cancelled").count(), 3);
    }
}
