//! `towline moves` and `towline resume`: moves that were interrupted at their switchover.

use anyhow::Result;
use serde_json::{Value, json};
use towline_control::moves::{self, Finding, ListedMove, MoveEnd, MoveRecord, ResumeChoice, Resumed, Role};

use crate::args::{EndArg, MovesArgs, ResumeArgs};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::{console, events};

/// Runs `moves`.
pub(crate) fn run(args: &MovesArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let (listed, bad) = moves::list()?;
    for one in &listed {
        reporter.event("move", fields(one));
        print(&reporter, one);
    }
    for error in &bad {
        reporter.event("unreadable", json!({ "error": error.to_string() }));
        console::error(&error.to_string());
    }
    let exit = if bad.is_empty() { Exit::Done } else { Exit::Failed };
    let counts = json!({ "moves": listed.len(), "unreadable": bad.len() });
    reporter.event("moves", events::with_exit(counts, exit));
    if listed.is_empty() && bad.is_empty() {
        reporter.line("no undecided moves of this user on this host");
    }
    Ok(exit)
}

/// Returns the fields of the event `move`.
fn fields(listed: &ListedMove) -> Value {
    let record = &listed.record;
    json!({
        "id": record.id,
        "role": record.role,
        "stage": record.stage,
        "source": end(record, &record.source),
        "destination": end(record, &record.destination),
        "undecided": listed.undecided(),
        "message": record.message,
        "since": record.begun_ms,
        "changed": record.changed_ms,
        "owner-pid": listed.owner,
        "exited": listed.exited,
        "repair": listed.changed,
        "advice": listed.advice(),
    })
}

fn end(record: &MoveRecord, end: &MoveEnd) -> Value {
    match end {
        MoveEnd::Qemu { socket, pid, .. } => {
            json!({ "endpoint": end.to_string(), "socket": socket, "pid": pid, "exited": record.has_exited(end) })
        }
        MoveEnd::Peer { .. } | MoveEnd::Stored => json!({ "endpoint": end.to_string() }),
    }
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
pub(crate) fn resume(args: &ResumeArgs) -> Exit {
    let reporter = Reporter::new(&args.output);
    match moves::resume(&args.id, chosen(args)) {
        Ok(resumed) => report(&reporter, &resumed),
        Err(error) => {
            let exit = match error {
                moves::Error::Unknown { .. } | moves::Error::Ambiguous { .. } => Exit::Usage,
                moves::Error::NotRunning { .. } | moves::Error::Io { .. } | moves::Error::Qemu(_) => {
                    Exit::NeedsAttention
                }
                _ => Exit::Failed,
            };
            reporter.failed_with(json!({ "id": args.id }), &error.to_string(), reason(&error), exit)
        }
    }
}

fn chosen(args: &ResumeArgs) -> Option<ResumeChoice> {
    let role = |side: &EndArg| match side {
        EndArg::Here => None,
        EndArg::Source => Some(Role::Source),
        EndArg::Destination => Some(Role::Destination),
    };
    match (&args.run_here, &args.discard, args.forget) {
        (Some(side), _, _) => Some(ResumeChoice::RunHere(role(side))),
        (_, Some(side), _) => Some(ResumeChoice::Discard(role(side))),
        (_, _, true) => Some(ResumeChoice::Forget),
        _ => None,
    }
}

/// Returns the identifier of the reason for a failed `resume`.
fn reason(error: &moves::Error) -> &'static str {
    match error {
        moves::Error::Unknown { .. } => "unknown-id",
        moves::Error::Ambiguous { .. } => "ambiguous-id",
        moves::Error::InUse { .. } => "in-use",
        moves::Error::Refused { .. } => "refused",
        moves::Error::NotRunning { .. } => "destination-not-running",
        moves::Error::Qemu(_) => "qemu",
        moves::Error::Io { .. } | moves::Error::Format { .. } | moves::Error::Directory(_) => "record",
        _ => "other",
    }
}

fn report(reporter: &Reporter, resumed: &Resumed) -> Exit {
    let Resumed { id, done, finding, .. } = resumed;
    let (exit, name, fields) = match finding {
        Finding::Undecided { state, text } => {
            let fields = json!({ "id": id, "done": done, "undecided": text, "guest-state": state });
            (Exit::NeedsAttention, "undecided", fields)
        }
        finding => (Exit::Done, "resumed", json!({ "id": id, "done": done, "finding": finding })),
    };
    reporter.event(name, events::with_exit(fields, exit));
    let state = if exit == Exit::Done { "finished" } else { "still undecided" };
    reporter.line(&format!("move {id}: {state}"));
    done.iter().for_each(|text| reporter.line(&format!("  {text}")));
    if let Finding::Undecided { text, .. } = finding {
        console::error(&format!("move {id} is undecided: {text}"));
    }
    exit
}
