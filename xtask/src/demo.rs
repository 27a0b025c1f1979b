//! `cargo xtask demo`: the lab's demonstration with the release build.

use anyhow::Result;

use crate::command::{cargo, run as run_command, target_directory};
use crate::setup;

/// Set-up, build, demonstration.
pub(crate) fn run() -> Result<()> {
    setup::run(false)?;
    run_command(&mut cargo(["build", "--release", "--package", "towline-cli"]))?;
    towline_lab::demo::run(&target_directory()?.join("release/towline"))
}
