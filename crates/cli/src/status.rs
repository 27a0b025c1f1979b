//! `towline status`.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use towline_control::moves;
use towline_launch::{RuntimeError, RuntimeRoot};
use towline_qmp::commands::{QueryStatus, RunState, Status};
use towline_qmp::{Client, Error, Options};

use crate::args::StatusArgs;
use crate::ctl;
use crate::events::{FinalEvent, StatusOfGuest};
use crate::exit::Exit;
use crate::progress::Reporter;

/// Deadline of the monitor's greeting and of its reply, each.
const MONITOR_TIMEOUT: Duration = Duration::from_millis(500);

/// State of a guest, if known.
struct GuestStatus {
    exit: Exit,
    state: &'static str,
    /// Run state by QEMU.
    run_state: Option<String>,
    /// Sentence for people.
    text: String,
}

/// Runs the command.
pub(crate) fn run(args: &StatusArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let root = RuntimeRoot::of_user();
    let socket = match ctl::socket(&args.guest, &root) {
        Err(error) if error.is::<RuntimeError>() => return Err(error),
        socket => socket.ok(),
    };
    let status = socket.as_deref().map_or_else(|| Ok(no_guest("no guest of this user has this name")), of)?;
    let guest = socket.as_deref().and_then(|socket| root.find_qemu(None, socket).transpose()).transpose()?;
    let undecided = socket.as_deref().map(undecided_moves).unwrap_or_default();
    let (run_state, pid) = (status.run_state.as_deref(), guest.map(|guest| guest.pid));
    let event = StatusOfGuest::new(&args.guest, status.state, run_state, socket.as_deref(), pid, &undecided);
    reporter.result(FinalEvent::Status(event), status.exit);
    reporter.line(&format!("{}: {}", args.guest.display(), status.text));
    undecided.iter().for_each(|id| reporter.line(&format!("  undecided    move {id}: towline resume {id}")));
    Ok(status.exit)
}

/// Asks a monitor, which has this time for its greeting, and again for its reply.
pub(crate) fn query(socket: &Path, timeout: Duration) -> Result<Status, Error> {
    let options = Options { deadline: timeout, greeting_deadline: timeout, ..Options::default() };
    Client::connect(socket, &options)?.execute(&QueryStatus)
}

/// State of the QEMU at a monitor.
fn of(socket: &Path) -> Result<GuestStatus> {
    let status = match query(socket, MONITOR_TIMEOUT) {
        Ok(status) => status,
        Err(Error::Missing { .. }) => return Ok(no_guest("there is no QMP socket")),
        Err(Error::Refused { .. } | Error::Disconnected { .. }) => {
            return Ok(GuestStatus::new(Exit::Ended, "ended", "its QEMU has ended"));
        }
        Err(Error::NoGreeting { .. } | Error::Busy { .. } | Error::Timeout { .. }) => {
            let text = "its QEMU lives; the monitor is held by another client, or does not answer";
            return Ok(GuestStatus::new(Exit::CouldNotTell, "held", text));
        }
        Err(error) => return Err(error.into()),
    };
    let (exit, state) = if status.running {
        (Exit::Done, "running")
    } else if status.status == RunState::INMIGRATE {
        (Exit::Waiting, "waiting")
    } else {
        (Exit::Paused, "paused")
    };
    let run_state = status.status.as_str();
    let text = if state == run_state { state.to_owned() } else { format!("{state} ({run_state})") };
    Ok(GuestStatus { exit, state, run_state: Some(run_state.to_owned()), text })
}

impl GuestStatus {
    fn new(exit: Exit, state: &'static str, text: &str) -> Self {
        Self { exit, state, run_state: None, text: text.to_owned() }
    }
}

fn no_guest(text: &str) -> GuestStatus {
    GuestStatus::new(Exit::NoGuest, "none", text)
}

/// Ids of the undecided moves that this monitor is an end of.
fn undecided_moves(socket: &Path) -> Vec<String> {
    let end = format!("qmp:{}", socket.display());
    let listed = moves::list().map(|(listed, _)| listed).unwrap_or_default();
    let of_it = listed
        .into_iter()
        .map(|one| one.record)
        .filter(|record| record.source.to_string() == end || record.destination.to_string() == end);
    of_it.map(|record| record.id.to_string()).collect()
}
