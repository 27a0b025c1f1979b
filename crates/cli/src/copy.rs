//! `towline copy` and `towline move`.

use std::sync::Mutex;

use anyhow::Result;
use towline_channel::{Address, Cancel};
use towline_control::plan::{self, CloneTarget, CopyRequest, Destination, Observer, Source, WritableDisks};

use crate::args::{CopyArgs, DiskArgs, MoveArgs, TransferArgs};
use crate::endpoint::{Endpoint, memory};
use crate::exit::{Exit, UsageError};
use crate::lock::lock;
use crate::log::RequestId;
use crate::notify::Notifier;
use crate::outcome::{Destinations, Results, Verb};
use crate::progress::Reporter;
use crate::remote::{PlaceOptions, RemoteCopy};
use crate::report::ReportRecorder;
use crate::signals::{HeldSignals, SignalEffects, cancel_on_signals};
use crate::{move_all, request, sandbox};

/// Runs `copy`.
pub(crate) fn run(args: &CopyArgs, request: Option<RequestId>) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    reporter.report_start(request);
    let results = Results::of(Verb::Copied, &reporter, &args.source);
    let results = Results { sandbox: Some(&args.transfer.sandbox), ..results };
    let source = match args.source.source() {
        // Its address is known once that host listens.
        _ if matches!(args.source, Endpoint::Ssh(_)) => {
            Source::Stream(Address::Tcp { host: String::new(), port: 0 })
        }
        Ok(source) => source,
        // A file of `virsh save`.
        Err(text) if args.source.is_image() => {
            return Ok(reporter.failed(&text, "image", Exit::Failed));
        }
        Err(text) => return Err(UsageError(text).into()),
    };
    check_several(args, &source)?;
    let is_elsewhere = matches!(args.destinations[..], [Endpoint::Ssh(_)]);
    let destinations = args.destinations.iter().filter(|_| !is_elsewhere).map(Endpoint::destination);
    let destinations: Vec<_> = destinations.collect::<Result<_, _>>().map_err(UsageError)?;
    let mut options = request::of_copy(args, &source, &destinations).map_err(UsageError)?;
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
    let mut ends_of_copy = CopyEnds { source, destinations };
    let recorder = ReportRecorder::new();
    let opened = open_other_host(args, &mut ends_of_copy, &mut options, &held, &(&reporter, &recorder));
    let remote = match opened {
        Ok(remote) => remote,
        Err(error) => {
            let failure = error.downcast()?;
            recorder.write(&args.transfer.report, [&args.source, &args.destinations[0]], Err(&failure));
            return Ok(results.failed(&args.destinations[0], &failure));
        }
    };
    let CopyEnds { source, destinations } = ends_of_copy;
    confine(&args.transfer, &source, &destinations, &options, remote.as_ref(), &held);
    let cancel = cancel_on_signals(SignalEffects::of_copy(&args.transfer, &ends))?;
    drop(held);
    if destinations.len() > 1 {
        return Ok(clones(&results, args, &source, &destinations, &options, &cancel));
    }
    let (Some(endpoint), Some(destination)) = (args.destinations.first(), destinations.first()) else {
        return Err(UsageError("a copy needs a destination".into()).into());
    };
    let observer = (&(&reporter, &notifier), &recorder);
    memory::check(&source, destination, &options)?;
    let copy = |observer: &dyn Observer| plan::copy(&source, destination, &options, &cancel, observer);
    let copied = args.transfer.observability.observe(&options, &cancel, &observer, copy);
    notifier.stopping();
    let mut copied = copied?;
    if let Some(remote) = remote {
        remote.close(&mut copied, &reporter);
    }
    reporter.finish();
    let exit = report(&results, endpoint, &copied);
    recorder.write(&args.transfer.report, [&args.source, endpoint], copied.as_ref());
    Ok(exit)
}

/// Refuses options of several destinations that are for one.
fn check_several(args: &CopyArgs, source: &Source) -> Result<(), UsageError> {
    let (count, transfer) = (args.destinations.len(), &args.transfer);
    let text = if count < 2 {
        return Ok(());
    } else if !source.is_image() {
        format!(
            "{count} destinations, but {} can be read only once: copy it to an image first, then the image to all of them",
            args.source
        )
    } else if transfer.report.report.is_some() {
        "--report is for one DEST: start one towline for each".into()
    } else if transfer.observability.is_requested() {
        "--qmp and --metrics are for one DEST: start one towline for each".into()
    } else {
        return Ok(());
    };
    Err(UsageError(text))
}

