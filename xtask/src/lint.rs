//! `cargo xtask lint`: all that can be said of the sources without running them.

mod sources;

use anyhow::{Result, bail};

use crate::command::{cargo, root, run as run_command};
use crate::{errors, layering};

type Check = (&'static str, fn() -> Result<()>);

/// The guest's agent, a workspace of its own.
const AGENT: [&str; 2] = ["--manifest-path", "lab/agent/Cargo.toml"];

const CHECKS: [Check; 7] = [
    ("formatting", || run_command(&mut cargo(["fmt", "--all", "--check"]))),
    ("layering", layering::run),
    ("sources", sources),
    ("the table of errors", errors::check),
    ("clippy", || {
        run_command(&mut cargo(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    }),
    ("the agent", || {
        run_command(cargo(["fmt"]).args(AGENT).arg("--check"))?;
        let mut clippy = cargo(["clippy", "--quiet"]);
        run_command(clippy.args(AGENT).args(["--target-dir", "target/lab/agent", "--", "-D", "warnings"]))
    }),
    ("documentation", || {
        let mut doc = cargo(["doc", "--quiet", "--workspace", "--no-deps"]);
        run_command(doc.env("RUSTDOCFLAGS", "-D warnings"))
    }),
];

/// Runs every check, also after one has failed, and names those that did.
pub(crate) fn run() -> Result<()> {
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
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
    let faults = sources::faults(&root())?;
    if faults.is_empty() {
        return Ok(());
    }
    bail!("\n  {}", faults.join("\n  "));
}
