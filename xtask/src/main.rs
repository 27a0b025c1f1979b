//! The workspace's own tasks: `cargo xtask TASK`.
//!
//! Set-up, lints, the test run, the demonstration and the long runs, one file each. They run on a
//! developer's or CI's machine and are not part of the product. `setup` is the only task that changes the machine, and
//! only when something is missing.

mod bench;
mod command;
mod deb;
mod demo;
mod layering;
mod lint;
mod pictures;
mod publish;
mod setup;
mod soak;
mod test;
mod times;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the towline workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what the lab needs on this machine with Debian 12 or 13: QEMUs 7.2 to 11.1, guest kernels, tools, initramfs archives.
    Setup {
        /// Only the part that needs root (packages); nothing is written below target/.
        #[arg(long)]
        system: bool,
        /// Install nothing; print newer QEMU versions of Debian than those that towline is tested with.
        #[arg(long, conflicts_with = "system")]
        newer: bool,
    },
    /// Measure on real guests, with release builds; `cargo xtask bench --help` lists tables and options.
    #[command(disable_help_flag = true)]
    Bench {
        /// Tables and options.
        #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Install the peers that the benches of vhost-user devices compare with, below target/peers.
    Peers,
    /// Formatting, clippy, layering, file lengths, unsafe code outside sys, documentation.
    Lint {
        /// Only the checks that compile next to nothing.
        #[arg(long)]
        quick: bool,
    },
    /// Check the dependency edges between the workspace's crates.
    Layering,
    /// Formatting, quick lints, clippy and the unit tests of all crates: a minute once it is built, without root or QEMU.
    Check,
    /// Everything that CI runs: set-up, lints, build, every test, short fuzz runs; ends with one line of counts.
    Test,
    /// The short fuzz runs alone.
    Fuzz,
    /// Show a save, a damaged image, an instant restore and a live move of a Linux guest, with stock QEMU.
    Demo,
    /// Draw the charts of README.md and record its demonstration, below docs/pictures.
    Pictures {
        /// Draw again what was recorded, without a run of the demonstration.
        #[arg(long)]
        drawn: bool,
    },
    /// Write the public API of each published library beside its manifest.
    Api,
    /// A Debian package below target/deb, installed into an empty root and run there.
    Deb {
        /// Package the debug build, which is quicker.
        #[arg(long)]
        debug: bool,
    },
    /// A long run by its name; without a name, the list of them.
    Soak {
        /// The run's name.
        name: Option<String>,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Setup { newer: true, .. } => setup::newer(),
        Task::Setup { system, .. } => {
            setup::run(if system { setup::Scope::System } else { setup::Scope::Lab })
        }
        Task::Bench { arguments } => bench::run(&arguments),
        Task::Peers => setup::peers::run(),
        Task::Lint { quick: true } => lint::quick(),
        Task::Lint { quick: false } => lint::run(),
        Task::Layering => layering::run(),
        Task::Check => return test::check(),
        Task::Test => return test::run(),
        Task::Fuzz => test::fuzz(),
        Task::Demo => demo::run(),
        Task::Pictures { drawn: true } => pictures::run(pictures::Wanted::Drawn),
        Task::Pictures { drawn: false } => pictures::run(pictures::Wanted::All),
        Task::Api => publish::api::write(),
        Task::Deb { debug } => deb::run(debug).map(drop),
        Task::Soak { name } => soak::run(name.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
