//! Backend processes: programs that serve a vhost-user socket.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use towline_frontend::Frontend;

/// Number of log lines in an error.
const LOG_LINES: usize = 5;
/// Timeout of listening.
const START_WITHIN: Duration = Duration::from_secs(30);
/// Interval of checks that it is still running.
const START_STEP: Duration = Duration::from_millis(100);

/// A running backend, killed when this is dropped.
#[derive(Debug)]
pub struct Backend {
    child: Child,
    name: String,
    log: std::path::PathBuf,
}

impl Backend {
    /// Starts it, with its output in a file of this directory.
    ///
    /// # Errors
    /// The program does not exist.
    pub fn start<I, A>(directory: &Path, program: &Path, arguments: I) -> Result<Self>
    where
        I: IntoIterator<Item = A>,
        A: Into<OsString>,
    {
        let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
        let log = directory.join("backend.log");
        let file = File::create(&log)?;
        let mut command = Command::new(program);
        command.args(arguments.into_iter().map(Into::into)).stdin(Stdio::null());
        command.stdout(file.try_clone()?).stderr(file).env("RUST_LOG", "error");
        let child = command.spawn().with_context(|| format!("{} cannot be started", program.display()))?;
        Ok(Self { child, name, log })
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Connects to its socket, once that exists.
    ///
    /// # Errors
    /// It has exited, or does not listen in time.
    pub fn connect(&mut self, socket: &Path) -> Result<Frontend> {
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

    /// Checks that it is running.
    ///
    /// # Errors
    /// It has exited, with its status and log.
    pub fn check(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(LOG_LINES).collect();
        let lines: Vec<&str> = lines.into_iter().rev().collect();
        bail!("{} exited: {status}; end of its log: {}", self.name, lines.join(" | "))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
