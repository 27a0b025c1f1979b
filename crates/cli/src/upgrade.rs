//! `towline upgrade`: another QEMU under a running guest.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use towline_compat::Verdict;
use towline_control::plan::{Failure, GuestAfterFailure, Observer, Source, SourceCategory, UpgradeMemory};
use towline_control::upgrade::{self, Cards, Prepared, Reversible, UpgradeOptions, Upgraded, Vsocks};
use towline_launch::RuntimeRoot;

use crate::args::UpgradeArgs;
use crate::command_line::quoted;
use crate::console;
use crate::endpoint::Endpoint;
use crate::errors;
use crate::events::{Checked, FailedPart, FinalEvent, Reason};
use crate::exit::{Exit, UsageError};
use crate::outcome::Results;
use crate::progress::Reporter;
use crate::report::ReportRecorder;
use crate::signals::{SignalEffects, cancel_on_signals};

/// Runs the command.
pub(crate) fn run(args: &UpgradeArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    let results = Results::of("upgraded", &reporter, &args.old);
    let Ok(Source::Qmp(old)) = args.old.source() else {
        let text = format!("upgrade replaces a running QEMU, and so needs a qmp: endpoint, not {}", args.old);
        bail!(UsageError(text));
    };
    let cancel = cancel_on_signals(SignalEffects {
        first: "cancelling; the guest stays in the old QEMU, unless the switchover is in progress",
        second: Some("the next upgrade, or `towline moves`, continues from there"),
    })?;
    args.report.check(&[&args.old]).map_err(UsageError)?;
    let options = UpgradeOptions {
        old,
        binary: args.qemu.clone(),
        settings: args.set.clone(),
        arguments: args.arguments.clone(),
        memory: if args.copy { UpgradeMemory::Copied } else { UpgradeMemory::InPlace },
        vsocks: if args.detach_vsock { Vsocks::Detached } else { Vsocks::Refused },
        cards: if args.with_devices { Cards::Shared } else { Cards::Refused },
        downtime_limit: Duration::from_millis(args.downtime_limit),
        root: RuntimeRoot::of_user(),
    };
    let prepared = upgrade::prepare(&options, &cancel);
    let new = match prepared.and_then(|prepared| start(prepared, &reporter)) {
        Ok(new) => new,
        Err(error) => return Ok(refused(&reporter, &error, &options.old)),
    };
    if args.dry_run {
        return Ok(match new.check(&cancel, &reporter) {
            Ok(()) => {
                reporter.finish();
                reporter.line(&format!("{} can be upgraded; the guest was not touched", args.old));
                let checked = Checked::Upgradable { source: args.old.to_string(), verdict: Verdict::Yes };
                reporter.result(FinalEvent::Checked(checked), Exit::Done)
            }
            Err(failure) => results.failed(&args.old, &failure),
        });
    }
    let recorder = ReportRecorder::new();
    let upgraded = new.switch_over(&cancel, &(&reporter, &recorder));
    reporter.finish();
    Ok(report(&results, &recorder, args, upgraded))
}

/// Prints the command, and starts it.
fn start(prepared: Prepared, reporter: &Reporter) -> Result<Reversible, upgrade::Error> {
    let command = prepared.shown_command();
    let words: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    reporter.line(&format!("replacing {} by", prepared.old()));
    reporter.line(&words.join(" "));
    prepared.start()
}

/// Reports an upgrade before which nothing was changed.
fn refused(reporter: &Reporter, error: &upgrade::Error, old: &Path) -> Exit {
    let text = errors::worded(error);
    let is_unreached =
        matches!(error, upgrade::Error::Qemu(_) | upgrade::Error::Proc { .. }) || upgrade::has_ended(old);
    let guest = if is_unreached { GuestAfterFailure::NOT_REACHED } else { GuestAfterFailure::SAFE };
    let (state, guest) = (guest.state(SourceCategory::Qemu), guest.sentence(SourceCategory::Qemu));
    let about = FailedPart::Guest { guest: &guest, guest_state: state, notes: &[] };
    let exit = reporter.failed_with(about, &text, Reason::UpgradeRefused, Exit::Failed);
    console::error(&format!("the guest: {guest}"));
    exit
}

/// Reports an upgrade, and writes the page of `--report`.
fn report(
    results: &Results<'_>,
    recorder: &ReportRecorder,
    args: &UpgradeArgs,
    upgraded: Result<Upgraded, Failure>,
) -> Exit {
    let upgraded = match upgraded {
        Ok(upgraded) => upgraded,
        Err(failure) => {
            recorder.write(&args.report, [&args.old, &"a new QEMU"], Err(&failure));
            return results.failed(&args.old, &failure);
        }
    };
    let new = Endpoint::Qmp(upgraded.monitor);
    recorder.write(&args.report, [&args.old, &new], Ok(&upgraded.report));
    let observer: &dyn Observer = results.reporter;
    for path in &upgraded.published {
        // A pidfile has none.
        let is_socket = path.metadata().is_ok_and(|found| found.file_type().is_socket());
        let clients = if is_socket { "; its clients were disconnected" } else { "" };
        observer.notice(&format!("{} is the new QEMU's{clients}", path.display()));
    }
    for text in &upgraded.not_published {
        observer.notice(&format!("a socket or pidfile of the new QEMU could not be renamed: {text}"));
    }
    results.done(&new, &upgraded.report);
    results.reporter.line(&format!("  new QEMU     {} (process {}), {new}", upgraded.name, upgraded.pid));
    Exit::Done
}
