//! Running other programs: cargo and the machine's tools.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;
pub(crate) use towline_lab::paths::workspace as root;

/// The cargo that runs us, started in the workspace's root, with no terminal to ask.
pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root()).stdin(Stdio::null());
    command
}

/// `command` at the lowest priority.
pub(crate) fn at_leisure(command: &Command) -> Command {
    let mut nice = Command::new("nice");
    nice.args(["-n", "19"]);
    like(command, &mut nice);
    nice
}

/// Has `prefix` run `command`, in its directory and with its environment, and with no terminal to ask.
pub(crate) fn like(command: &Command, prefix: &mut Command) {
    prefix.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    prefix.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    prefix.current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
}

/// Runs `command` with its output shown; fails unless it exits with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{} cannot be started", shown(command)))?;
    if !status.success() {
        bail!("{} failed with {status}", shown(command));
    }
    Ok(())
}

/// Fails with these faults, one a line, if there are any.
pub(crate) fn refuse(what: &str, faults: &[String]) -> Result<()> {
    if faults.is_empty() {
        return Ok(());
    }
    bail!("{what}\n  {}", faults.join("\n  "));
}

/// Runs a script that lies beside `src`, with cargo's target directory in its environment.
pub(crate) fn script<'a>(name: &str, arguments: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut script = Command::new(root().join("xtask").join(name));
    run(script.args(arguments).env("TOWLINE_TARGET", target_directory()?))
}

/// Runs `command` and returns what it wrote to its standard output; fails unless it exits with 0.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("{} cannot be started", shown(command)))?;
    if !output.status.success() {
        bail!("{} failed with {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} wrote invalid UTF-8", shown(command)))
}

/// `command` as it would be typed.
pub(crate) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Cargo's target directory.
pub(crate) fn target_directory() -> Result<PathBuf> {
    let directory = metadata()?["target_directory"].as_str().map(PathBuf::from);
    directory.context("cargo metadata without target_directory")
}

/// The workspace's own packages, as `cargo metadata` has them.
pub(crate) fn packages() -> Result<Vec<Value>> {
    let packages = metadata()?["packages"].as_array().cloned();
    packages.context("cargo metadata without packages")
}

fn metadata() -> Result<Value> {
    let text = output(&mut cargo(["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&text).context("cargo metadata wrote invalid JSON")
}
