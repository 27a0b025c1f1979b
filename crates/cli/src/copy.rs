//! `towline copy` and `towline move`.

use std::sync::Mutex;

use anyhow::{Result, bail};
use towline_channel::{Address, Cancel};
use towline_control::plan::{self, CloneTarget, CopyRequest, Destination, Observer, Source, WritableDisks};

use crate::args::{CopyArgs, DiskArgs, MoveArgs, TransferArgs};
use crate::endpoint::Endpoint;
use crate::events::Reason;
use crate::exit::{Exit, UsageError};
use crate::lock::lock;
use crate::notify::Notifier;
use crate::outcome::{Destinations, Results};
use crate::progress::Reporter;
use crate::remote::{PlaceOptions, RemoteCopy};
use crate::report::ReportRecorder;
use crate::signals::{HeldSignals, SignalEffects, cancel_on_signals};
use crate::{move_all, request, sandbox};

/// Runs `copy`.
pub(crate) fn run(args: &CopyArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    let results = Results::of("copied", &reporter, &args.source);
    let transfer = Transfer::new(&args.transfer, results, &args.destinations);
    let source = match args.source.source() {
        // Its address is known once that host listens.
        _ if matches!(args.source, Endpoint::Ssh(_)) => {
            Source::Stream(Address::Tcp { host: String::new(), port: 0 })
        }
        Ok(source) => source,
        // A file of `virsh save`.
        Err(text) if args.source.is_image() => {
            return Ok(reporter.failed(&text, Reason::Image, Exit::Failed));
        }
        Err(text) => bail!(UsageError(text)),
    };
    check_several(args, &source)?;
    let destinations = transfer.destinations().map_err(UsageError)?;
    let mut options = request::of_copy(args, &source, &destinations).map_err(UsageError)?;
    args.transfer.report.check(&transfer.ends()).map_err(UsageError)?;
    let notifier = Notifier::from_environment();
    // Until they are handled, which needs a thread.
    let held = HeldSignals::hold()?;
    if let (Source::Qmp(socket), DiskArgs { with_disks: true, overlay_dir, .. }) = (&source, &args.disks) {
        // By a program, which a confined process cannot start.
        match plan::prepare_disks(socket, overlay_dir.as_deref(), &held.arrived(), &reporter) {
            Ok(disks) => options.disks = WritableDisks::Kept(disks),
            Err(failure) => {
                held.forget();
                return Ok(transfer.results.failed(&args.destinations[0], &failure));
            }
        }
    }
    let place = PlaceOptions::of(&args.transfer, &args.ssh, None, held.arrived());
    transfer.run(CopyEnds { source, destinations }, options, &place, held, &notifier)
}

/// Runs `move`.
pub(crate) fn run_move(args: &MoveArgs) -> Result<Exit> {
    if let Some(all) = &args.all {
        return move_all::run(args, all);
    }
    let (Some(from), Some(to)) = (&args.source, &args.destination) else {
        bail!(UsageError("a move needs SOURCE and DEST, or --all".into()));
    };
    let reporter = Reporter::new(&args.output);
    let results = Results::of("moved", &reporter, from);
    let transfer = Transfer::new(&args.transfer, results, std::slice::from_ref(to));
    let source = from.source().map_err(UsageError)?;
    if !matches!(source, Source::Qmp(_)) {
        let text =
            format!("move ends the QEMU at its SOURCE, and so needs a qmp: endpoint; for {from} use `copy`");
        bail!(UsageError(text));
    }
    let options = request::of_move(args, to).map_err(UsageError)?;
    args.transfer.report.check(&transfer.ends()).map_err(UsageError)?;
    let held = HeldSignals::hold()?;
    let destinations = transfer.destinations().map_err(UsageError)?;
    let place = PlaceOptions::of_move(args, held.arrived());
    transfer.run(CopyEnds { source, destinations }, options, &place, held, &Notifier::NONE)
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

/// A copy or move by its command line.
struct Transfer<'a> {
    args: &'a TransferArgs,
    results: Results<'a>,
    destinations: &'a [Endpoint],
}

impl<'a> Transfer<'a> {
    fn new(args: &'a TransferArgs, mut results: Results<'a>, destinations: &'a [Endpoint]) -> Self {
        results.sandbox = Some(&args.sandbox);
        Self { args, results, destinations }
    }

