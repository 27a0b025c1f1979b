//! The first steps of README.md, as a reader pastes them.

use anyhow::{Context as _, Result};

use crate::paths;

/// Line before the block.
const MARK: &str = "<!-- first steps:";

/// Returns the commands of the block.
///
/// # Errors
/// README.md cannot be read, or has no such block.
pub fn first_steps() -> Result<String> {
    let path = paths::workspace().join("README.md");
    let readme = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let block = readme.split_once(MARK).and_then(|(_, rest)| rest.split_once("```\n"));
    let block = block.and_then(|(_, rest)| rest.split_once("```"));
    Ok(block.with_context(|| format!("{} has no block after {MARK}", path.display()))?.0.to_owned())
}

/// The same as a script that fails with the first command that fails, and ends its QEMUs.
///
/// # Errors
/// As [`first_steps`].
pub fn first_steps_script() -> Result<String> {
    let block = first_steps()?;
    // A paste into an interactive shell would continue.
    Ok(format!("set -e\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\n{block}wait\ntrap - EXIT\n"))
}
