//! `towline run` and `towline fork`: guests from an image, or from a guest that runs, in QEMUs that
//! `towline_control::run` starts and supervises.

mod report;

use std::time::Instant;

use anyhow::Result;
use towline_channel::Cancel;
use towline_control::plan::Observer as _;
use towline_control::run::{
    self, CommandLineTrust, Disks, Download, Error, FirstState, GuestStart, ImageLocation, MemoryRequest,
    Networks, Notice, PrepareContext, RunOptions, Running,
};
use towline_launch::{HostArguments, Lifetime, RuntimeRoot};

use crate::args::{ForkArgs, RunArgs, StartArgs};
use crate::command_line::quoted;
use crate::ctl;
use crate::endpoint::Endpoint;
use crate::errors;
use crate::events::{FinalEvent, InterimEvent, Reason};
use crate::exit::{Exit, UsageError};
use crate::progress::Reporter;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::units::size;
use report::{RunReport, supervise};

/// The QEMU that runs an image, unless another one is given.
const QEMU: &str = "qemu-system-x86_64";

/// Runs `run`.
pub(crate) fn run(args: &RunArgs) -> Result<Exit> {
    start(&args.image, &args.start, || of_image(args), &supervise)
}

/// Runs `fork`.
pub(crate) fn fork(args: &ForkArgs) -> Result<Exit> {
    let socket = ctl::socket(&args.guest, &RuntimeRoot::of_user())?.into_owned();
    let options = || {
        let base = started(&args.start, ImageLocation::Guest(socket.clone()));
        let fork = || format!("{}-fork", args.guest.to_str()?).parse().ok();
        Ok(RunOptions {
            name: base.name.clone().or_else(fork),
            disks: Disks::Overlays(args.overlay_dir.clone()),
            networks: if args.same_network { Networks::Same } else { Networks::Separate },
            state: if args.paused { FirstState::Paused } else { FirstState::Running },
            // It is the command line of a QEMU that runs on this host.
            trust: CommandLineTrust::Trusted,
            ..base
        })
    };
    start(&Endpoint::Qmp(socket.clone()), &args.start, options, &supervise)
}

/// Looks after guests that run, until they have ended.
type LookAfter<'a> = dyn Fn(Running, &Cancel, &Reporter) -> Result<Exit> + 'a;

/// Starts guests of `source`, and reports what becomes of them; `look_after` gets those that are not detached.
fn start(
    source: &Endpoint,
    args: &StartArgs,
    options: impl FnOnce() -> Result<RunOptions, UsageError>,
    look_after: &LookAfter<'_>,
) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    let report = RunReport { source, args, reporter: &reporter, begun: Instant::now() };
    attempt(&report, options, look_after).or_else(|error| Ok(refused(&reporter, &error.downcast()?)))
}

fn attempt(
    report: &RunReport<'_>,
    options: impl FnOnce() -> Result<RunOptions, UsageError>,
    look_after: &LookAfter<'_>,
) -> Result<Exit> {
    let RunReport { source, args, reporter, .. } = *report;
    args.report.check(&[source]).map_err(UsageError)?;
    let options = options()?;
    let cancel = &cancel_on_signals(SignalEffects {
        first: "stopping; the guests are ended, and what they were started from is unchanged",
        second: Some(if args.detach {
            "the QEMUs that it has started remain, see `towline ps`"
        } else {
            "its QEMUs are killed"
        }),
    })?;
    let downloading = &|download| reporter.line(&download_text(&download));
    let prepared = run::prepare(&options, PrepareContext { cancel, observer: reporter, downloading })?;
    prepared.notices.iter().for_each(|notice| reporter.notice(&notice_text(notice)));
    let running = prepared.start(cancel, &|guest| starting(reporter, guest))?;
    let count = running.guests().len();
    let copied = report.restore(&running, cancel);
    let restored = report.restored(&running, &copied).min(Exit::Failed);
    let Some(running) = running.settle(&copied, reporter) else {
        // Every guest is in the image, whatever was started.
        return Ok(reporter.result(FinalEvent::Run { guests: 0 }, restored));
    };
    let ended = if args.detach {
        running.detach();
        Exit::Done
    } else {
        look_after(running, cancel, reporter)?
    };
    Ok(reporter.result(FinalEvent::Run { guests: count }, ended.max(restored)))
}

/// Reports that no guest was started.
fn refused(reporter: &Reporter, error: &Error) -> Exit {
    let (exit, reason) = classified(error);
    reporter.failed(&errors::worded(error), reason, exit)
}

/// Returns the exit status, and the identifier of the reason.
fn classified(error: &Error) -> (Exit, Reason) {
    match error {
        Error::NoCommandLine { .. }
        | Error::NoCacheDirectory
        | Error::NoStores { .. }
        | Error::Name(_)
        | Error::Variable(_) => (Exit::Usage, Reason::Usage),
        Error::Image(_) => (Exit::Failed, Reason::Image),
        Error::CommandLine(_) | Error::Refused(_) => (Exit::Failed, Reason::CommandLine),
        _ => (Exit::Failed, Reason::Other),
    }
}

/// A guest that is run from an image of a record.
pub(crate) struct RecordedRun {
    pub(crate) image: ImageLocation,
    pub(crate) start: StartArgs,
    pub(crate) is_trusted: bool,
    pub(crate) disks: Disks,
    pub(crate) networks: Networks,
}