    fn ends(&self) -> Vec<&'a Endpoint> {
        std::iter::once(self.results.source).chain(self.destinations).collect()
    }

    /// Its destinations; none of another host, whose address is known once that listens.
    fn destinations(&self) -> Result<Vec<Destination>, String> {
        match self.destinations {
            [Endpoint::Ssh(_)] => Ok(Vec::new()),
            endpoints => endpoints.iter().map(Endpoint::destination).collect(),
        }
    }

    /// Copies the guest, and reports that.
    fn run(
        &self,
        mut ends: CopyEnds,
        mut options: CopyRequest,
        place: &PlaceOptions<'_>,
        held: HeldSignals,
        notifier: &Notifier,
    ) -> Result<Exit> {
        let (Results { reporter, source, .. }, to) = (&self.results, &self.destinations[0]);
        let recorder = ReportRecorder::new();
        let opened = self.open_other_host(&mut ends, &mut options, place, &(*reporter, &recorder));
        let mut remote = match opened {
            Ok(remote) => remote,
            Err(error) => {
                let failure = error.downcast()?;
                held.forget();
                recorder.write(&self.args.report, [source, to], Err(&failure));
                return Ok(self.results.failed(to, &failure));
            }
        };
        self.confine(&ends, &options, remote.as_ref(), &held);
        let cancel = cancel_on_signals(SignalEffects::of_copy(self.args, &self.ends()))?;
        drop(held);
        let [destination] = &ends.destinations[..] else {
            return Ok(self.clones(&ends, &options, &cancel));
        };
        let observer = (&(*reporter, notifier), &recorder);
        let copy =
            |observer: &dyn Observer| plan::copy(&ends.source, destination, &options, &cancel, observer);
        let observed = || self.args.observability.observe(&options, &cancel, &observer, copy);
        let copied = match &mut remote {
            Some(remote) => remote.copy(observed),
            None => observed(),
        };
        notifier.stopping();
        let mut copied = copied?;
        if let Some(remote) = remote {
            remote.close(&mut copied, reporter);
        }
        reporter.finish();
        let exit = self.results.report(to, &copied);
        recorder.write(&self.args.report, [source, to], copied.as_ref());
        Ok(exit)
    }

    /// Has another host send or receive the guest, if it is an end of the copy. The error is a [`UsageError`]
    /// or a [`Failure`](plan::Failure).
    fn open_other_host(
        &self,
        ends: &mut CopyEnds,
        options: &mut CopyRequest,
        place: &PlaceOptions<'_>,
        observer: &dyn Observer,
    ) -> Result<Option<RemoteCopy>> {
        Ok(Some(match (self.results.source, self.destinations) {
            (Endpoint::Ssh(end), _) => {
                let remote = RemoteCopy::open_source(end, place, &ends.destinations[0], options, observer)?;
                ends.source = Source::Stream(remote.address.clone());
                remote
            }
            (_, [Endpoint::Ssh(end)]) => {
                let Source::Qmp(socket) = &ends.source else {
                    let text =
                        format!("{end} as DEST needs a qmp: SOURCE; copy an image there as a file (scp)");
                    bail!(UsageError(text));
                };
                let remote = RemoteCopy::open(end, place, socket, options, observer)?;
                ends.destinations.push(Destination::Stream(remote.address.clone()));
                remote
            }
            _ => return Ok(None),
        }))
    }

    /// Confines this process to what a copy between these endpoints needs.
    fn confine(
        &self,
        CopyEnds { source, destinations }: &CopyEnds,
        options: &CopyRequest,
        remote: Option<&RemoteCopy>,
        held: &HeldSignals,
    ) {
        let args = self.args;
        let Some(mut policy) =
            sandbox::policy_of_copy(source, destinations, options, args.observability.qmp.as_deref())
        else {
            return args.sandbox.log_unconfined(sandbox::EXEC_UNCONFINED);
        };
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

    /// Copies to several destinations at once.
    fn clones(&self, ends: &CopyEnds, options: &CopyRequest, cancel: &Cancel) -> Exit {
        let reporters = Reporter::several(&self.results.reporter.output, self.destinations);
        let results = Results { destinations: Destinations::Several, ..self.results };
        let targets = ends.destinations.iter().zip(&reporters);
        let targets: Vec<_> = targets
            .map(|(destination, reporter)| CloneTarget { destination, observer: reporter, own: None })
            .collect();
        // The worst result.
        let exit = Mutex::new(Exit::Done);
        let ended = |index: usize, copied: &plan::CopyResult| {
            reporters[index].finish();
            // Locked during the report, so the lines of one destination are together.
            let mut exit = lock(&exit);
            *exit = (*exit).max(results.report(&self.destinations[index], copied));
        };
        let clones =
            plan::Clones { targets: &targets, options, cancel, observer: results.reporter, ended: &ended };
        match plan::copy_to_all(&ends.source, &clones) {
            Ok(outcomes) => {
                let exit = *lock(&exit);
                results.all(&outcomes, exit);
                exit
            }
            Err(failure) => results.refused(&failure),
        }
    }
}
