//! A copy, from what is asked for to its column.

use towline_channel::Cancel;
use towline_image::StoredGuest;
use towline_migration::Snapshot;
use towline_protocol::session::Receiver;

use super::context::Run;
use super::endpoint::{self, StoredSource};
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use super::progress::{Observer, Phase, Progress};
use super::receive::Arrival;
use super::report::Report;
use super::request::{PostcopyOptions, Request};
use super::survey::Survey;
use super::switch::Switch;
use super::transfer::transfer;
use super::validate::{checked, checked_survey};
use super::{fit, postcopy};
use crate::switchover::{DestinationKind, SourceKind};

/// Copies a guest; returns when it is safe at its destination.
///
/// # Errors
/// Why not, and where the guest is; see [`Failure`].
pub fn copy(
    source: &Source,
    destination: &Destination,
    options: &Request,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Report, Failure> {
    let (options, lanes) = checked(source, destination, options).map_err(Failure::untouched)?;
    let run = Run::new(&options, lanes, cancel, observer);
    observer.phase(Phase::Prepare);
    fit::devices(options.devices(), observer).map_err(Failure::untouched)?;
    match options.postcopy() {
        None => transfer(endpoint::source(source, &run)?.as_mut(), destination, &run),
        Some(how) => ahead(source, destination, how, &run),
    }
}

/// Has the guest run at its destination before its memory is there.
fn ahead(
    source: &Source,
    destination: &Destination,
    how: PostcopyOptions,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    if let (Some(from), Some(to)) = (source.monitor(), destination.monitor()) {
        return postcopy::migrate(from, to, how, run);
    }
    let image = endpoint::open(source, run.options, run.cancel, run.observer);
    postcopy::restore(image.map_err(Failure::untouched)?.as_ref(), destination, how, run)
}

/// Copies an image that is open, and that other copies may read at the same time.
pub(super) fn stored(
    image: &(dyn StoredGuest + 'static),
    destination: &Destination,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    match run.options.postcopy() {
        None => transfer(&mut StoredSource::new(image), destination, run),
        Some(how) => postcopy::restore(image, destination, how, run),
    }
}

/// Receives the stream that `source` names into `survey` and keeps nothing: the guest stays where it is.
///
/// # Errors
/// The stream did not come to its end.
pub fn survey(
    source: &Source,
    survey: &Survey,
    options: &Request,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Snapshot, Failure> {
    let Some(address) = source.stream() else {
        return Err(Failure::untouched(Error::Usage("only a stream can be surveyed".into())));
    };
    let lanes = checked_survey(source, options).map_err(Failure::untouched)?;
    let run = Run::new(options, lanes, cancel, observer);
    let switch = Switch::new(SourceKind::Stream, DestinationKind::Stored, options);
    observer.phase(Phase::Connect);
    let mut arrival = Arrival::default();
    arrival.connected(switch.session(), endpoint::listen(address, &run).map_err(Failure::untouched)?);
    match arrival.receive(survey, Receiver::Stores, &switch, &run, &mut || Ok(Progress::default())) {
        Err(error) if !survey.is_complete() => Err(Failure::untouched(error)),
        _ => Ok(arrival.moved()),
    }
}
