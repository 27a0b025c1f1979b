//! `towline check`.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use towline_channel::{Address, Cancel, PEER_TIMEOUT};
use towline_compat::{ConfiguredBy, Finding, Report, Severity, Verdict};
use towline_control::check::{self, CheckEnd, PlannedTransfer};
use towline_control::plan;
use towline_control::plan::Observer as _;
use towline_control::remote::{DiskPolicy, Place, SessionTimeouts};

use crate::args::{CheckArgs, Via};
use crate::endpoint::{Endpoint, SshEndpoint};
use crate::events::{Checked, Compared, FinalEvent};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::remote::{self, PlaceOptions};
use crate::signals::HeldSignals;
use crate::{console, errors};

/// Time limit of a QEMU that is being started, as `copy` has it.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command.
pub(crate) fn run(args: &CheckArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    wait_for_sockets(args)?;
    NoVerdict::reported(&reporter, compare(&reporter, args))
}

fn compare(reporter: &Reporter, args: &CheckArgs) -> Result<Exit> {
    let source = end(&args.source)?;
    if let Some(path) = &args.facts_out {
        let facts = source.facts().map_err(|error| NoVerdict::of(&error))?;
        check::write_facts(path, &facts).with_context(|| path.display().to_string())?;
        let (source, file) = (args.source.to_string(), path.display().to_string());
        reporter.line(&format!("{source}: facts written to {file}"));
        return Ok(reporter.result(FinalEvent::Facts { source, file }, Exit::Done));
    }
    let Some(to) = &args.destination else { return Ok(Exit::Usage) };
    if let (Endpoint::Qmp(socket), Endpoint::Ssh(end)) = (&args.source, to) {
        return on_host(reporter, args, end, socket);
    }
    let planned = PlannedTransfer::postcopy_if(args.postcopy);
    let report = check::check(&source, &end(to)?, planned).map_err(|error| NoVerdict::of(&error))?;
    Ok(report_verdict(reporter, args, to, &report))
}

/// Waits for a QEMU that is being started.
pub(crate) fn wait_for_sockets(args: &CheckArgs) -> Result<()> {
    let (cancel, notice) = (Cancel::new()?, |text: &str| console::notice(text));
    for end in [Some(&args.source), args.destination.as_ref()].into_iter().flatten() {
        if let Endpoint::Qmp(socket) = end {
            plan::wait_for_socket(socket, SOCKET_TIMEOUT, &cancel, &notice)?;
        }
    }
    Ok(())
}

/// Reason for the lack of a verdict.
#[derive(Debug, thiserror::Error)]
#[error("no verdict")]
pub(crate) enum NoVerdict {
    Usage(String),
    Unknown(String),
}

impl NoVerdict {
    pub(crate) fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Unknown(errors::worded(error))
    }

    /// Reports the lack of a verdict, if that is the result of a check.
    pub(crate) fn reported(reporter: &Reporter, checked: Result<Exit>) -> Result<Exit> {
        checked.or_else(|error| Ok(error.downcast::<Self>()?.report(reporter)))
    }

    fn report(&self, reporter: &Reporter) -> Exit {
        let (exit, text) = match self {
            Self::Usage(text) => (Exit::Usage, text),
            Self::Unknown(text) => (Exit::CouldNotTell, text),
        };
        let verdict = matches!(self, Self::Unknown(_)).then_some(Verdict::CouldNotTell);
        console::error(text);
        reporter.result(FinalEvent::Checked(Checked::Unknown { verdict, error: text }), exit)
    }
}

/// Converts an endpoint of the command line.
fn end(endpoint: &Endpoint) -> Result<CheckEnd, NoVerdict> {
    Ok(match endpoint {
        Endpoint::Qmp(path) => CheckEnd::Qmp(path.clone()),
        Endpoint::Image(path) => CheckEnd::Image(path.clone()),
        Endpoint::Facts(path) => CheckEnd::Facts(path.clone()),
        Endpoint::Attribute(path) => CheckEnd::Attribute(path.clone()),
        Endpoint::Control(path) => CheckEnd::Control(path.clone()),
        Endpoint::Stream(Address::Exec(command)) => CheckEnd::Command(command.clone()),
        Endpoint::Stream(_) => {
            return Err(NoVerdict::Unknown(format!(
                "{endpoint}: a stream cannot be queried; record the facts there (`towline check --facts-out FILE qmp:PATH`), and compare with facts:FILE"
            )));
        }
        Endpoint::Store(_) => {
            return Err(NoVerdict::Unknown(format!(
                "{endpoint}: only an image in a file can be checked; copy it to a file first"
            )));
        }
        Endpoint::Ssh(end) => {
            return Err(NoVerdict::Usage(format!("{end} is compared with a qmp: SOURCE")));
        }
        Endpoint::Recorded(_) => end(&endpoint.resolved().map_err(NoVerdict::Usage)?)?,
        Endpoint::Secret(why) => return Err(NoVerdict::Usage(why.clone())),
        Endpoint::Memory(_) | Endpoint::Null => {
            return Err(NoVerdict::Usage(format!("{endpoint} takes any guest: there is nothing to check")));
        }
    })
}

