//! `towline copy` and `towline move`.

use std::sync::Mutex;

use anyhow::Result;
use towline_channel::Cancel;
use towline_control::plan::{self, CloneTarget, CopyRequest, Destination, Observer, Source, WritableDisks};

use crate::args::{CopyArgs, DiskArgs, MoveArgs, TransferArgs};
use crate::endpoint::{Endpoint, memory};
use crate::exit::{Exit, UsageError};
use crate::lock::lock;
use crate::log::RequestId;
use crate::notify::Notifier;
use crate::outcome::{Destinations, Results, Verb};
use crate::progress::Reporter;
use crate::report::ReportRecorder;
use crate::signals::{HeldSignals, SignalEffects, cancel_on_signals};
use crate::{request, sandbox};

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
    let mut options = request::of_copy(args, &source, &destinations).map_err(UsageError)?;
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
    // Until they are handled, which needs a thread.
    let held = HeldSignals::hold()?;
    if let (Source::Qmp(socket), DiskArgs { with_disks: true, overlay_dir, .. }) = (&source, &args.disks) {
        // By a program, which a confined process cannot start.
        match plan::prepare_disks(socket, overlay_dir.as_deref(), &held.arrived(), &reporter) {
            Ok(disks) => options.disks = WritableDisks::Kept(disks),
            Err(failure) => return Ok(results.failed(&args.destinations[0], &failure)),
        }
    }
    confine(&args.transfer, &source, &destinations, &options, &held);
    let cancel = cancel_on_signals(SignalEffects::of_copy(&args.transfer, &ends))?;
    drop(held);
    if destinations.len() > 1 {
        return Ok(clones(&results, args, &source, &destinations, &options, &cancel));
    }
    let (Some(endpoint), Some(destination)) = (args.destinations.first(), destinations.first()) else {
        return Err(UsageError("a copy needs a destination".into()).into());
    };
    let recorder = ReportRecorder::new();
    let observer = (&(&reporter, &notifier), &recorder);
    memory::check(&source, destination, &options)?;
    let copy = |observer: &dyn Observer| plan::copy(&source, destination, &options, &cancel, observer);
    let copied = args.transfer.observability.observe(&options, &cancel, &observer, copy);
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
fn confine(
    args: &TransferArgs,
    source: &Source,
    destinations: &[Destination],
    options: &CopyRequest,
    held: &HeldSignals,
) {
    match sandbox::policy_of_copy(source, destinations, options, args.observability.qmp.as_deref()) {
        Some(mut policy) => {
            sandbox::permit_mapped_images(&mut policy, source, destinations, options, &held.arrived());
            args.observability.metrics.iter().for_each(|address| policy.bind.add(address.port()));
            policy.write.extend(args.report.report.as_deref().map(sandbox::parent_directory));
            if let WritableDisks::Kept(disks) = &options.disks {
                // Unused overlays are removed.
                policy.write.extend(disks.overlays().iter().map(|path| sandbox::parent_directory(path)));
            }
            args.sandbox.confine(policy);
        }
        None => args.sandbox.log_unconfined(sandbox::EXEC_UNCONFINED),
    }
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
            links_down: &[],
            is_own: false,
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
    let held = HeldSignals::hold()?;
    confine(&args.transfer, &source, std::slice::from_ref(&destination), &options, &held);
    let cancel =
        cancel_on_signals(SignalEffects::of_copy(&args.transfer, &[&args.source, &args.destination]))?;
    drop(held);
    let recorder = ReportRecorder::new();
    let observer = (&reporter, &recorder);
    memory::check(&source, &destination, &options)?;
    let copy = |observer: &dyn Observer| plan::copy(&source, &destination, &options, &cancel, observer);
    let moved = args.transfer.observability.observe(&options, &cancel, &observer, copy)?;
    reporter.finish();
    let exit = report(&results, &args.destination, &moved);
    recorder.write(&args.transfer.report, [&args.source, &args.destination], moved.as_ref());
    Ok(exit)
}
