//! The package in fresh roots of Debian 12 and 13: installed by apt, README's first steps pasted, removed; and the steps of
//! `Containerfile`.
//!
//! ```text
//!   cargo xtask deb ─► mmdebstrap, for each release ─► apt-get install ./towline.deb qemu-system-x86 ─► first steps ─► apt-get purge
//! ```
//! Out of scope: building towline in such a root.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use towline_lab::readme;

use super::container;
use crate::command::{run as run_command, target_directory};
use crate::deb;
use crate::setup::{self, apt};

/// Programs that this takes.
const TOOLS: [&str; 1] = ["mmdebstrap"];
/// Commands in the root, where the package is `/srv/towline.deb`.
const STEPS: [&str; 5] = [
    "apt-get install -qy --no-install-recommends /srv/towline.deb",
    "towline --version && man -w towline 2>/dev/null || test -f /usr/share/man/man1/towline.1.gz",
    "bash /srv/first-steps.sh",
    "apt-get purge -qy towline",
    "! test -e /usr/bin/towline",
];

/// Uses the package in a root of each release.
pub(super) fn run() -> Result<()> {
    apt::require(&TOOLS)?;
    let package = deb::run(std::env::var_os("TOWLINE_SOAK_DEBUG").is_some())?;
    let directory = target_directory()?.join("roots");
    fs::create_dir_all(&directory)?;
    fs::copy(&package, directory.join("towline.deb")).with_context(|| package.display().to_string())?;
    fs::write(directory.join("first-steps.sh"), readme::first_steps_script()?)?;
    let mut failed = Vec::new();
    for release in setup::RELEASES {
        let sources = setup::sources_of(release, &directory.join(release))?;
        match run_command(&mut bootstrap(release, &directory, &sources)) {
            Ok(()) => println!("roots: {release}: installed, first steps, removed"),
            Err(error) => failed.push(format!("{release}: {error:#}")),
        }
    }
    match container::run(&package, &directory) {
        Ok(()) => println!("roots: Containerfile: its steps, and its program"),
        Err(error) => failed.push(format!("Containerfile: {error:#}")),
    }
    match failed.as_slice() {
        [] => Ok(()),
        failed => bail!("{}", failed.join("\n  ")),
    }
}

/// Makes a root, runs the steps in it, and removes it.
fn bootstrap(release: &str, directory: &Path, sources: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=30", "1800", "mmdebstrap", "--mode=root", "--format=null", "--variant=apt"]);
    command.arg("--include=ca-certificates,qemu-system-x86,seabios,ipxe-qemu,bash");
    let files = ["towline.deb", "first-steps.sh"].map(|name| directory.join(name).display().to_string());
    command.arg(format!("--customize-hook=copy-in {} /srv", files.join(" ")));
    for step in STEPS {
        command.arg(format!("--customize-hook=chroot \"$1\" bash -c '{step}'"));
    }
    command.args([release, "-"]).arg(sources);
    command
}
