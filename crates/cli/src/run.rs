//! `towline run`: a guest from an image, in a QEMU that is started here and supervised until it ends.
//!
//! ```text
//!   image ── recorded command line ─► allow-list, --set ─► memory mapped from the image ─► in use here? ─► start ─► restore ─► supervise
//!     └──────────────────────────── locked (shared) until the last guest has ended ────────────────────────────────────────────┘
//! ```

mod request;
mod supervise;

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_control::in_place;
use towline_control::plan::{self, CloneTarget, Destination, Request, Source, Task, TransferOptions};
use towline_control::qemu::Qemu;
use towline_image::Image;
use towline_launch::{HostArguments, Incoming, Launcher, QemuVersion, RunningQemu, RuntimeRoot};

use crate::args::{Output, RunArgs};
use crate::command_line::quoted;
use crate::console;
use crate::endpoint::Endpoint;
use crate::exit::Exit;
use crate::outcome::{Destinations, Results, Verb};
use crate::progress::Reporter;
use crate::signals::cancel_on_signals;
use request::{GuestStart, Memory, Rejection};
use supervise::{end, supervise};

const OUTPUT: Output = Output { json: false, quiet: false };

/// Runs the command.
pub(crate) fn run(args: &RunArgs) -> Result<Exit> {
    let Endpoint::Image(path) = &args.image else {
        console::error(&format!(
            "run needs an image in a file; copy it first: towline copy {} IMAGE",
            args.image
        ));
        return Ok(Exit::Usage);
    };
    let reporter = Reporter::new(&OUTPUT);
    let image = Image::open(path)?;
    // Held until the last guest has ended: no towline replaces the image meanwhile.
    let _lock = locked(&image)?;
    let host = HostArguments {
        binary: args.qemu.clone(),
        working_directory: std::env::current_dir().ok(),
        ..HostArguments::default()
    };
    let version = QemuVersion::of_binary(&host)?;
    let root = RuntimeRoot::of_user();
    let (starts, memory) = match request::guests(args, &image, version) {
        Ok(requested) => requested,
        Err(Rejection { exit, text }) => {
            console::error(&text);
            return Ok(exit);
        }
    };
    if let Memory::Copied(Some(reason)) = &memory {
        console::notice(&format!("memory is copied, not mapped from the image: {reason}"));
    }
    let cancel = cancel_on_signals("the guests are ended, and the image is as it was")?;
    let guests = start(path, &starts, &root, &cancel, &reporter)?;
    if args.share {
        check_shared(&guests, &image)?;
    }
    let exit = restore(args, path, &guests, &cancel);
    if exit != Exit::Done {
        end(guests);
        // Every guest is in the image, whatever was started.
        return Ok(exit.min(Exit::Failed));
    }
    for guest in &guests {
        reporter.line(&format!("{} runs, qmp:{}", guest.directory().name(), guest.qmp_path().display()));
    }
    supervise(guests, &cancel, &reporter)
}

/// The image, locked as its readers do.
fn locked(image: &Image) -> Result<File> {
    let file = image.reopen()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => {
            anyhow::bail!("image {} is being replaced by another towline; try again", image.path().display())
        }
        // A filesystem without locks has none that would be violated.
        _ => Ok(file),
    }
}

/// Starts the QEMUs. If one does not start, the others are ended.
fn start(
    image: &Path,
    starts: &[GuestStart],
    root: &RuntimeRoot,
    cancel: &Cancel,
    reporter: &Reporter,
) -> Result<Vec<RunningQemu>> {
    let mut guests = Vec::new();
    for start in starts {
        cancel.check()?;
        let mut launcher = Launcher::new(root.claim(&start.name)?);
        reporter.line(&shown(start));
        launcher.incoming = Incoming::Defer;
        launcher.image = Some(image.canonicalize().unwrap_or_else(|_| image.to_owned()));
        let started = launcher.start(&start.command_line, &start.host);
        guests.push(started.with_context(|| format!("guest {}", start.name))?);
    }
    Ok(guests)
}

/// The command, for people. The launcher adds its monitor, `-incoming`, `-sandbox` and `-name`.
fn shown(start: &GuestStart) -> String {
    let arguments = start.command_line.to_shown_arguments();
    let words = std::iter::once(start.host.binary.as_os_str()).chain(arguments.iter().map(AsRef::as_ref));
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

/// Fails if a QEMU does not map the image.
fn check_shared(guests: &[RunningQemu], image: &Image) -> Result<()> {
    for guest in guests {
        let mut qemu = Qemu::inspect(guest.qmp_path(), &towline_qmp::Options::default())?;
        let presence = in_place::of_image(&mut qemu, image)?;
        if presence.is_empty() {
            let sent = presence.sent().iter().find(|sent| sent.is_unexpected);
            let reason = sent.map_or_else(|| "unknown reason".into(), |sent| sent.reason.to_string());
            anyhow::bail!(
                "memory of {} is not mapped from {}: {reason}; leave --share out, and it is copied",
                guest.directory().name(),
                image.path().display()
            );
        }
    }
    Ok(())
}

/// Restores the image into all QEMUs, and runs the guests.
fn restore(args: &RunArgs, image: &Path, guests: &[RunningQemu], cancel: &Cancel) -> Exit {
    let task =
        Task::Copy { transfer: TransferOptions::default(), run: Some(true), resume: false, base: None };
    let (request, source) = (Request::new(task), Source::Image(image.to_owned()));
    let endpoints: Vec<Endpoint> = guests.iter().map(|guest| Endpoint::Qmp(guest.qmp_path())).collect();
    let destinations: Vec<_> = guests.iter().map(|guest| Destination::Qmp(guest.qmp_path())).collect();
    let (reporter, reporters) = Reporter::several(&OUTPUT, &endpoints);
    let results = Results::of(Verb::Copied, &reporter, &args.image);
    let results = Results { destinations: Destinations::Several, ..results };
    let targets: Vec<_> = destinations
        .iter()
        .zip(&reporters)
        .map(|(destination, reporter)| CloneTarget { destination, observer: reporter })
        .collect();
    let ended = |index: usize, _: &plan::CopyResult| reporters[index].finish();
    let copied = match plan::copy_to_all(&source, &targets, &request, cancel, &reporter, &ended) {
        Ok(copied) => copied,
        Err(failure) => return results.refused(&failure),
    };
    let failures =
        copied.iter().zip(&endpoints).filter_map(|(copied, to)| Some((copied.as_ref().err()?, to)));
    failures.map(|(failure, to)| results.failed(to, failure)).max().unwrap_or(Exit::Done)
}
