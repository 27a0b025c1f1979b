//! The column of a copy, whatever its ends are. What fails is concluded below it, in one place.

use super::conclude::{Concluded, Conclusion, conclude};
use super::context::Run;
use super::endpoint::{self, DestinationEndpoint, SourceEndpoint};
use super::ends::Destination;
use super::error::{Error, Failure};
use super::outcomes::GuestState;
use super::progress::Phase;
use super::report::{DestinationState, Report};
use super::switch::Switch;
use crate::switchover::Directive;

/// Has the guest of `source` go to `destination`.
pub(super) fn transfer(
    source: &mut dyn SourceEndpoint,
    destination: &Destination,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let departure = source.prepare(destination.monitor().is_some(), run)?;
    let mut to = endpoint::destination(destination, departure, run).map_err(Failure::untouched)?;
    let to = to.as_mut();
    let switch = Switch::new(source.kind(), to.kind(), run.options);
    let moved = source.start(to, &switch, run).and_then(|()| {
        record(source, to, &switch, run);
        source.transfer(to, &switch, run)
    });
    if moved.is_err() && to.has_dropped() {
        return dropped(source, to, &switch, run);
    }
    let (directive, error) = match moved {
        Ok(()) => {
            run.observer.phase(Phase::Release);
            (source.delivered(to, &switch), None)
        }
        Err(error) => (switch.failed(&error), Some(error)),
    };
    if error.is_some() && directive != Directive::Hold {
        source.disconnect(to);
    }
    let ends = Conclusion { switch: &switch, origin: source.origin(), target: to, run, error };
    let concluded = conclude(ends, directive);
    source.close();
    match concluded {
        Ok(concluded) => Ok(report(source, to, &concluded, run)),
        Err(failure) => Err(source.explain(failure)),
    }
}

/// From here on, what the switchover decides is recorded.
fn record(source: &dyn SourceEndpoint, to: &dyn DestinationEndpoint, switch: &Switch, run: &Run<'_>) {
    if let Some(end) = source.end_of_move() {
        switch.keep_record(end, to.end_of_move(), run);
    }
    if let Some(link) = source.link() {
        switch.connected(link);
    }
}

fn report(
    source: &dyn SourceEndpoint,
    to: &dyn DestinationEndpoint,
    concluded: &Concluded,
    run: &Run<'_>,
) -> Report {
    let Concluded { source: origin, destination, downtime_ms } = *concluded;
    let handed_over = to.is_handed_over();
    Report { downtime_ms, handed_over, ..run.done(source.moved(), origin, destination) }
}

/// The destination has counted the guest, and kept nothing: the source sees that its stream fails, and its guest runs on.
fn dropped(
    source: &mut dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
    switch: &Switch,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    source.disconnect(to);
    let error = Error::Cancelled;
    let directive = switch.failed(&error);
    let ends = Conclusion { switch, origin: source.origin(), target: to, run, error: Some(error) };
    let failure = match conclude(ends, directive) {
        Ok(concluded) => return Ok(report(source, to, &concluded, run)),
        Err(failure) if failure.guest != GuestState::Safe => return Err(failure),
        Err(failure) => failure,
    };
    failure.notes.iter().for_each(|note| run.observer.notice(note));
    Ok(run.done(source.moved(), source.state_if_dropped(), DestinationState::Dropped))
}
