//! The command `towline`: parse, dispatch, exit codes. What it does is in the crates below it.
//!
//! Exit codes: 0 done; 1 refused or failed, with the guest safe at its source; 2 usage; 3 failed, and the guest's state must
//! be looked at (the message says where it is); 4 (`check` only) could not tell.

mod args;
mod bench;
mod check;
mod copy;
mod ctl;
mod endpoint;
#[cfg(feature = "store")]
mod garbage;
mod inspect;
mod memory;
mod metrics;
mod net;
mod outcome;
mod progress;
mod sends;
mod signals;
mod units;
mod vsock;
mod watch;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Args, Command};

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
    let args = Args::parse();
    let filter = EnvFilter::try_from_env("TOWLINE_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    let exit = match &args.command {
        Command::Copy(options) => copy::run(options),
        Command::Move(options) => copy::run_move(options),
        Command::Check(options) => check::run(options),
        Command::Inspect(options) => inspect::run(options),
        Command::Net(options) => net::run(options),
        Command::Ctl(options) => ctl::run(options),
        Command::Vsock(options) => vsock::run(options),
        Command::Bench(options) => bench::run(options),
    };
    exit.unwrap_or_else(|error| {
        eprintln!("towline: {error:#}");
        Exit::Safe
    })
    .into()
}
