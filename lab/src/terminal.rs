//! A pseudoterminal that stands for a user's terminal.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::process::Stdio;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

/// The byte that Ctrl-S sends, which stops output.
const XOFF: &[u8] = b"\x13";

/// A terminal with the usual settings. Its output is read by [`Terminal::into_output`] only.
#[derive(Debug)]
pub struct Terminal {
    watcher: File,
    program: File,
}

impl Terminal {
    /// Opens a terminal.
    pub fn open() -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let watcher = openpt(flags)?;
        grantpt(&watcher)?;
        unlockpt(&watcher)?;
        let program = ioctl_tiocgptpeer(&watcher, flags)?;
        Ok(Self { watcher: watcher.into(), program: program.into() })
    }

    /// Handle for a program's output.
    pub fn output(&self) -> io::Result<Stdio> {
        self.program.try_clone().map(Stdio::from)
    }

    /// Returns what programs wrote to it, once the last of them has exited.
    pub fn into_output(self) -> io::Result<String> {
        let Self { mut watcher, program } = self;
        drop(program);
        let mut text = Vec::new();
        match watcher.read_to_end(&mut text) {
            // How Linux reports a terminal without programs.
            Err(error) if error.raw_os_error() != Some(libc::EIO) => Err(error),
            _ => Ok(String::from_utf8_lossy(&text).into_owned()),
        }
    }

    /// Presses Ctrl-S.
    pub fn stop_output(&self) -> io::Result<()> {
        (&self.watcher).write_all(XOFF)
    }
}
