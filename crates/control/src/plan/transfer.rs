//! The phases of a copy between any two ends, with failures handled in one place below them.

use super::context::Context;
use super::endpoint::{self, DestinationEndpoint, SourceEndpoint};
use super::ends::Destination;
use super::error::{Error, Failure};
use super::executor::{SwitchoverEnds, SwitchoverReport, conclude};
use super::preflight::FactsExtent;
use super::progress::CopyPhase;
use super::recorder::RecordedEnds;
use super::report::{CopyReport, DestinationState};
use super::shared_switchover::{SharedSwitchover, TransferContext};
use crate::switchover::{Directive, MemorySharing};

/// Transfers the guest of `source` to `destination`.
pub(super) fn transfer(
    source: &mut dyn SourceEndpoint,
    destination: &Destination,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let process = if destination.is_image() { source.record_process(context) } else { None };
    let extent = if destination.monitor().is_some() { FactsExtent::Compared } else { FactsExtent::Identity };
    let mut description = source.describe_guest(extent, context)?;
    if process.is_some() {
        description.origin.process = process;
    }
    let mut to = endpoint::destination(destination, description, context).map_err(Failure::untouched)?;
    transfer_to(source, to.as_mut(), context)
}

/// Transfers the guest of `source`, which is prepared, to an open destination.
pub(super) fn transfer_to(
    source: &mut dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let kinds = (source.kind(), to.kind());
    let memory = to.qemu().map_or(MemorySharing::Copied, |to| to.memory());
    let switchover = SharedSwitchover::with_memory(kinds.0, kinds.1, memory, context.options);
    let run = TransferContext { switchover: &switchover, context };
    let moved = source.start(to, run).and_then(|()| {
        record(source, to, &switchover, context);
        source.transfer(to, run)
    });
    if moved.is_err() && to.has_discarded() {
        return dropped(source, to, &switchover, context);
    }
    let (directive, error) = match moved {
        Ok(()) => {
            context.observer.phase(CopyPhase::Release);
            (source.delivered(to, &switchover), None)
        }
        Err(error) => (switchover.failed(&error), Some(error)),
    };
    if error.is_some() && directive != Directive::AcknowledgeUnconfirmed {
        source.disconnect(to);
    }
    let ends =
        SwitchoverEnds { switchover: &switchover, source: source.control(), destination: to, context, error };
    let concluded = conclude(ends, directive);
    source.close_after_switchover();
    match concluded {
        Ok(concluded) => Ok(report(source, to, &concluded, context)),
        Err(failure) => Err(source.explain(failure)),
    }
}

/// Starts to record the decisions of the switchover.
fn record(
    source: &dyn SourceEndpoint,
    to: &dyn DestinationEndpoint,
    switchover: &SharedSwitchover,
    context: &Context<'_>,
) {
    if let Some(source) = source.recorded() {
        switchover.keep_record(RecordedEnds { source, destination: to.move_end() }, context);
    }
    if let Some(link) = source.main_channel() {
        switchover.connected(link);
    }
}

fn report(
    source: &dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
    concluded: &SwitchoverReport,
    context: &Context<'_>,
) -> CopyReport {
    let SwitchoverReport { source: origin, destination, downtime_ms, .. } = *concluded;
    let loaded_by_qemu = to.qemu().is_some_and(|to| to.is_loaded_by_qemu);
    CopyReport { downtime_ms, loaded_by_qemu, ..context.build_report(source.moved(), origin, destination) }
}

/// The destination has counted and discarded the guest: the source's stream fails, and its guest runs on.
fn dropped(
    source: &mut dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
    switchover: &SharedSwitchover,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    source.disconnect(to);
    let error = Error::Cancelled;
    let directive = switchover.failed(&error);
    let ends =
        SwitchoverEnds { switchover, source: source.control(), destination: to, context, error: Some(error) };
    let failure = match conclude(ends, directive) {
        Ok(concluded) => return Ok(report(source, to, &concluded, context)),
        Err(failure) if !failure.guest.is_safe() => return Err(failure),
        Err(failure) => failure,
    };
    failure.notes.iter().for_each(|note| context.observer.notice(note));
    Ok(context.build_report(source.moved(), source.state_after_discard(), DestinationState::Dropped))
}
