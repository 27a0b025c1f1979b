//! Python's `websockets`, the other end of the WebSocket tests, in an environment of its own.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use towline_lab::paths;

use super::unpack::{into_place, scratch};
use crate::command::output;

const PACKAGE: &str = "websockets==15.0.1";

/// The environment. True if it was made now. Without Python's `venv`, or without its package index, the tests that want it
/// are skipped, and this says why.
pub(super) fn websockets(lab: &Path) -> Result<bool> {
    if paths::python(lab).is_file() {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let place = scratch.path().join("python");
    let made = output(Command::new("python3").args(["-m", "venv"]).arg(&place)).and_then(|_| {
        let python = place.join("bin/python");
        output(Command::new(&python).args(["-m", "pip", "install", "--quiet", PACKAGE]))?;
        output(Command::new(&python).args(["-c", "import websockets"]))
    });
    match made {
        Ok(_) => into_place(&place, &lab.join("python")).map(|()| true),
        Err(error) => {
            println!("setup: no {PACKAGE} for the WebSocket tests, which are skipped: {error:#}");
            Ok(false)
        }
    }
}
