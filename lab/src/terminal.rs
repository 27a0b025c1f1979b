//! A terminal, as a user sits at one.

use std::fs::File;
use std::io::{self, Write as _};
use std::process::Stdio;

use crate::sys;

/// What Ctrl-S sends: the terminal stops output.
const XOFF: &[u8] = b"\x13";

/// A terminal with the usual settings. Nothing reads what programs write to it.
#[derive(Debug)]
pub struct Terminal {
    watcher: File,
    program: File,
}

impl Terminal {
    /// Opens one.
    pub fn open() -> io::Result<Self> {
        let [watcher, program] = sys::open_terminal()?.map(File::from);
        Ok(Self { watcher, program })
    }

    /// For a program's output.
    pub fn output(&self) -> io::Result<Stdio> {
        self.program.try_clone().map(Stdio::from)
    }

    /// Presses Ctrl-S.
    pub fn stop_output(&self) -> io::Result<()> {
        (&self.watcher).write_all(XOFF)
    }
}
