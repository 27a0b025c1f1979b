//! `cargo xtask demo`: the lab's demonstration, with a build of its own.

use std::time::Instant;

use anyhow::Result;

use crate::command::{cargo, run as run_command, target_directory};
use crate::setup::{self, Scope};

/// Set-up, build, demonstration.
pub(crate) fn run() -> Result<()> {
    let started = Instant::now();
    println!(
        "demo: on two idle processors the first run takes 3 minutes and 2 GB below target/, besides downloads."
    );
    println!(
        "demo: QEMU comes from Debian's packages (apt, as root). The demonstration itself takes 10 seconds."
    );
    setup::run(Scope::Demo)?;
    // Quicker to compile than a release; without object stores, which nothing here uses.
    let arguments = ["build", "--profile", "demo", "--package", "towline-cli", "--no-default-features"];
    println!("demo: $ cargo {}", arguments.join(" "));
    run_command(&mut cargo(arguments))?;
    println!("demo: ready after {:.0} s\n", started.elapsed().as_secs_f64());
    towline_lab::demo::run(&target_directory()?.join("demo/towline"))
}