impl RecordedRun {
    /// Starts it, and reports what becomes of it.
    pub(crate) fn start(self, look_after: &LookAfter<'_>) -> Result<Exit> {
        let Self { image, start: args, is_trusted, disks, networks } = self;
        let source = Endpoint::from(image.clone());
        let options = || {
            let trust = if is_trusted { CommandLineTrust::Trusted } else { CommandLineTrust::Untrusted };
            Ok(RunOptions { disks, networks, trust, ..started(&args, image) })
        };
        start(&source, &args, options, look_after)
    }
}

/// Options of guests that are started from this place.
fn started(args: &StartArgs, image: ImageLocation) -> RunOptions {
    // A fork has that of its guest.
    let qemu = if matches!(image, ImageLocation::Guest(_)) { "" } else { QEMU };
    RunOptions {
        name: args.name.clone(),
        count: args.count,
        lifetime: if args.detach { Lifetime::Detached } else { Lifetime::WithOwner },
        host: HostArguments {
            binary: args.qemu.clone().unwrap_or_else(|| qemu.into()),
            // Of relative paths of the user's arguments.
            working_directory: std::env::current_dir().ok(),
            settings: args.set.clone(),
            ..HostArguments::default()
        },
        ..RunOptions::of_one(image)
    }
}

fn of_image(args: &RunArgs) -> Result<RunOptions, UsageError> {
    let image = match &args.image.resolved().map_err(UsageError)? {
        Endpoint::Image(path) => ImageLocation::File(path.clone()),
        Endpoint::Store(location) => ImageLocation::Store(location.clone()),
        Endpoint::Secret(why) => return Err(UsageError(why.clone())),
        Endpoint::Qmp(path) => {
            let path = path.display();
            return Err(UsageError(format!(
                "qmp:{path} is not an image; fork its guest (`towline fork qmp:{path}`), or copy it to an image first: towline copy \
                 qmp:{path} IMAGE"
            )));
        }
        other => {
            return Err(UsageError(format!(
                "{other} is not an image; copy the guest to one first: towline copy {other} IMAGE"
            )));
        }
    };
    let base = started(&args.start, image);
    Ok(RunOptions {
        memory: match args {
            RunArgs { copy: true, .. } => MemoryRequest::Copied,
            RunArgs { postcopy: true, .. } => MemoryRequest::Postcopy,
            RunArgs { share: true, .. } => MemoryRequest::Mapped,
            _ => MemoryRequest::MappedOrCopied,
        },
        disks: if args.overlay { Disks::Overlays(args.overlay_dir.clone()) } else { Disks::Own },
        cache_directory: args.cache_dir.clone(),
        trust: if args.trust_command_line { CommandLineTrust::Trusted } else { CommandLineTrust::Untrusted },
        host: HostArguments { arguments: args.arguments.clone(), ..base.host },
        ..base
    })
}

/// Reports the command that is about to start a QEMU.
fn starting(reporter: &Reporter, guest: &GuestStart) {
    let words = guest.shown_command();
    let command = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    reporter.event(InterimEvent::Starting { name: guest.name.as_str(), command });
    let quoted: Vec<_> = words.iter().map(|word| quoted(word)).collect();
    reporter.line(&quoted.join(" "));
}

/// A notice for people, with the option that changes it.
fn notice_text(notice: &Notice) -> String {
    match notice {
        Notice::NetworkCard => {
            "the guest has a network card: it sends with the stored guest's MAC address, as does every other guest of this image; keep them \
             in networks of their own, or change it in the guest"
                .into()
        }
        Notice::LinksDown(networks) => format!(
            "network {} is connected to nothing, and its link is down: a fork has the addresses of its guest; --set gives it a network",
            networks.join(", ")
        ),
        Notice::MemoryIsCopied(reason) => format!("memory is copied, not mapped from the image: {reason}"),
        Notice::Balloon => {
            "the guest has a balloon, which gives nothing back to this host: the memory that it was saved with is the image's file; \
             run it with --copy for that"
                .into()
        }
        Notice::IsolatedNetwork(key) => {
            let setting =
                key.as_ref().map_or("-- -nic user".into(), |key| format!("--set {key}.restrict=off"));
            format!(
                "QEMU's own network is isolated (restrict=on), since the image could come from anyone; {setting} opens it"
            )
        }
        Notice::NamesEndWithSession => {
            "the guest's name is lost when you log out, though it runs on: `loginctl enable-linger` keeps it, or set XDG_RUNTIME_DIR \
             to a directory that stays"
                .into()
        }
    }
}

fn download_text(download: &Download) -> String {
    match download {
        Download::Copies { image, path, bytes } => format!(
            "{image} is copied to {} first, {} (--postcopy runs the guest meanwhile)",
            path.display(),
            size(*bytes)
        ),
        Download::Awaits { path } => format!("{} is made by another towline", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_option_that_changes_them() {
        let name = "a b".parse::<towline_launch::GuestName>().unwrap_err();
        for (error, remedy, exit) in [
            (Error::NoCommandLine { image: "a.img".into() }, "after --", Exit::Usage),
            (Error::NoCacheDirectory, "--cache-dir", Exit::Usage),
            (Error::Name(name), "--name", Exit::Usage),
            (Error::Cache { directory: "a".into(), reason: "b".into() }, "--cache-dir", Exit::Failed),
            (Error::NotMapped { image: "a".into(), reason: "b".into() }, "leave --share out", Exit::Failed),
        ] {
            assert!(errors::worded(&error).contains(remedy) && classified(&error).0 == exit, "{error}");
        }
    }
}
