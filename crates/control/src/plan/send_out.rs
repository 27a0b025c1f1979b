//! A guest that is here, an image's or a synthetic one, goes to a stream.

use std::sync::Arc;

use towline_channel::Address;
use towline_migration::{Guest, Snapshot};

use super::blame;
use super::conclude::{Concluded, Conclusion, Origin, conclude};
use super::context::Run;
use super::error::{Error, Failure};
use super::progress::Phase;
use super::report::Report;
use super::send::send;
use super::switch::Switch;
use super::target::Target;
use crate::switchover::{DestinationKind, Directive, Input, SourceKind};

/// Sends a guest that is here to whoever listens at `address`: a QEMU that runs it by itself, or another towline.
pub(super) fn to_stream(guest: &dyn Guest, address: &Address, run: &Run<'_>) -> Result<Report, Failure> {
    run.observer.phase(Phase::Connect);
    let connections = run.reach(address, [0; 16]).map_err(Failure::untouched)?;
    let switch = Switch::new(SourceKind::Stored, DestinationKind::Stream, run.options);
    let moved = send(guest, &connections, &switch, run, &mut || Ok(()));
    let directive = match &moved {
        Ok(_) => switch.handle(Input::Delivered),
        Err(error) => switch.failed(error),
    };
    let sent = Some(Arc::clone(&connections.main));
    let target = Target::Stream { address: address.clone(), uuid: [0; 16], relay: None, sent };
    let moved = moved.map_err(|error| blame::lanes_lost(error, run.lanes, run.options.compression));
    conclude_stored(moved, target, &switch, directive, run)
}

/// Concludes a copy of a guest that stays stored here.
pub(super) fn conclude_stored(
    moved: Result<Snapshot, Error>,
    target: Target,
    switch: &Switch,
    directive: Directive,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let (moved, error) = match moved {
        Ok(moved) => (moved, None),
        Err(error) => (Snapshot::default(), Some(error)),
    };
    let ends = Conclusion { switch, origin: Origin::Stored, target, run, error };
    let Concluded { source, destination, .. } = conclude(ends, directive)?;
    Ok(run.done(moved, source, destination))
}
