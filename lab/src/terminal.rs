//! A pseudoterminal that stands for a user's terminal.

use std::fs::File;
use std::io::{self, Write as _};
use std::process::Stdio;

use crate::sys;

/// The byte that Ctrl-S sends, which stops output.
const XOFF: &[u8] = b"\x13";

/// A terminal with the usual settings. Its output is not read.
#[derive(Debug)]
pub struct Terminal {
    watcher: File,
    program: File,
}

impl Terminal {
    /// Opens a terminal.
    pub fn open() -> io::Result<Self> {
        let [watcher, program] = sys::open_terminal()?.map(File::from);
        Ok(Self { watcher, program })
    }

    /// Handle for a program's output.
    pub fn output(&self) -> io::Result<Stdio> {
        self.program.try_clone().map(Stdio::from)
    }

    /// Presses Ctrl-S.
    pub fn stop_output(&self) -> io::Result<()> {
        (&self.watcher).write_all(XOFF)
    }
}
