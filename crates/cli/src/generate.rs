//! Shell completions and manual pages, generated from the command line.

mod completions;
mod manual;

use std::io::{ErrorKind, Write as _};

use anyhow::{Context as _, Result};

use crate::args::{CompletionsArgs, ManArgs};
use crate::exit::Exit;

/// Runs `completions`.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<Exit> {
    match std::io::stdout().write_all(completions::script(args.shell).as_bytes()) {
        // A reader that stops early (`| head`) is not an error.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(Exit::Done),
    }
}

/// Runs `man`.
pub(crate) fn man(args: &ManArgs) -> Result<Exit> {
    let directory = &args.directory;
    let shown = || directory.display().to_string();
    std::fs::create_dir_all(directory).with_context(shown)?;
    manual::write(directory).with_context(shown)?;
    Ok(Exit::Done)
}
