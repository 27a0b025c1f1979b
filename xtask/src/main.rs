//! The workspace's own tasks: `cargo xtask TASK`.
//!
//! Lints, the test run and fuzz runs are here. What drives other programs of the machine (set-up, peers, the
//! package, long runs, pictures) is a script beside `src`. They run on a developer's or CI's machine and are
//! not part of the product. `setup` is the only task that changes the machine, and only when something is
//! missing.

mod command;
mod layering;
mod lint;
mod publish;
mod test;
mod times;

use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::Result;
use clap::{Parser, Subcommand};

use command::{cargo, run, script, target_directory};
use test::Extent;

/// Tasks of the towline workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what the lab needs on this machine with Debian 12 or 13: QEMUs 7.2 to 11.1, guest kernels,
    /// tools, initramfs archives.
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
    /// Formatting, quick lints, clippy and the unit tests of all crates: a minute once it is built, without
    /// root or QEMU.
    Check,
    /// Everything that CI runs: set-up, lints, build, every test, short fuzz runs; ends with one line of
    /// counts.
    Test,
    /// All of `test`, the tests that it leaves out, the features of each crate by themselves, and the long runs:
    /// a night.
    Nightly,
    /// Runs of fuzz targets.
    Fuzz {
        /// Targets; without any, all of them.
        targets: Vec<String>,
        /// Time for each, in seconds.
        #[arg(long, default_value_t = test::fuzz::SECONDS)]
        seconds: u64,
        /// Options of libFuzzer, as -runs=1000000.
        #[arg(last = true)]
        options: Vec<String>,
    },
    /// Show a save, a damaged image, an instant restore and a live move of a Linux guest, with stock QEMU.
    Demo {
        /// protect: a guest whose host dies, and whose connections go on; as root.
        #[arg(value_parser = ["protect"])]
        part: Option<String>,
    },
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
        Task::Setup { system, newer } => {
            script("setup.sh", newer.then_some("newer").or(system.then_some("system")))
        }
        Task::Bench { arguments } => bench(&arguments),
        Task::Peers => script("peers.sh", []),
        Task::Lint { quick: true } => lint::quick(),
        Task::Lint { quick: false } => lint::run(),
        Task::Layering => layering::run(),
        Task::Check => return test::check(),
        Task::Test => return test::run(Extent::Change),
        Task::Nightly => return test::run(Extent::Nightly),
        Task::Fuzz { targets, seconds, options } => test::fuzz::task(targets, seconds, &options),
        Task::Demo { part: None } => demo(),
        Task::Demo { part: Some(_) } => script("demo-protect.sh", []),
        Task::Pictures { drawn } => script("pictures.py", drawn.then_some("--drawn")),
        Task::Api => publish::api::write(),
        Task::Deb { debug } => script("deb.sh", debug.then_some("--debug")),
        Task::Soak { name } => script("soak.sh", name.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the benchmarks with these arguments, on release builds of towline and of themselves.
fn bench(arguments: &[OsString]) -> Result<()> {
    run(cargo(["build", "--release"]).args(["--package", "towline-cli", "--package", "towline-bench"]))?;
    let built = target_directory()?.join("release");
    let mut bench = Command::new(built.join("towline-bench"));
    run(bench.args(arguments).env("TOWLINE_BIN", built.join("towline")))
}

/// Set-up, build, and the lab's demonstration.
fn demo() -> Result<()> {
    let started = Instant::now();
    println!(
        "demo: on two idle processors the first run takes 3 minutes and 2 GB below target/, besides downloads."
    );
    println!(
        "demo: QEMU comes from Debian's packages (apt, as root). The demonstration itself takes 10 seconds."
    );
    script("setup.sh", ["demo"])?;
    // Quicker to compile than a release; without object stores, which nothing here uses.
    let arguments = ["build", "--profile", "demo", "--package", "towline-cli", "--no-default-features"];
    println!("demo: $ cargo {}", arguments.join(" "));
    run(&mut cargo(arguments))?;
    println!("demo: ready after {:.0} s\n", started.elapsed().as_secs_f64());
    towline_lab::demo::run(&target_directory()?.join("demo/towline"))
}