/// Checks a guest and its place on another host.
fn on_host(reporter: &Reporter, args: &CheckArgs, end: &SshEndpoint, socket: &Path) -> Result<Exit> {
    if let Place::File(_) | Place::Store(_) = end.place {
        let text = format!("{end}: an image takes any guest: there is nothing to check");
        return Err(NoVerdict::Usage(text).into());
    }
    // Files beside the disks, and the QEMU there, are removed.
    let held = HeldSignals::hold()?;
    let planned = PlannedTransfer::postcopy_if(args.postcopy);
    let options = PlaceOptions {
        planned,
        ..place_options(args, planned.lanes(), args.host.disk_policy(), held.arrived())
    };
    let prepared = match remote::prepare(end, &options, socket) {
        Ok(prepared) => prepared,
        Err(error) => {
            held.forget();
            return Ok(NoVerdict::of(&error).report(reporter));
        }
    };
    let report = prepared.guest.compare(&prepared.fit, options.lanes);
    reporter.hosts(&prepared.host.hosts_of(&prepared.guest, &prepared.fit));
    remote::disk_remedy(&prepared.fit, args.host.disk_policy()).iter().for_each(|text| reporter.notice(text));
    // The QEMU there has ended.
    drop(prepared);
    Ok(report_verdict(reporter, args, &Endpoint::Ssh(end.clone()), &report))
}

/// Options of the place that is checked.
pub(crate) fn place_options(
    args: &CheckArgs,
    lanes: usize,
    disks: DiskPolicy,
    interrupt: Arc<OwnedFd>,
) -> PlaceOptions<'_> {
    PlaceOptions {
        ssh: &args.host.ssh.ssh,
        host: Some(&args.host),
        lanes,
        disks,
        via: Via::Auto,
        planned: PlannedTransfer::Precopy,
        timeouts: SessionTimeouts { connect: SOCKET_TIMEOUT, peer: PEER_TIMEOUT },
        interrupt,
    }
}

/// Reports a verdict.
fn report_verdict(reporter: &Reporter, args: &CheckArgs, to: &Endpoint, report: &Report) -> Exit {
    let (verdict, by_hand) = (report.verdict(ConfiguredBy::Towline), report.verdict(ConfiguredBy::ByHand));
    let exit = exit(verdict);
    let compared = Checked::Compared(Compared::new([&args.source, to], report));
    reporter.result(FinalEvent::Checked(compared), exit);
    reporter.line(&format!("{} to {to}: {verdict}", args.source));
    report.of(ConfiguredBy::Towline).for_each(|finding| line(reporter, finding));
    if by_hand != verdict {
        reporter.line(&format!("by QEMU's own `migrate`, with the present settings: {by_hand}"));
        let own = report
            .of(ConfiguredBy::ByHand)
            .filter(|finding| finding.configured_by == Some(ConfiguredBy::ByHand));
        own.for_each(|finding| line(reporter, finding));
    }
    exit
}

/// Exit status of a verdict.
pub(crate) fn exit(verdict: Verdict) -> Exit {
    match verdict {
        Verdict::Yes | Verdict::YesWithNotes => Exit::Done,
        Verdict::No => Exit::Failed,
        Verdict::CouldNotTell => Exit::CouldNotTell,
    }
}

/// Prints a finding.
pub(crate) fn line(reporter: &Reporter, finding: &Finding) {
    let word = match finding.severity {
        Severity::No => "no",
        Severity::Unknown => "unknown",
        Severity::Note => "note",
    };
    reporter.line(&format!("  {word:<8} {:<18} {}", finding.rule, finding.text));
    if !finding.remedy.is_empty() {
        reporter.line(&format!("  {:<8} {:<18} → {}", "", "", finding.remedy));
    }
}
