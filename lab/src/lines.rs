//! Lines over a Unix socket, each with a deadline: QMP and the agent's protocol.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// A connection, and the beginning of the next line.
pub(crate) struct Lines {
    stream: UnixStream,
    received: Vec<u8>,
}

impl Lines {
    pub(crate) fn over(stream: UnixStream) -> Self {
        Self { stream, received: Vec::new() }
    }

    /// Sends this text, with the end of a line.
    pub(crate) fn send(&mut self, text: &str, deadline: Instant) -> Result<()> {
        self.stream.set_write_timeout(Some(remaining(deadline)))?;
        let sent = self.stream.write_all(format!("{text}\n").as_bytes());
        sent.with_context(|| format!("`{}` cannot be sent", text.trim()))
    }

    /// Reads the next line; `None` at the deadline.
    pub(crate) fn next(&mut self, deadline: Instant) -> Result<Option<String>> {
        let mut chunk = [0; 16 << 10];
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim().to_owned()));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(remaining(deadline)))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("QEMU closed the connection"),
                Ok(length) => self.received.extend_from_slice(&chunk[..length]),
                Err(error) if is_timeout(error.kind()) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Time until `deadline`; never zero, which a socket would take for "no timeout".
fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Returns true if a read failed because its timeout passed.
pub(crate) fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
