//! A process that has the lock of a drive as soon as QEMU has released it.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::sys;

/// A lock that is waited for. Dropping the acquired lock releases it.
#[derive(Debug)]
pub struct DriveLock(Receiver<io::Result<File>>);

impl DriveLock {
    /// Waits for it in the background.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn begin(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let (sender, acquired) = channel();
        std::thread::spawn(move || {
            let locked = sys::lock_drive(&file).map(|()| file);
            // A test that has ended does not receive it.
            let _ = sender.send(locked);
        });
        Ok(Self(acquired))
    }

    /// Waits until it is acquired; the file that has it.
    ///
    /// # Errors
    /// The system's, and `TimedOut`.
    pub fn wait(&self, within: Duration) -> io::Result<File> {
        self.0.recv_timeout(within).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}
