//! `towline moves` and `towline resume`: moves that were interrupted at their switchover.

use std::time::Duration;

use anyhow::Result;
use towline_control::moves::{
    self, Finding, InterruptedPostcopy, ListedMove, OtherEnd, ResumeChoice, Resumed, Role,
};
use towline_control::plan::{self, SourceCategory};

use crate::args::{EndArg, MovesArgs, OtherEndArg, ResumeArgs};
use crate::console;
use crate::errors;
use crate::events::{FailedPart, FinalEvent, InterimEvent, Reason, UndecidedMove};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::signals::{SignalEffects, cancel_on_signals};

/// Time for which the other host of an interrupted postcopy is connected to: its towline may wait for a minute for a guest that it starts.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(300);

/// Runs `moves`.
pub(crate) fn run(args: &MovesArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let (listed, bad) = moves::list()?;
    for one in &listed {
        reporter.event(InterimEvent::Move(UndecidedMove::new(one)));
        print(&reporter, one);
    }
    for error in &bad {
        reporter.event(InterimEvent::Unreadable { error: error.to_string() });
        console::error(&error.to_string());
    }
    let exit = if bad.is_empty() { Exit::Done } else { Exit::Failed };
    reporter.result(FinalEvent::Moves { moves: listed.len(), unreadable: bad.len() }, exit);
    if listed.is_empty() && bad.is_empty() {
        reporter.line("no undecided moves of this user on this host");
    }
    Ok(exit)
}

fn print(reporter: &Reporter, listed: &ListedMove) {
    let record = &listed.record;
    let role = match record.role {
        Role::Source => "source",
        Role::Destination => "destination",
        Role::Both => "both ends",
    };
    reporter.line(&format!("{}  ({role} here)", record.id));
    reporter.line(&format!("  guest        {} to {}", record.source, record.destination));
    reporter.line(&format!("  since        {}", record.started_at()));
    reporter.line(&format!("  undecided    {}", listed.undecided()));
    for end in &listed.exited {
        reporter.line(&format!("  exited       {end}"));
    }
    for text in listed.advice() {
        reporter.line(&format!("  to do        {text}"));
    }
}

/// Runs `resume`.
pub(crate) fn resume(args: &ResumeArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    let chosen = chosen(args);
    let interrupted = if chosen.is_none() { moves::interrupted(&args.id) } else { Ok(None) };
    let resumed = match interrupted {
        Ok(Some(found)) => go_on(found, &reporter)?.map_or_else(|| moves::resume(&args.id, None), Ok),
        Ok(None) => moves::resume(&args.id, chosen),
        Err(error) => Err(error),
    };
    Ok(match resumed {
        Ok(resumed) => report(&reporter, &resumed),
        Err(error) => {
            let (reason, exit) = classified(&error);
            reporter.failed_with(FailedPart::Move { id: &args.id }, &error.to_string(), reason, exit)
        }
    })
}

/// Sends the rest of a guest that lacks memory on another host; `None`: that failed.
fn go_on(interrupted: InterruptedPostcopy, reporter: &Reporter) -> Result<Option<Resumed>> {
    let id = interrupted.id();
    let cancel = cancel_on_signals(SignalEffects {
        first: "no further attempt to connect to the other host, unless it is connected to: then the rest is sent",
        second: Some("the guest waits for the rest of its memory"),
    })?;
    Ok(match plan::go_on(interrupted, RECONNECT_TIMEOUT, &cancel, reporter) {
        Ok(_) => {
            let done = "the rest of the guest's memory is at its destination, and its source is ended";
            Some(Resumed { id, done: vec![done.to_owned()], finding: Finding::AtDestination })
        }
        Err(failure) => {
            console::error(&errors::failure_text(&failure));
            let text = failure.guest.sentence(SourceCategory::Qemu);
            let finding = Finding::Undecided { state: failure.guest.state(SourceCategory::Qemu), text };
            failure.guest.needs_attention().then(|| Resumed { id, done: Vec::new(), finding })
        }
    })
}

fn chosen(args: &ResumeArgs) -> Option<ResumeChoice> {
    let role = |side: &EndArg| match side {
        EndArg::Here => None,
        EndArg::Source => Some(Role::Source),
        EndArg::Destination => Some(Role::Destination),
    };
    let other = args.other_end.map(|other| match other {
        OtherEndArg::Done => OtherEnd::Done,
        OtherEndArg::HasIt => OtherEnd::HasIt,
        OtherEndArg::Fenced => OtherEnd::Fenced,
    });
    match (&args.run_here, &args.discard, args.forget) {
        (Some(side), _, _) => Some(ResumeChoice::RunHere(role(side))),
        (_, Some(side), _) => Some(ResumeChoice::Discard(role(side))),
        (_, _, true) => Some(ResumeChoice::Forget),
        _ => other.map(ResumeChoice::OtherEnd),
    }
}

/// Returns the identifier of the reason for a failed `resume`, and the exit status.
fn classified(error: &moves::Error) -> (Reason, Exit) {
    match error {
        moves::Error::Unknown { .. } => (Reason::UnknownId, Exit::Usage),
        moves::Error::Ambiguous { .. } => (Reason::AmbiguousId, Exit::Usage),
        moves::Error::InUse { .. } => (Reason::InUse, Exit::Failed),
        moves::Error::Refused { .. } => (Reason::Refused, Exit::Failed),
        moves::Error::NotRunning { .. } => (Reason::DestinationNotRunning, Exit::NeedsAttention),
        moves::Error::Qemu(_) => (Reason::Qemu, Exit::NeedsAttention),
        moves::Error::Io { .. } => (Reason::Record, Exit::NeedsAttention),
        moves::Error::Format { .. } | moves::Error::Directory(_) => (Reason::Record, Exit::Failed),
        _ => (Reason::Other, Exit::Failed),
    }
}

fn report(reporter: &Reporter, resumed: &Resumed) -> Exit {
    let Resumed { id, done, finding, .. } = resumed;
    let shown = id.to_string();
    let (exit, event) = match finding {
        Finding::Undecided { state, text } => {
            let event = FinalEvent::Undecided { id: shown, done, guest_state: *state, undecided: text };
            (Exit::NeedsAttention, event)
        }
        finding => (Exit::Done, FinalEvent::Resumed { id: shown, done, finding }),
    };
    reporter.result(event, exit);
    let state = if exit == Exit::Done { "finished" } else { "still undecided" };
    reporter.line(&format!("move {id}: {state}"));
    done.iter().for_each(|text| reporter.line(&format!("  {text}")));
    if let Finding::Undecided { text, .. } = finding {
        console::error(&format!("move {id} is undecided: {text}"));
    }
    exit
}
