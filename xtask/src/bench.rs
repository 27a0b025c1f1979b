//! `cargo xtask bench`: the benchmarks, with release builds of towline and of themselves.

use std::ffi::OsString;
use std::process::Command;

use anyhow::Result;

use crate::command::{cargo, run as run_command, target_directory};

/// Runs the benchmarks with these arguments.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    run_command(&mut cargo([
        "build",
        "--release",
        "--package",
        "towline-cli",
        "--package",
        "towline-bench",
    ]))?;
    let built = target_directory()?.join("release");
    let mut bench = Command::new(built.join("towline-bench"));
    run_command(bench.args(arguments).env("TOWLINE_BIN", built.join("towline")))
}
