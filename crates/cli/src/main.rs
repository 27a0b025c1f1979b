//! The command `towline`: parsing, dispatch, exit status. The work is done by the library crates.
//!
//! Exit status: 0 done; 1 refused or failed, with the guest safe at its source; 2 usage; 3 failed, and the
//! guest needs attention (the message says where it is); 4 (`check` and `status`) could not tell; 5 to 8
//! (`status`) the guest does not run.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod agent;
mod args;
mod backend;
mod check;
mod check_protection;
mod command_line;
mod console;
mod copy;
mod ctl;
mod endpoint;
mod errors;
mod events;
mod exit;
#[cfg(feature = "store")]
mod garbage;
mod generate;
mod inspect;
mod libvirt;
mod log;
mod metrics;
mod move_all;
mod moves;
mod net;
mod notify;
mod observability;
mod ocf;
mod outcome;
mod progress;
mod protect;
mod ps;
mod record;
mod remote;
mod repair;
mod report;
mod request;
mod run;
mod sandbox;
mod sends;
mod serve;
mod signals;
mod sockets;
mod standby;
mod state;
mod status;
mod store;
mod units;
mod upgrade;
mod vsock;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, FromArgMatches as _};
use towline_channel::lock;

use args::{Args, Command, writes_events};
use console::{Flush, OverflowPolicy};
use events::{Event, InterimEvent, Reason};
use exit::{Exit, UsageError};

const INTERNAL_ERROR: &str = "internal error, please report it: if a guest was being moved, check its state at both ends before you run it";

fn main() -> ExitCode {
    reporting_panics(start)
}

/// Runs the program. A panic outside a command, such as one of the parser, is printed before the process
/// ends.
fn reporting_panics(program: fn() -> ExitCode) -> ExitCode {
    console::catch_panics();
    catch_unwind(program).unwrap_or_else(|_| {
        console::error(INTERNAL_ERROR);
        end(Exit::NeedsAttention, Flush::All)
    })
}

fn start() -> ExitCode {
    let words = backend::with_command(std::env::args_os());
    if let Some(text) = backend::requested_capabilities(&words).or_else(|| generate::requested_schema(&words))
    {
        console::print(OverflowPolicy::Always, &text);
        return end(Exit::Done, Flush::All);
    }
    let matches = Args::command().try_get_matches_from(&words);
    let parsed = matches.and_then(|matches| Ok((Args::from_arg_matches(&matches)?, writes_events(&matches))));
    let (args, writes_events) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return unparsed(&error, &words),
    };
    if let Command::Ocf(ocf_args) = &args.command {
        // A filter that cannot be read is no reason to fail.
        let _ = log::init(args.log.as_deref(), None);
        let code = ocf::run(ocf_args);
        console::finish(Flush::Limited);
        return code.into();
    }
    let request = matches!(args.command, Command::Copy(_) | Command::Move(_) | Command::Upgrade(_))
        .then(log::request_id);
    let flush = match &args.command {
        // A guest or a service manager may wait for the end of the process.
        Command::Copy(_)
        | Command::Move(_)
        | Command::Run(_)
        | Command::Fork(_)
        | Command::Record(_)
        | Command::Standby(_)
        | Command::Protect(_)
        | Command::Ferry(_)
        | Command::Upgrade(_)
        | Command::Agent(_)
        | Command::Net(_)
        | Command::Vsock(_) => Flush::Limited,
        _ => Flush::All,
    };
    let run = AssertUnwindSafe(|| {
        log::init(args.log.as_deref(), request.as_deref())
            .map_err(|error| UsageError(errors::text(&error)))?;
        // The log lines of a copy begin with the id.
        if let Some(request) = request.filter(|_| writes_events) {
            let event = Event::Interim(InterimEvent::Begun { request });
            console::print(OverflowPolicy::Always, &event.line());
        }
        run(&args.command)
    });
    // The last event of a command that has not reported its result itself.
    let report = |text: &str, exit| {
        if writes_events {
            let event = Event::failed(text, reason(&args.command, exit), exit);
            console::print(OverflowPolicy::Always, &event.line());
        }
    };
    let exit = catch_unwind(run).unwrap_or_else(|_| {
        console::error(INTERNAL_ERROR);
        report(INTERNAL_ERROR, Exit::NeedsAttention);
        Ok(Exit::NeedsAttention)
    });
    let exit = exit.unwrap_or_else(|error| {
        let (text, exit) = (errors::text(&error), Exit::of_error(&error));
        console::error(&text);
        let notes = errors::notes(error.as_ref(), args.command.sandbox());
        notes.iter().for_each(|note| console::error(&format!("note: {note}")));
        report(&text, exit);
        exit
    });
    end(exit, flush)
}

/// Ends a process whose command line cannot be parsed, or requests help.
fn unparsed(error: &clap::Error, words: &[OsString]) -> ExitCode {
    if error.use_stderr() && words.iter().any(|word| word == "--json") {
        let text = error.to_string();
        let text = text.lines().next().unwrap_or_default();
        let text = text.strip_prefix("error: ").unwrap_or(text);
        console::print(OverflowPolicy::Always, &Event::failed(text, Reason::Usage, Exit::Usage).line());
        console::finish(Flush::All);
    }
    error.exit()
}

/// Returns the identifier of the reason for a failure that the command has not reported itself.
fn reason(command: &Command, exit: Exit) -> Reason {
    match (command, exit) {
        (_, Exit::Usage) => Reason::Usage,
        (Command::Store(_), _) => Reason::Image,
        _ => Reason::Other,
    }
}

/// Ends the process once its output is written.
fn end(exit: Exit, flush: Flush) -> ExitCode {
    console::finish(flush);
    exit.code().into()
}

fn run(command: &Command) -> Result<Exit> {
    match command {
        Command::Copy(args) => copy::run(args),
        Command::Move(args) => copy::run_move(args),
        Command::Run(args) => run::run(args),
        Command::Fork(args) => run::fork(args),
        Command::Record(args) => record::run(args),
        Command::Standby(args) => standby::run(args),
        Command::Protect(args) => protect::run(args),
        Command::Ferry(_) => protect::ferry(),
        Command::Ps(args) => ps::run(args),
        Command::Status(args) => status::run(args),
        Command::Upgrade(args) => upgrade::run(args),
        Command::Check(args) if args.protection.protect => check_protection::run(args),
        Command::Check(args) => check::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Store(args) => store::run(args),
        Command::Repair(args) => Ok(repair::run(args)),
        Command::Moves(args) => moves::run(args),
        Command::Resume(args) => moves::resume(args),
        Command::Agent(_) => agent::run(),
        Command::Ocf(_) => unreachable!("its exit statuses are those of OCF"),
        Command::Net(args) => net::run(args),
        Command::Ctl(args) => ctl::run(args),
        Command::Vsock(args) => vsock::run(args),
        Command::Completions(args) => generate::completions(args),
        Command::Man(args) => generate::man(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set in the process that panics.
    const PANICS: &str = "TOWLINE_TEST_PANICS";

    #[test]
    fn a_panic_outside_a_command_is_printed() {
        if std::env::var_os(PANICS).is_some() {
            reporting_panics(|| panic!("an early one"));
            return;
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "tests::a_panic_outside_a_command_is_printed";
        let output = command.args(["--exact", name, "--nocapture"]).env(PANICS, "1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("an early one") && text.contains(INTERNAL_ERROR), "{text}");
    }
}
