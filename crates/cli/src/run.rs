//! `towline run`: a guest from an image, in a QEMU that is started here and supervised until it ends.
//!
//! ```text
//!   image ── recorded command line ─► allow-list, --set ─► memory mapped from the image ─► in use here? ─► names ─► overlays ─► start
//!     │                                                                                                       ─► restore
//!     └──────────────────────────── locked (shared) until the last guest has ended ─────────────────────────► supervise, or detach
//! ```

mod image;
#[cfg(feature = "store")]
mod materialised;
mod rejection;
mod report;
mod request;
mod start;
mod supervise;

use std::panic::resume_unwind;
use std::sync::atomic::Ordering;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use anyhow::Result;
use towline_channel::Cancel;
use towline_control::plan::{
    self, CloneTarget, Clones, CopyRequest, Destination, Observer, PostcopyStart, RequestedPages, Task,
    TransferOptions,
};
use towline_launch::{CreatedOverlay, HostArguments, QemuVersion, RuntimeRoot};

use crate::args::RunArgs;
use crate::endpoint::Endpoint;
use crate::exit::Exit;
use crate::outcome::{Destinations, Results, Verb};
use crate::progress::Reporter;
use crate::report::{GuestReport, ReportRecorder, write_several};
use crate::signals::{SignalEffects, cancel_on_signals};
use image::RunImage;
use rejection::Rejection;
use report::{RunReport, RunningObserver, StartedGuest, finished, rejected};
use request::{GuestStart, MemoryOrigin};
use start::{Claimed, start};
use supervise::{Guests, supervise};

/// Runs the command.
pub(crate) fn run(args: &RunArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    match attempt(args, &reporter) {
        Ok(Ok(exit)) => Ok(exit),
        Ok(Err(rejection)) => Ok(rejected(&reporter, &rejection)),
        Err(error) => Ok(rejected(&reporter, &Rejection::refused(&crate::errors::text(&error)))),
    }
}

