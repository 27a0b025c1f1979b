//! The command `towline`: parse, dispatch, exit codes. What it does is in the crates below it.
//!
//! Exit codes: 0 done; 1 refused or failed, with the guest safe at its source; 2 usage; 3 failed, and the guest's state must
//! be looked at (the message says where it is); 4 (`check` only) could not tell.

mod args;
mod backend;
mod bench;
mod check;
mod console;
mod copy;
mod ctl;
mod endpoint;
#[cfg(feature = "store")]
mod garbage;
mod generate;
mod hand_over;
mod inspect;
mod log;
mod memory;
mod metrics;
mod moves;
mod net;
mod notify;
mod outcome;
mod progress;
mod repair;
mod request;
mod sandbox;
mod sends;
mod signals;
mod sockets;
mod state;
mod units;
mod vsock;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use args::{Args, Command};
use console::{Keep, Readers};
use log::RequestId;

/// How the process ends.
/// From the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Exit {
    Done,
    Safe,
    Usage,
    LookAt,
    CouldNotTell,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

impl Exit {
    fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Safe => 1,
            Self::Usage => 2,
            Self::LookAt => 3,
            Self::CouldNotTell => 4,
        }
    }
}

fn main() -> ExitCode {
    console::catch_panics();
    let words = backend::with_command(std::env::args_os());
    if let Some(backend) = backend::asked(&words) {
        console::print(Keep::Always, &backend.capabilities().to_string());
        return end(Exit::Done, Readers::ToTheEnd);
    }
    let args = Args::parse_from(words);
    let request = matches!(args.command, Command::Copy(_) | Command::Move(_)).then(RequestId::new);
    if let Err(error) = log::begin(args.log.as_deref(), request) {
        console::error(&format!("{error:#}"));
        return end(Exit::Usage, Readers::ToTheEnd);
    }
    let readers = match &args.command {
        // A guest, or whoever ended this process, may wait for it.
        Command::Copy(_) | Command::Move(_) | Command::Net(_) | Command::Vsock(_) => Readers::Briefly,
        _ => Readers::ToTheEnd,
    };
    let run = AssertUnwindSafe(|| run(&args.command, request));
    let exit = catch_unwind(run).unwrap_or_else(|_| {
        console::error(
            "an internal error, to be reported; the state of a guest that was being moved must be looked at",
        );
        Ok(Exit::LookAt)
    });
    let exit = exit.unwrap_or_else(|error| {
        let text = format!("{error:#}");
        console::error(&text);
        sandbox::hint(&text).into_iter().for_each(|hint| console::error(&format!("note: {hint}")));
        Exit::Safe
    });
    end(exit, readers)
}

/// Ends the process once its output is written.
fn end(exit: Exit, readers: Readers) -> ExitCode {
    console::finish(readers);
    exit.into()
}

fn run(command: &Command, request: Option<RequestId>) -> Result<Exit> {
    match command {
        Command::Copy(options) => copy::run(options, request),
        Command::Move(options) => copy::run_move(options, request),
        Command::Check(options) => check::run(options),
        Command::Inspect(options) => inspect::run(options),
        Command::Repair(options) => Ok(repair::run(options)),
        Command::Moves(options) => moves::run(options),
        Command::Resume(options) => Ok(moves::resume(options)),
        Command::Net(options) => net::run(options),
        Command::Ctl(options) => ctl::run(options),
        Command::Vsock(options) => vsock::run(options),
        Command::Bench(options) => bench::run(options),
        Command::Completions(options) => generate::completions(options),
        Command::Man(options) => generate::man(options),
    }
}
