//! Shell completions and manual pages, generated from the command line, and the schema of events, from their types.

mod completions;
mod manual;

use std::ffi::OsString;
use std::io::{ErrorKind, Write as _};

use anyhow::{Context as _, Result};

use crate::args::{CompletionsArgs, ManArgs};
use crate::events;
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

/// Returns the JSON Schema of events, if it is requested: `towline --print-schema` is for docs/schema/events.json, and in no help.
pub(crate) fn requested_schema(words: &[OsString]) -> Option<String> {
    words.iter().skip(1).eq(["--print-schema"]).then(events::schema)
}
