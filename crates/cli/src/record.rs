//! `towline record`.

mod drill;

use std::path::Path;

use anyhow::{Result, anyhow};
use towline_channel::Cancel;
use towline_control::plan::Observer as _;
use towline_control::record::{
    self, Error, Place, RecordEnd, RecordObserver, RecordRequest, RecordSummary, Recorded, RecordedInstant,
};
use towline_launch::RuntimeRoot;

use crate::args::RecordArgs;
use crate::endpoint::Endpoint;
use crate::events::{FinalEvent, InterimEvent, RecordEnded, StoredInstant};
use crate::exit::{Exit, UsageError};
use crate::notify::Notifier;
use crate::progress::Reporter;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::units::{counted, size};
use crate::{ctl, errors};

/// Runs the command.
pub(crate) fn run(args: &RecordArgs) -> Result<Exit> {
    match (&args.verify_restore, &args.guest, &args.place) {
        (Some(place), ..) => {
            let place = place_of(place)?;
            drill::run(args, &place, &newest(&place)?)
        }
        (None, Some(guest), Some(place)) => record_guest(args, guest, place_of(place)?),
        _ => Err(UsageError("a record needs GUEST and PLACE".into()).into()),
    }
}

pub(crate) fn place_of(endpoint: &Endpoint) -> Result<Place, UsageError> {
    match endpoint {
        Endpoint::Image(path) => Ok(Place::Directory(path.clone())),
        Endpoint::Store(prefix) => Ok(Place::Prefix(prefix.clone())),
        Endpoint::Secret(why) => Err(UsageError(why.clone())),
        other => Err(UsageError(format!("{other}: expected a directory, or the prefix of a store"))),
    }
}

/// The newest image of a record.
pub(crate) fn newest(place: &Place) -> Result<RecordedInstant> {
    let newest = place.instants(&Cancel::new()?)?.pop();
    newest.ok_or_else(|| anyhow!("{place}: nothing is recorded there (`towline record`)"))
}

fn record_guest(args: &RecordArgs, guest: &Path, place: Place) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    let socket = ctl::socket(guest, &RuntimeRoot::of_user())?.into_owned();
    let request = RecordRequest { socket, place, interval: args.every, keep: args.keep.clone() };
    let cancel = cancel_on_signals(SignalEffects {
        first: "ending after the image under way; the guest runs on",
        second: Some("the guest runs on; what is left of an image is removed by the next `towline record`"),
    })?;
    let output = Output { reporter: &reporter, notifier: Notifier::from_environment() };
    let summary = record::record(&request, &cancel, &output).map_err(|error| match error {
        Error::Gap { .. } => anyhow!("{error} (--keep is the time for which images stay)"),
        error => error.into(),
    })?;
    output.notifier.stopping();
    let exit = match summary.end {
        RecordEnd::Cancelled => Exit::Done,
        RecordEnd::GuestEnded => Exit::Ended,
    };
    reporter.line(&text(&summary));
    Ok(reporter.result(FinalEvent::Recorded(RecordEnded::new(&summary)), exit))
}

fn text(summary: &RecordSummary) -> String {
    let end = match summary.end {
        RecordEnd::Cancelled => "ended",
        RecordEnd::GuestEnded => "the guest's QEMU has ended",
    };
    format!(
        "{end}: {} recorded, {} skipped ({} late, {} while the guest did not run, {} failed), {} removed, {} there",
        counted(summary.recorded, "image"),
        summary.late + summary.idle + summary.failed,
        summary.late,
        summary.idle,
        summary.failed,
        summary.removed,
        summary.images
    )
}

/// Receivers of what becomes of a record.
struct Output<'a> {
    reporter: &'a Reporter,
    notifier: Notifier,
}

impl RecordObserver for Output<'_> {
    fn recorded(&self, recorded: &Recorded) {
        self.reporter.event(InterimEvent::Instant(StoredInstant::new(recorded)));
        let RecordedInstant { sequence, at, .. } = recorded.instant;
        self.notifier.ready(&format!("the newest image is {sequence} of {at}"));
        let pause =
            recorded.pause_ms.map(|pause| format!(", guest stopped for {pause} ms")).unwrap_or_default();
        self.reporter.line(&format!(
            "{sequence}  {at}  {}{pause}, after {} ms; {}",
            size(recorded.bytes),
            recorded.took.as_millis(),
            counted(recorded.images as u64, "image")
        ));
    }

    fn notice(&self, text: &str) {
        self.reporter.notice(text);
    }

    fn failure(&self, error: &Error) -> String {
        errors::worded(error)
    }
}
