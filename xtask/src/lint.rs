//! `cargo xtask lint`: checks of the sources that do not run them.

mod licences;
mod prose;
mod sources;
mod words;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, refuse, root, run as run_command};
use crate::{layering, publish};

type Check = (&'static str, fn() -> Result<()>);

/// The guest's agent, a workspace of its own.
const AGENT: [&str; 2] = ["--manifest-path", "lab/agent/Cargo.toml"];

/// Checks that compile next to nothing.
const QUICK: [Check; 7] = [
    ("formatting", || run_command(&mut cargo(["fmt", "--all", "--check"]))),
    ("layering", layering::run),
    ("sources", sources),
    ("dependencies of a device", publish::check_device_dependencies),
    ("features of the program", publish::check_program_features),
    ("licences and advisories", licences::check),
    ("the agent", || {
        run_command(cargo(["fmt"]).args(AGENT).arg("--check"))?;
        let mut clippy = cargo(["clippy", "--quiet"]);
        run_command(clippy.args(AGENT).args(["--target-dir", "target/agent", "--", "-D", "warnings"]))
    }),
];
const COMPILED: [Check; 5] = [
    ("clippy", || {
        // The fuzz targets' tests are those of the crates that they include, and are linted there.
        let mut clippy = cargo(["clippy", "--quiet", "--workspace", "--exclude", "towline-fuzz"]);
        run_command(clippy.args(["--all-targets", "--", "-D", "warnings"]))
    }),
    ("documentation", || run_command(&mut documentation())),
    ("the program without its default features", publish::check_minimal_program),
    ("packages", publish::check_packages),
    ("public API", publish::api::check),
];

/// Runs every check, also after a failure, and names those that failed.
pub(crate) fn run() -> Result<()> {
    run_those(QUICK.into_iter().chain(COMPILED))
}

/// Runs the checks that compile next to nothing. A caller that builds everything adds [`with_clippy`] and
/// [`documentation`].
pub(crate) fn quick() -> Result<()> {
    run_those(QUICK.into_iter())
}

/// Builds the documentation; its warnings are errors.
pub(crate) fn documentation() -> Command {
    let mut doc = cargo(["doc", "--quiet", "--workspace", "--no-deps"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    doc
}

/// Has clippy check all that `build` compiles of the workspace; its warnings are errors. One pass replaces
/// two: clippy's driver is the compiler with more lints. Commands that use the build run with the same
/// settings, or cargo builds it again.
pub(crate) fn with_clippy(build: &mut Command) -> Result<&mut Command> {
    let cargo = std::env::var_os("CARGO").context("CARGO is not set; run this by `cargo xtask`")?;
    let driver = Path::new(&cargo).with_file_name("clippy-driver");
    if !driver.is_file() {
        bail!("{} is missing; run `rustup component add clippy`", driver.display());
    }
    // What `cargo clippy -- -D warnings` sets.
    Ok(build
        .env("RUSTC_WORKSPACE_WRAPPER", driver)
        .env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"))
}

fn run_those(checks: impl Iterator<Item = Check>) -> Result<()> {
    let mut failed = Vec::new();
    for (name, check) in checks {
        println!("lint: {name}");
        if let Err(error) = check() {
            eprintln!("lint: {name}: {error:#}");
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("lint failed: {}", failed.join(", "));
}

fn sources() -> Result<()> {
    refuse("", &sources::faults(root())?)
}
