//! Backend processes: programs that serve a vhost-user socket.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use towline_frontend::Frontend;
use towline_lab::Towline as Process;

/// Number of log lines in an error.
const LOG_LINES: usize = 5;
/// Timeout of listening.
const START_WITHIN: Duration = Duration::from_secs(30);
/// Interval of checks that it is still running.
const START_STEP: Duration = Duration::from_millis(100);

/// A running backend, killed when this is dropped.
pub(crate) struct Backend {
    process: Process,
    line: String,
}

impl Backend {
    /// Starts it.
    pub(crate) fn start(words: &[String]) -> Result<Self> {
        Ok(Self { process: Process::start(Path::new(&words[0]), &words[1..])?, line: words.join(" ") })
    }

    /// Returns its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Connects to its socket, once that exists.
    pub(crate) fn connect(&mut self, socket: &Path) -> Result<Frontend> {
        let until = Instant::now() + START_WITHIN;
        loop {
            self.check()?;
            match Frontend::connect(socket, START_STEP) {
                Ok(frontend) => return Ok(frontend),
                Err(error) if Instant::now() > until => return Err(error.into()),
                Err(_) => {}
            }
        }
    }

    /// Fails with the end of its log if it has exited.
    pub(crate) fn check(&mut self) -> Result<()> {
        if self.process.runs()? {
            return Ok(());
        }
        let log = self.process.stdout() + &self.process.stderr();
        let lines: Vec<&str> = log.lines().collect();
        bail!("`{}` exited: {}", self.line, lines[lines.len().saturating_sub(LOG_LINES)..].join(" | "))
    }
}