/// Ends of a copy; without the address of another host, as long as that does not listen.
struct CopyEnds {
    source: Source,
    destinations: Vec<Destination>,
}

/// Has another host send or receive the guest, if it is an end of the copy. The error is a [`UsageError`] or a
/// [`Failure`](plan::Failure).
fn open_other_host(
    args: &CopyArgs,
    ends: &mut CopyEnds,
    options: &mut CopyRequest,
    held: &HeldSignals,
    observer: &dyn Observer,
) -> Result<Option<RemoteCopy>> {
    let place = PlaceOptions::of(&args.transfer, &args.ssh, None, held.arrived());
    Ok(Some(match (&args.source, &args.destinations[..]) {
        (Endpoint::Ssh(end), _) => {
            let remote = RemoteCopy::open_source(end, &place, &ends.destinations[0], options, observer)?;
            ends.source = Source::Stream(remote.address.clone());
            remote
        }
        (_, [Endpoint::Ssh(end)]) => {
            let Source::Qmp(socket) = &ends.source else {
                let text = format!("{end} as DEST needs a qmp: SOURCE; copy an image there as a file (scp)");
                return Err(UsageError(text).into());
            };
            let remote = RemoteCopy::open(end, &place, socket, options, observer)?;
            ends.destinations.push(Destination::Stream(remote.address.clone()));
            remote
        }
        _ => return Ok(None),
    }))
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
    remote: Option<&RemoteCopy>,
    held: &HeldSignals,
) {
    match sandbox::policy_of_copy(source, destinations, options, args.observability.qmp.as_deref()) {
        Some(mut policy) => {
            sandbox::permit_mapped_images(&mut policy, source, destinations, options, &held.arrived());
            policy.child = remote.map(RemoteCopy::ssh_pid);
            args.observability.metrics.extend_policy(&mut policy);
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
        .map(|(destination, reporter)| CloneTarget { destination, observer: reporter, own: None })
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
    if let Some(all) = &args.all {
        return move_all::run(args, all);
    }
    let (Some(from), Some(to)) = (&args.source, &args.destination) else {
        return Err(UsageError("a move needs SOURCE and DEST, or --all".into()).into());
    };
    let reporter = Reporter::new(&args.output);
    reporter.report_start(request);
    let results = Results::of(Verb::Moved, &reporter, from);
    let results = Results { sandbox: Some(&args.transfer.sandbox), ..results };
    let source = from.source().map_err(UsageError)?;
    let Source::Qmp(socket) = &source else {
        let text = format!(
            "move ends the QEMU at its SOURCE, and so needs a qmp: endpoint; for {} use `copy`",
            from
        );
        return Err(UsageError(text).into());
    };
    let mut options = request::of_move(args, to).map_err(UsageError)?;
    args.transfer.report.check(&[from, to]).map_err(UsageError)?;
    let held = HeldSignals::hold()?;
    let recorder = ReportRecorder::new();
    let observer = (&reporter, &recorder);
    let (destination, mut remote) = match to {
        Endpoint::Ssh(end) => {
            let place = PlaceOptions::of_move(args, held.arrived());
            match RemoteCopy::open(end, &place, socket, &mut options, &observer) {
                Ok(remote) => (Destination::Stream(remote.address.clone()), Some(remote)),
                Err(failure) => {
                    recorder.write(&args.transfer.report, [from, to], Err(&failure));
                    return Ok(results.failed(to, &failure));
                }
            }
        }
        other => (other.destination().map_err(UsageError)?, None),
    };
    let destinations = std::slice::from_ref(&destination);
    confine(&args.transfer, &source, destinations, &options, remote.as_ref(), &held);
    let cancel = cancel_on_signals(SignalEffects::of_copy(&args.transfer, &[from, to]))?;
    drop(held);
    memory::check(&source, &destination, &options)?;
    let copy = |observer: &dyn Observer| plan::copy(&source, &destination, &options, &cancel, observer);
    let observed = || args.transfer.observability.observe(&options, &cancel, &observer, copy);
    let mut moved = match &mut remote {
        Some(remote) => remote.copy(observed)?,
        None => observed()?,
    };
    if let Some(remote) = remote {
        remote.close(&mut moved, &reporter);
    }
    reporter.finish();
    let exit = report(&results, to, &moved);
    recorder.write(&args.transfer.report, [from, to], moved.as_ref());
    Ok(exit)
}
