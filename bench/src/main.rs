//! `towline-bench`, started as `cargo xtask bench`: whole paths on real guests, side by side with the peers of this machine.
//!
//! ```text
//! cargo xtask bench [TABLE...]  ─►  ram, live, lanes, net …  ─►  entries, measured in turns  ─►  tables: text, DIR/ram.{txt,json}
//! ```
//! A figure is a median with its spread, and is published beside its peer's; a ratio is taken round by round before its median. A
//! contender that cannot be measured is a row with the reason. Guests, processes and files are removed at the end, also of a cancelled
//! run.
//!
//! Out of scope: tests. Nothing about speed is asserted, and figures hold for the machine that they were measured on.

mod applications;
mod fork;
mod guest;
mod instant;
mod lanes;
mod live;
mod machine;
mod net;
mod options;
mod ram;
mod run;
mod sandbox;
mod stats;
mod stored;
mod sys;
mod table;
mod vhost;
mod vsock;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use towline_channel::Cancel;

use crate::options::{Bench, Options, TABLES};
use crate::table::Table;

/// Returns the measurement of a table.
fn measurement(table: &str) -> fn(&Bench) -> Result<Vec<Table>> {
    match table {
        "ram" => ram::measure,
        "live" => live::measure,
        "instant" => instant::measure,
        "run" => run::measure,
        "fork" => fork::measure,
        "lanes" => lanes::measure,
        "vsock" => vsock::measure,
        "vsock-linux" => vsock::linux::measure,
        "net" => net::measure,
        "net-queues" => net::measure_queues,
        "af-xdp" => net::af_xdp::measure,
        // `clap` accepts no other name.
        _ => sandbox::measure,
    }
}

fn main() -> ExitCode {
    // The destination of a migration and the application of a guest are this program again.
    let words: Vec<_> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let result = match &*words.iter().map(String::as_str).collect::<Vec<_>>() {
        [_, lanes::ends::DESTINATION, bytes] => lanes::ends::serve(bytes),
        [_, vsock::linux::APPLICATION] => vsock::linux::serve(),
        [_, net::af_xdp::APPLICATION, role, card] => net::af_xdp::serve(role, card),
        _ => run_tables(Options::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_tables(options: Options) -> Result<()> {
    let own = std::env::current_exe().context("path of this program")?;
    let bench = Bench { options, own, cancel: cancel_on_signals()? };
    let (tables, report) = (&bench.options.tables, bench.options.report.as_deref());
    if let Some(directory) = report {
        // Before the measurements, so that an error is reported early.
        std::fs::create_dir_all(directory)?;
    }
    let is_chosen = |table: &&str| tables.is_empty() || tables.iter().any(|name| name == table);
    for name in TABLES.iter().copied().filter(is_chosen) {
        let machine = machine::describe();
        let mut tables = measurement(name)(&bench)?;
        let goals = Table::goals(&mut tables);
        tables.push(goals);
        // With --rows some are empty.
        tables.retain(|table| !table.is_empty());
        let text = tables.iter().fold(machine.join("\n") + "\n", |text, table| format!("{text}\n{table}"));
        print!("{text}");
        if let Some(directory) = report {
            let json = json!({ "machine": machine, "tables": tables });
            write(&directory.join(format!("{}.txt", name)), &text)?;
            write(&directory.join(format!("{}.json", name)), &format!("{json:#}\n"))?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

/// Returns a token that SIGINT, SIGTERM and SIGHUP cancel: guests, processes and files are removed then.
fn cancel_on_signals() -> Result<Cancel> {
    let cancel = Cancel::new().context("cancellation token")?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signal handlers")?;
    let token = cancel.clone();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            eprintln!("bench: cancelling; guests and images are removed");
            token.cancel();
        }
    });
    Ok(cancel)
}
