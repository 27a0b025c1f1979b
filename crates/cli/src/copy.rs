//! `towline copy` and `towline move`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result};
use towline_channel::Cancel;
use towline_control::plan::{self, CloneTarget, CopyRequest, Destination, Observer, Source};
use towline_control::statistics::StatsSource;
use towline_control::status_server::StatusServer;

use crate::args::{CopyArgs, MoveArgs, TransferArgs};
use crate::endpoint::{Endpoint, memory};
use crate::exit::{Exit, UsageError};
use crate::lock::lock;
use crate::log::RequestId;
use crate::notify::Notifier;
use crate::observability::ObservabilityArgs;
use crate::outcome::{Destinations, Results, Verb};
use crate::progress::Reporter;
use crate::report::ReportRecorder;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::sockets::private;
use crate::{errors, request, sandbox};

/// Runs `copy`.
pub(crate) fn run(args: &CopyArgs, request: Option<RequestId>) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    reporter.report_start(request);
    let results = Results::of(Verb::Copied, &reporter, &args.source);
    let results = Results { sandbox: Some(&args.transfer.sandbox), ..results };
    let source = match args.source.source() {
        Ok(source) => source,
        // A file of `virsh save`.
        Err(text) if args.source.is_image() => {
            return Ok(reporter.failed(&text, "image", Exit::Failed));
        }
        Err(text) => return Err(UsageError(text).into()),
    };
    if args.destinations.len() > 1 && !source.is_image() {
        let text = format!(
            "{} destinations, but {} can be read only once: copy it to an image first, then the image to all of them",
            args.destinations.len(),
            args.source
        );
        return Err(UsageError(text).into());
    }
    let destinations = args.destinations.iter().map(Endpoint::destination);
    let destinations: Vec<_> = destinations.collect::<Result<_, _>>().map_err(UsageError)?;
    let options = request::of_copy(args, &source, &destinations).map_err(UsageError)?;
    if destinations.len() > 1 && args.transfer.report.report.is_some() {
        return Err(UsageError("--report is for one DEST: start one towline for each".into()).into());
    }
    if destinations.len() > 1 && args.transfer.observability.is_requested() {
        let text = "--qmp and --metrics are for one DEST: start one towline for each";
        return Err(UsageError(text.into()).into());
    }
    let ends: Vec<&Endpoint> = std::iter::once(&args.source).chain(&args.destinations).collect();
    args.transfer.report.check(&ends).map_err(UsageError)?;
    let notifier = Notifier::from_environment();
    confine(&args.transfer, &source, &destinations, &options);
    let cancel = cancel_on_signals(signal_effects(&args.transfer, &ends))?;
    if destinations.len() > 1 {
        return Ok(clones(&results, args, &source, &destinations, &options, &cancel));
    }
    let (Some(endpoint), Some(destination)) = (args.destinations.first(), destinations.first()) else {
        return Err(UsageError("a copy needs a destination".into()).into());
    };
    let recorder = ReportRecorder::new();
    let observer = (&(&reporter, &notifier), &recorder);
    let copied = observed(&source, destination, &options, &cancel, &observer, &args.transfer.observability);
    notifier.stopping();
    let copied = copied?;
    reporter.finish();
    let exit = report(&results, endpoint, &copied);
    recorder.write(&args.transfer.report, [&args.source, endpoint], copied.as_ref());
    Ok(exit)
}

/// Reports the result of a copy to one destination.
fn report(results: &Results<'_>, destination: &Endpoint, copied: &plan::CopyResult) -> Exit {
    match copied {
        Ok(report) => {
            results.done(destination, report);
            Exit::Done
        }
        Err(failure) => results.failed(destination, failure),
    }
}

/// Confines this process to what a copy between these endpoints needs.
fn confine(args: &TransferArgs, source: &Source, destinations: &[Destination], options: &CopyRequest) {
    match sandbox::policy_of_copy(source, destinations, options, args.observability.qmp.as_deref()) {
        Some(mut policy) => {
            args.observability.metrics.iter().for_each(|address| policy.bind.add(address.port()));
            policy.write.extend(args.report.report.as_deref().map(sandbox::parent_directory));
            args.sandbox.confine(policy);
        }
        None => args.sandbox.log_unconfined(sandbox::EXEC_UNCONFINED),
    }
}

