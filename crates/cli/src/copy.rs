//! `towline copy` and `towline move`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use towline_channel::Cancel;
use towline_control::plan::{self, CloneTarget, Destination, Observer, Request, Source};
use towline_control::statistics::StatsSource;
use towline_control::status_server::StatusServer;

use crate::Exit;
use crate::args::{CopyArgs, MoveArgs, TransferArgs};
use crate::endpoint::Endpoint;
use crate::log::RequestId;
use crate::notify::Notifier;
use crate::outcome::Outcome;
use crate::progress::Reporter;
use crate::signals::cancel_on_signals;
use crate::sockets::private;
use crate::watch::WatchArgs;
use crate::{request, sandbox};

/// Runs `copy`.
pub(crate) fn run(args: &CopyArgs, request: Option<RequestId>) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    reporter.begun(request);
    let outcome =
        Outcome { reporter: &reporter, source: &args.source, verb: "copied", is_one_of_several: false };
    let source = match args.source.source() {
        Ok(source) => source,
        Err(text) => return Ok(outcome.usage(&text)),
    };
    if args.destinations.len() > 1 && !source.is_image() {
        let text = format!(
            "{} destinations, but {} can be read only once: copy it to an image first, and the image to all of them",
            args.destinations.len(),
            args.source
        );
        return Ok(outcome.usage(&text));
    }
    let destinations: Result<Vec<_>, _> = args.destinations.iter().map(Endpoint::destination).collect();
    let destinations = match destinations {
        Ok(destinations) => destinations,
        Err(text) => return Ok(outcome.usage(&text)),
    };
    let options = match request::of_copy(args, &source) {
        Ok(options) => options,
        Err(text) => return Ok(outcome.usage(&text)),
    };
    let promise = match args.transfer.postcopy.postcopy {
        true => {
            "a guest that does not run yet stays where it is, one that runs gets the rest of its memory first"
        }
        false => "the source keeps its guest, unless that is being handed over already",
    };
    if destinations.len() > 1 && args.transfer.watch.is_wanted() {
        return Ok(outcome.usage(
            "--qmp and --metrics show one copy, and there are several DESTs: start one towline for each",
        ));
    }
    let notifier = Notifier::from_environment();
    confine(&args.transfer, &source, &destinations, &options);
    let cancel = cancel_on_signals(promise)?;
    if destinations.len() > 1 {
        return Ok(clones(args, &source, &destinations, &options, &cancel));
    }
    let (Some(endpoint), Some(destination)) = (args.destinations.first(), destinations.first()) else {
        return Ok(outcome.usage("a copy needs a destination"));
    };
    let observer = (&reporter, &notifier);
    let copied = watched(&source, destination, &options, &cancel, &observer, &args.transfer.watch);
    notifier.stopping();
    let copied = copied?;
    reporter.finish();
    Ok(match copied {
        Ok(report) => {
            outcome.done(endpoint, &report);
            Exit::Done
        }
        Err(failure) => outcome.failed(endpoint, &failure),
    })
}

/// Leaves this process what a copy between these ends needs.
fn confine(args: &TransferArgs, source: &Source, destinations: &[Destination], options: &Request) {
    match sandbox::of_copy(source, destinations, options, args.watch.qmp.as_deref()) {
        Some(mut policy) => {
            args.watch.metrics.iter().for_each(|address| policy.listens_tcp(address.port()));
            args.sandbox.confine(&policy);
        }
        None => args.sandbox.cannot_confine(sandbox::COMMANDS),
    }
}

/// Copies to one destination, watched if that is wanted.
fn watched(
    source: &Source,
    destination: &Destination,
    options: &Request,
    cancel: &Cancel,
    observer: &dyn Observer,
    watch: &WatchArgs,
) -> Result<plan::CopyResult> {
    if !watch.is_wanted() {
        return Ok(plan::copy(source, destination, options, cancel, observer));
    }
    let monitor = Arc::new(StatusServer::new(format!("towline {}", std::process::id()), options, cancel));
    let serve = |path: &PathBuf| {
        private(|| Ok(monitor.serve(path)?)).with_context(|| format!("--qmp {}", path.display()))
    };
    let server = watch.qmp.as_ref().map(serve).transpose()?;
    let counting = Arc::clone(&monitor) as Arc<dyn StatsSource>;
    let watched = watch.with(server, &counting)?;
    let copied = plan::copy(source, destination, options, cancel, &(observer, &*monitor));
    monitor.ended(copied.as_ref());
    drop(watched);
    Ok(copied)
}

/// Copies to several destinations at once.
fn clones(
    args: &CopyArgs,
    source: &Source,
    destinations: &[Destination],
    options: &Request,
    cancel: &Cancel,
) -> Exit {
    let (reporter, reporters) = Reporter::several(&args.output, &args.destinations);
    let outcome =
        Outcome { reporter: &reporter, source: &args.source, verb: "copied", is_one_of_several: true };
    let recipients: Vec<_> = destinations
        .iter()
        .zip(&reporters)
        .map(|(destination, reporter)| CloneTarget { destination, observer: reporter })
        .collect();
    // The worst that became of any of them.
    let exit = Mutex::new(Exit::Done);
    let ended = |index: usize, copied: &plan::CopyResult| {
        reporters[index].finish();
        // Held while it is told, so that what is said of one stands together.
        let mut exit = exit.lock().unwrap_or_else(PoisonError::into_inner);
        let (endpoint, this) = (&args.destinations[index], Exit::Done);
        let this = match copied {
            Ok(report) => {
                outcome.done(endpoint, report);
                this
            }
            Err(failure) => outcome.failed(endpoint, failure),
        };
        *exit = (*exit).max(this);
    };
    match plan::copy_to_all(source, &recipients, options, cancel, &reporter, &ended) {
        Ok(outcomes) => {
            let exit = exit.into_inner().unwrap_or_else(PoisonError::into_inner);
            outcome.all(&outcomes, exit);
            exit
        }
        Err(failure) => Outcome { is_one_of_several: false, ..outcome }.refused(&failure),
    }
}

/// Runs `move`.
pub(crate) fn run_move(args: &MoveArgs, request: Option<RequestId>) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    reporter.begun(request);
    let outcome =
        Outcome { reporter: &reporter, source: &args.source, verb: "moved", is_one_of_several: false };
    let source = match args.source.source() {
        Ok(source @ Source::Qmp(_)) => source,
        Ok(_) => {
            let text = format!(
                "move ends the QEMU that it takes the guest from, and so needs its qmp: socket; for {} use `copy`",
                args.source
            );
            return Ok(outcome.usage(&text));
        }
        Err(text) => return Ok(outcome.usage(&text)),
    };
    if args.resume {
        return Ok(outcome.usage("move ends its SOURCE, --resume lets it run on: use `copy --resume`"));
    }
    let destination = match args.destination.destination() {
        Ok(destination) => destination,
        Err(text) => return Ok(outcome.usage(&text)),
    };
    let options = match request::of_move(args, &destination) {
        Ok(options) => options,
        Err(text) => return Ok(outcome.usage(&text)),
    };
    confine(&args.transfer, &source, std::slice::from_ref(&destination), &options);
    let cancel = cancel_on_signals("the source keeps its guest")?;
    let moved = watched(&source, &destination, &options, &cancel, &reporter, &args.transfer.watch)?;
    reporter.finish();
    Ok(match moved {
        Ok(report) => {
            outcome.done(&args.destination, &report);
            Exit::Done
        }
        Err(failure) => outcome.failed(&args.destination, &failure),
    })
}
