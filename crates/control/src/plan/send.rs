//! Sends a guest of this process with the engine, under supervision.

use std::sync::Arc;

use towline_migration::{Guest, Outgoing, Snapshot, Statistics, outgoing};

use super::error::Error;
use super::progress::{CopyPhase, Progress};
use super::shared_switchover::TransferContext;
use super::supervise::run_supervised;

/// Sends a guest of this process, and calls `poll` at intervals.
pub(super) fn send(
    guest: &dyn Guest,
    connections: &outgoing::Connections,
    run: TransferContext<'_>,
    poll: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<Snapshot, Error> {
    let TransferContext { switchover, context } = run;
    context.check_cancelled()?;
    context.observer.phase(CopyPhase::Transfer);
    let session = switchover.new_gated_session();
    let statistics = Arc::new(Statistics::default());
    let options = outgoing::Options {
        return_path: context.options.return_path,
        max_bandwidth: context.options.transfer_options().max_bandwidth,
        downtime_limit: context.options.downtime_limit,
        answer_timeout: context.options.connect_timeout,
        compression: context.options.compression,
        zero_copy_send: context.options.zero_copy_send,
        ..outgoing::Options::default()
    };
    let engine = Outgoing::new(Arc::clone(&session), Arc::clone(&statistics), options);
    context.set_sending(&statistics);
    let mut poll = || {
        context.report_progress(&statistics, Progress::default());
        poll()
    };
    run_supervised(context, &session, switchover, &mut poll, || engine.run(connections, guest))?;
    context.report_progress(&statistics, Progress::default());
    Ok(statistics.snapshot())
}
