//! `towline moves` and `towline resume`: moves that were interrupted when the guest was handed over.

use anyhow::Result;
use serde_json::{Value, json};
use towline_control::moves::{self, ListedMove, MoveEnd, MoveRecord, ResumeChoice, Resumed, Role};

use crate::Exit;
use crate::args::{MovesArgs, ResumeArgs, Side};
use crate::console;
use crate::progress::Reporter;

/// Runs `moves`.
pub(crate) fn run(args: &MovesArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).waits_for_readers();
    let (listed, bad) = moves::list()?;
    for one in &listed {
        reporter.event("move", shown(one));
        tell(&reporter, one);
    }
    for error in &bad {
        reporter.event("unreadable", json!({ "error": error.to_string() }));
        console::error(&error.to_string());
    }
    let exit = if bad.is_empty() { Exit::Done } else { Exit::Safe };
    reporter.event("moves", json!({ "moves": listed.len(), "unreadable": bad.len(), "exit": exit.code() }));
    if listed.is_empty() && bad.is_empty() {
        reporter.line("no move is undecided on this host, for this user");
    }
    Ok(exit)
}

fn shown(listed: &ListedMove) -> Value {
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

fn tell(reporter: &Reporter, listed: &ListedMove) {
    let record = &listed.record;
    let role = match record.role {
        Role::Source => "source",
        Role::Destination => "destination",
        Role::Both => "both ends",
    };
    reporter.line(&format!("{}  ({role} here)", record.id));
    reporter.line(&format!("  guest        {} to {}", record.source, record.destination));
    reporter.line(&format!("  since        {}", record.begun()));
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
        Ok(resumed) => told(&reporter, &resumed),
        Err(error) => {
            let exit = match error {
                moves::Error::Unknown { .. } | moves::Error::Ambiguous { .. } => Exit::Usage,
                moves::Error::NotRunning { .. } | moves::Error::Io { .. } | moves::Error::Qemu(_) => {
                    Exit::LookAt
                }
                _ => Exit::Safe,
            };
            reporter
                .event("failed", json!({ "id": args.id, "error": error.to_string(), "exit": exit.code() }));
            console::error(&error.to_string());
            exit
        }
    }
}

fn chosen(args: &ResumeArgs) -> Option<ResumeChoice> {
    let role = |side: &Side| match side {
        Side::Here => None,
        Side::Source => Some(Role::Source),
        Side::Destination => Some(Role::Destination),
    };
    match (&args.run_here, &args.discard, args.forget) {
        (Some(side), _, _) => Some(ResumeChoice::RunHere(role(side))),
        (_, Some(side), _) => Some(ResumeChoice::Discard(role(side))),
        (_, _, true) => Some(ResumeChoice::Forget),
        _ => None,
    }
}

fn told(reporter: &Reporter, resumed: &Resumed) -> Exit {
    let Resumed { id, done, undecided, .. } = resumed;
    let exit = if undecided.is_none() { Exit::Done } else { Exit::LookAt };
    let name = if undecided.is_none() { "resumed" } else { "undecided" };
    reporter.event(name, json!({ "id": id, "done": done, "undecided": undecided, "exit": exit.code() }));
    let state = if undecided.is_none() { "finished" } else { "still undecided" };
    reporter.line(&format!("move {id}: {state}"));
    done.iter().for_each(|text| reporter.line(&format!("  {text}")));
    if let Some(text) = undecided {
        console::error(&format!("move {id} is undecided: {text}"));
    }
    exit
}
