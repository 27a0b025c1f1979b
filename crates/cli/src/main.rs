//! The command `towline`: parse, dispatch, exit codes. What it does is in the crates below it.
//!
//! Exit codes: 0 done; 1 refused or failed, with the guest safe at its source; 2 usage; 3 failed, and the guest's state must
//! be looked at (the message says where it is); 4 (`check` only) could not tell.

mod args;
mod backend;
mod bench;
mod check;
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
mod net;
mod notify;
mod outcome;
mod progress;
mod repair;
mod sandbox;
mod sends;
mod signals;
mod state;
mod units;
mod vsock;
mod watch;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};
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
    let words = backend::with_command(std::env::args_os());
    if let Some(backend) = backend::asked(&words) {
        println!("{}", backend.capabilities());
        return Exit::Done.into();
    }
    let args = Args::parse_from(words);
    let request = matches!(args.command, Command::Copy(_) | Command::Move(_)).then(RequestId::new);
    if let Err(error) = log::begin(args.log.as_deref(), request) {
        eprintln!("towline: {error:#}");
        return Exit::Usage.into();
    }
    let exit = match &args.command {
        Command::Copy(options) => copy::run(options, request),
        Command::Move(options) => copy::run_move(options, request),
        Command::Check(options) => check::run(options),
        Command::Inspect(options) => inspect::run(options),
        Command::Repair(options) => Ok(repair::run(options)),
        Command::Net(options) => net::run(options),
        Command::Ctl(options) => ctl::run(options),
        Command::Vsock(options) => vsock::run(options),
        Command::Bench(options) => bench::run(options),
        Command::Completions(options) => Ok(generate::completions(options)),
        Command::Man(options) => generate::man(options),
    };
    exit.unwrap_or_else(|error| {
        let text = format!("{error:#}");
        eprintln!("towline: {text}");
        sandbox::hint(&text).into_iter().for_each(|hint| eprintln!("towline: note: {hint}"));
        Exit::Safe
    })
    .into()
}