fn attempt(args: &RunArgs, reporter: &Reporter) -> Result<Result<Exit, Rejection>> {
    if let Err(text) = args.report.check(&[&args.image]) {
        return Ok(Err(Rejection::usage(&text)));
    }
    let begun = Instant::now();
    let cancel = cancel_on_signals(signal_effects(args))?;
    let host = HostArguments {
        binary: args.qemu.clone(),
        working_directory: std::env::current_dir().ok(),
        ..HostArguments::default()
    };
    // Only memory that is mapped depends on it.
    let maps = !args.copy && !args.postcopy;
    let (image, version) = thread::scope(|scope| {
        // The binary runs for its version while a store is waited for.
        let version = maps.then(|| scope.spawn(|| QemuVersion::of_binary(&host)));
        let image = RunImage::open_or_download(args, &cancel, reporter);
        (image, version.map(join))
    });
    let mut image = match image {
        Ok(image) => image,
        Err(rejection) => return Ok(Err(rejection)),
    };
    let version = version.transpose()?;
    let (starts, memory) = match request::guests(args, &image, version) {
        Ok(requested) => requested,
        Err(rejection) => return Ok(Err(rejection)),
    };
    notices(args, &starts, &memory, reporter);
    let name = image.name();
    let report = RunReport { reporter, begun, memory: &memory, image: &name };
    let claimed = Claimed::of(&starts)?;
    // Only the run that has a name makes the disks of that name.
    let overlays = create_overlays(&starts)?;
    let guests = start(args, &image, claimed, &cancel, &report)?;
    let count = guests.started().len();
    let restored = restore(args, &mut image, &starts, &guests, &cancel, &report);
    if !restored.has_memory_to_come && restored.exit != Exit::Done {
        keep_overlays_of_run(overlays, &starts, &guests, reporter);
        drop(guests);
        // Every guest is in the image, whatever was started.
        return Ok(Ok(finished(reporter, 0, restored.exit.min(Exit::Failed))));
    }
    // From here on they are the guests' disks, with what these have written.
    overlays.into_iter().flatten().for_each(CreatedOverlay::keep);
    let exit = if args.detach {
        guests.detach();
        Exit::Done
    } else {
        let mapped = Some(&image).filter(|_| memory == MemoryOrigin::Mapped);
        supervise(guests, mapped, &cancel, reporter)?
    };
    Ok(Ok(finished(reporter, count, exit.max(restored.exit.min(Exit::Failed)))))
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

fn signal_effects(args: &RunArgs) -> SignalEffects {
    SignalEffects {
        first: "stopping; the guests are ended, and the image is as it was",
        second: Some(if args.detach {
            "the QEMUs that it has started remain, see `towline ps`"
        } else {
            "its QEMUs are killed"
        }),
    }
}

/// Keeps the overlays of guests that may have run: they have what those wrote. The others are removed.
fn keep_overlays_of_run(
    overlays: Vec<Vec<CreatedOverlay>>,
    starts: &[GuestStart],
    guests: &Guests,
    reporter: &Reporter,
) {
    for ((overlays, start), guest) in overlays.into_iter().zip(starts).zip(guests.started()) {
        if !guest.has_run.load(Ordering::Relaxed) {
            continue;
        }
        overlays.into_iter().for_each(CreatedOverlay::keep);
        for overlay in &start.overlays {
            reporter.notice(&format!(
                "{} may have run: overlay {} is kept",
                start.name,
                overlay.path.display()
            ));
        }
    }
}

/// Reports what the user should know before the guests start.
fn notices(args: &RunArgs, starts: &[GuestStart], memory: &MemoryOrigin, reporter: &Reporter) {
    if let [start] = starts
        && request::has_card(&start.command_line)
    {
        reporter.notice(
            "the guest has a network card: it sends with the stored guest's MAC address, as does every other guest of this image; keep them \
             in networks of their own, or change it in the guest",
        );
    }
    if let MemoryOrigin::Copied(Some(reason)) = memory {
        reporter.notice(&format!("memory is copied, not mapped from the image: {reason}"));
    }
    let Some(start) = starts.first() else { return };
    if *memory == MemoryOrigin::Mapped && request::has_balloon(&start.command_line) {
        reporter.notice(
            "the guest has a balloon, which gives nothing back to this host: the memory that it was saved with is the image's file; \
             run it with --copy for that",
        );
    }
    if !args.trust_command_line {
        for setting in request::isolated_networks(&start.command_line) {
            reporter.notice(&format!(
                "QEMU's own network is isolated (restrict=on), since the image could come from anyone; {setting} opens it"
            ));
        }
    }
    if args.detach && RuntimeRoot::of_user().ends_with_session() {
        reporter.notice(
            "the guest's name is lost when you log out, though it runs on: `loginctl enable-linger` keeps it, or set XDG_RUNTIME_DIR \
             to a directory that stays",
        );
    }
}

/// Makes the overlays of all guests, in their order. They are removed with the result.
fn create_overlays(starts: &[GuestStart]) -> Result<Vec<Vec<CreatedOverlay>>> {
    let of_guest = |start: &GuestStart| {
        start.overlays.iter().map(|overlay| overlay.create(&start.host)).collect::<Result<Vec<_>, _>>()
    };
    Ok(starts.iter().map(of_guest).collect::<Result<_, _>>()?)
}

/// The copy that brings the guests into their QEMUs.
fn task(args: &RunArgs) -> Task {
    let (transfer, run) = (TransferOptions::default(), Some(true));
    if args.postcopy {
        let start = PostcopyStart::Copy { run };
        return Task::Postcopy {
            transfer,
            start,
            requested_pages: RequestedPages::MainChannel,
            record_working_set: true,
        };
    }
    Task::Copy { transfer, run, resume: false, base: None }
}

/// Result of the copy to all guests.
struct Restored {
    exit: Exit,
    /// True if all that failed wait for the rest of their memory, which another towline can send while these QEMUs live.
    has_memory_to_come: bool,
}

/// Returns true if a guest whose copy failed may have run.
fn may_have_run(guest: &plan::GuestAfterFailure) -> bool {
    matches!(guest, plan::GuestAfterFailure::NeedsAttention(_))
}

/// Writes the page of `--report`.
fn write_report(
    args: &RunArgs,
    started: &[StartedGuest],
    recorders: &[ReportRecorder],
    copied: &[plan::CopyResult],
    report: &RunReport<'_>,
) {
    if let ([guest], [recorder], [copied]) = (started, recorders, copied) {
        let to = Endpoint::Qmp(guest.qemu.qmp_path());
        return recorder.write(&args.report, [&args.image, &to], copied.as_ref());
    }
    let guests = started.iter().zip(recorders).zip(copied).map(|((guest, recorder), copied)| GuestReport {
        name: guest.qemu.directory().name().as_str(),
        recorder,
        copied: copied.as_ref(),
    });
    let guests: Vec<_> = guests.collect();
    write_several(&args.report, &args.image, report.begun.elapsed(), &guests);
}

/// Restores the image into all QEMUs, and runs the guests.
fn restore(
    args: &RunArgs,
    image: &mut RunImage,
    starts: &[GuestStart],
    guests: &Guests,
    cancel: &Cancel,
    report: &RunReport<'_>,
) -> Restored {
    let request = CopyRequest { requires_mapped_memory: args.share, ..CopyRequest::new(task(args)) };
    let started = guests.started();
    let endpoints: Vec<Endpoint> = started.iter().map(|guest| Endpoint::Qmp(guest.qemu.qmp_path())).collect();
    let names: Vec<_> = starts.iter().map(|start| &start.name).collect();
    let destinations: Vec<_> = started.iter().map(|guest| Destination::Qmp(guest.qemu.qmp_path())).collect();
    let (reporter, reporters) = Reporter::several(&args.output, &names);
    let results = Results::of(Verb::Copied, &reporter, &args.image);
    let results = Results { destinations: Destinations::Several, ..results };
    let running: Vec<_> = started.iter().map(|guest| RunningObserver { report, guest }).collect();
    let shown: Vec<_> = reporters.iter().zip(&running).collect();
    let recorders: Vec<_> = started.iter().map(|_| ReportRecorder::of_started(report.begun)).collect();
    let observers: Vec<_> = shown.iter().zip(&recorders).collect();
    let targets: Vec<_> = destinations
        .iter()
        .zip(&observers)
        .zip(started)
        .zip(starts)
        .map(|(((destination, observer), guest), start)| CloneTarget {
            destination,
            observer: observer as &dyn Observer,
            started: guest.monitor.as_ref(),
            reflink: start.reflink.as_ref(),
        })
        .collect();
    let ended = |index: usize, _: &plan::CopyResult| reporters[index].finish();
    let clones = Clones { targets: &targets, options: &request, cancel, observer: &reporter, ended: &ended };
    let copied = match image.copy_to_all(&clones) {
        Ok(copied) => copied,
        Err(failure) => {
            return Restored { exit: results.refused(&failure), has_memory_to_come: false };
        }
    };
    write_report(args, started, &recorders, &copied, report);
    let mut exit = Exit::Done;
    let mut failures = copied.iter().filter_map(|copied| copied.as_ref().err()).peekable();
    let has_memory_to_come =
        failures.peek().is_some() && failures.all(|failure| failure.guest.lacks_memory());
    for ((copied, to), guest) in copied.iter().zip(&endpoints).zip(started) {
        if copied.as_ref().err().is_some_and(|failure| may_have_run(&failure.guest)) {
            guest.has_run.store(true, Ordering::Relaxed);
        }
        match copied {
            Ok(report) if args.output.json => results.done(to, report),
            Ok(_) => {}
            Err(failure) => exit = exit.max(results.failed(to, failure)),
        }
    }
    Restored { exit, has_memory_to_come }
}
