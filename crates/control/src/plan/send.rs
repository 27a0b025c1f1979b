//! The engine's sending half, under supervision.

use std::sync::Arc;

use towline_migration::{Guest, Outgoing, Snapshot, Statistics, outgoing};

use super::context::Run;
use super::error::Error;
use super::progress::{Phase, Progress};
use super::supervise::supervised;
use super::switch::Switch;

/// Sends a guest that is here, and calls `look` again and again meanwhile.
pub(super) fn send(
    guest: &dyn Guest,
    connections: &outgoing::Connections,
    switch: &Arc<Switch>,
    run: &Run<'_>,
    look: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<Snapshot, Error> {
    run.check_cancelled()?;
    run.observer.phase(Phase::Transfer);
    let session = switch.session();
    let statistics = Arc::new(Statistics::default());
    let options = outgoing::Options {
        return_path: run.options.return_path,
        max_bandwidth: run.options.means().max_bandwidth,
        downtime_limit: run.options.downtime_limit,
        answer_timeout: run.options.connect_timeout,
        compression: run.options.compression,
        zero_copy_send: run.options.zero_copy_send,
        ..outgoing::Options::default()
    };
    let engine = Outgoing::new(Arc::clone(&session), Arc::clone(&statistics), options);
    run.set_sending(&statistics);
    let mut look = || {
        run.report(&statistics, Progress::default());
        look()
    };
    supervised(run, &session, switch, &mut look, || engine.run(connections, guest))?;
    run.report(&statistics, Progress::default());
    Ok(statistics.snapshot())
}