/// Copies to one destination, with the servers of `--qmp` and `--metrics`.
fn observed(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
    observability: &ObservabilityArgs,
) -> Result<plan::CopyResult> {
    memory::check(source, destination, options)?;
    if !observability.is_requested() {
        return Ok(plan::copy(source, destination, options, cancel, observer));
    }
    let monitor = Arc::new(StatusServer::new(options, cancel));
    let serve = |path: &PathBuf| {
        private(|| Ok(monitor.serve(path)?)).with_context(|| format!("--qmp {}", path.display()))
    };
    let server = observability.qmp.as_ref().map(serve).transpose()?;
    let counting = Arc::clone(&monitor) as Arc<dyn StatsSource>;
    let observers = observability.with_server(server, &counting)?;
    let copied = plan::copy(source, destination, options, cancel, &(observer, &*monitor));
    monitor.ended(copied.as_ref().map_err(|failure| errors::worded(failure)));
    drop(observers);
    Ok(copied)
}

/// Copies to several destinations at once.
fn clones(
    results: &Results<'_>,
    args: &CopyArgs,
    source: &Source,
    destinations: &[Destination],
    options: &CopyRequest,
    cancel: &Cancel,
) -> Exit {
    let reporters = Reporter::several(&args.output, &args.destinations);
    let results = Results { destinations: Destinations::Several, ..*results };
    let recipients: Vec<_> = destinations
        .iter()
        .zip(&reporters)
        .map(|(destination, reporter)| CloneTarget {
            destination,
            observer: reporter,
            started: None,
            reflink: None,
        })
        .collect();
    // The worst result.
    let exit = Mutex::new(Exit::Done);
    let ended = |index: usize, copied: &plan::CopyResult| {
        reporters[index].finish();
        // Locked during the report, so the lines of one destination are together.
        let mut exit = lock(&exit);
        *exit = (*exit).max(report(&results, &args.destinations[index], copied));
    };
    let clones =
        plan::Clones { targets: &recipients, options, cancel, observer: results.reporter, ended: &ended };
    match plan::copy_to_all(source, &clones) {
        Ok(outcomes) => {
            let exit = *lock(&exit);
            results.all(&outcomes, exit);
            exit
        }
        Err(failure) => results.refused(&failure),
    }
}

/// Runs `move`.
pub(crate) fn run_move(args: &MoveArgs, request: Option<RequestId>) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    reporter.report_start(request);
    let results = Results::of(Verb::Moved, &reporter, &args.source);
    let results = Results { sandbox: Some(&args.transfer.sandbox), ..results };
    let source = args.source.source().map_err(UsageError)?;
    if !matches!(source, Source::Qmp(_)) {
        let text = format!(
            "move ends the QEMU at its SOURCE, and so needs a qmp: endpoint; for {} use `copy`",
            args.source
        );
        return Err(UsageError(text).into());
    }
    let destination = args.destination.destination().map_err(UsageError)?;
    let options = request::of_move(args, &destination).map_err(UsageError)?;
    args.transfer.report.check(&[&args.source, &args.destination]).map_err(UsageError)?;
    confine(&args.transfer, &source, std::slice::from_ref(&destination), &options);
    let cancel = cancel_on_signals(signal_effects(&args.transfer, &[&args.source, &args.destination]))?;
    let observability = &args.transfer.observability;
    let recorder = ReportRecorder::new();
    let observer = (&reporter, &recorder);
    let moved = observed(&source, &destination, &options, &cancel, &observer, observability)?;
    reporter.finish();
    let exit = report(&results, &args.destination, &moved);
    recorder.write(&args.transfer.report, [&args.source, &args.destination], moved.as_ref());
    Ok(exit)
}

fn signal_effects(transfer: &TransferArgs, ends: &[&Endpoint]) -> SignalEffects {
    let has_qemu = ends.iter().any(|end| matches!(end, Endpoint::Qmp(_)));
    if transfer.postcopy.postcopy {
        return SignalEffects {
            first: "cancelling; the source keeps its guest, unless that runs at the destination already, which then \
                    gets its memory first",
            second: Some("a guest that runs at the destination then waits for the rest of its memory"),
        };
    }
    SignalEffects {
        first: "cancelling; the source keeps its guest, unless the switchover is in progress",
        second: has_qemu
            .then_some("QEMU keeps the settings of the copy until the next one, or `towline repair`"),
    }
}
