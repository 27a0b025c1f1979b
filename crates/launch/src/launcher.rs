//! Starts a QEMU and waits until its monitor responds.
//!
//! ```text
//!   GuestDirectory ──── socket, bound and listened on here ─┐
//!   AllowedCommandLine, HostArguments ──────────────────────┴─► fork, execve ─► the greeting of QMP, or the end and its last words
//! ```
//! The socket is QEMU's from the beginning, as a descriptor. So a client can connect at once and waits for
//! the greeting alone, and the connection ends when QEMU ends: nothing is polled.
//!
//! A QEMU is started by a separate thread, which lives until the QEMU ends and reaps it: the kernel's death
//! signal follows that thread. Its environment has `PATH`, the locale, `TZ` and `TMPDIR` of this process, and
//! nothing else that the host did not name, because credentials of object stores are in other variables.
//!
//! Limits: Linux 5.11 (`close_range` with `CLOSE_RANGE_CLOEXEC`).

mod process;

use std::ffi::OsString;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::process::{Signal, pidfd_send_signal};
use towline_qmp::{Client, Options};

use crate::command_line::{CommandLine, excerpt};
use crate::confinement::Confinement;
use crate::host::HostArguments;
use crate::log::Log;
use crate::memory::QemuVersion;
use crate::policy::AllowedCommandLine;
use crate::runtime::{
    GuestDirectory, GuestGenerations, Lifetime, RuntimeError, SOCKET_PATH_BYTES_MAX, io_error,
};
use process::{Spawned, ToSpawn, spawn};

/// Default time limit until the monitor answers.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the end of a QEMU that was killed, or whose monitor closed its connection.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Length of the end of the log that an error quotes.
const LOG_BYTES_MAX: usize = 4096;
const LOG_LINES_MAX: usize = 10;
/// Variables that QEMU inherits.
const INHERITED: [&str; 8] = ["HOME", "LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "PATH", "TMPDIR", "TZ"];

/// State in which a QEMU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncomingOption {
    /// The guest boots.
    No,
    /// Waits for `migrate-incoming` (`-incoming defer`).
    Defer,
}

/// QEMU's own restrictions on its process (`-sandbox`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessSandbox {
    /// Refuses everything that QEMU can do without.
    Strict,
    /// None, for a QEMU that was built without it.
    Off,
}

/// A QEMU to be started.
#[derive(Debug)]
pub struct Launcher {
    /// The guest's directory.
    pub directory: GuestDirectory,
    /// End of its life.
    pub lifetime: Lifetime,
    /// State in which it starts.
    pub incoming: IncomingOption,
    /// True if its guest does not run until `cont` (`-S`).
    pub is_paused: bool,
    /// Restrictions on its process.
    pub sandbox: ProcessSandbox,
    /// Time limit until its monitor responds.
    pub start_timeout: Duration,
    /// The image that it is started from, for the list of guests.
    pub image: Option<PathBuf>,
    /// Generations of its guest, of which it runs the next.
    pub generations: Option<GuestGenerations>,
    /// Descriptors that it inherits, under the numbers that they have here.
    pub descriptors: Vec<OwnedFd>,
    /// The confinement that it gets, where this process may give it.
    pub confinement: Option<Confinement>,
}

/// A QEMU that was started, and whose monitor has answered.
#[derive(Debug)]
pub struct RunningQemu {
    process: Spawned,
    lifetime: Lifetime,
    directory: GuestDirectory,
}

/// A QEMU that did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The guest's directory cannot be used.
    #[error("{0}")]
    Runtime(#[from] RuntimeError),
    /// The program cannot be executed.
    #[error("QEMU {} cannot be started: {source}", binary.display())]
    Binary { binary: PathBuf, source: io::Error },
    /// `--version` does not print a version.
    #[error("{} is not a QEMU: with --version it printed {found:?}", binary.display())]
    Version {
        binary: PathBuf,
        /// The beginning of its output.
        found: String,
    },
    /// QEMU ended before its monitor answered.
    #[error("QEMU {} ended at its start ({status}): {log}; correct the option that it names", binary.display())]
    Exited {
        binary: PathBuf,
        status: ExitStatus,
        /// The last lines of its log.
        log: String,
    },
    /// The monitor did not answer in time, or not as QMP. QEMU was killed.
    #[error("QEMU {} does not answer: {source}; it was killed, and wrote: {log}", binary.display())]
    NotReady {
        binary: PathBuf,
        source: Box<towline_qmp::Error>,
        /// The last lines of its log.
        log: String,
    },
}

impl Launcher {
    /// A launcher with the defaults: the QEMU ends with this process, boots, runs, and has strict
    /// restrictions.
    pub fn new(directory: GuestDirectory) -> Self {
        Self {
            directory,
            lifetime: Lifetime::WithOwner,
            incoming: IncomingOption::No,
            is_paused: false,
            sandbox: ProcessSandbox::Strict,
            start_timeout: START_TIMEOUT,
            image: None,
            generations: None,
            descriptors: Vec::new(),
            confinement: None,
        }
    }

    /// Starts the QEMU and waits until its monitor answers. The monitor is free afterwards.
    ///
    /// # Errors
    /// A program that cannot be executed, a QEMU that ends, with the end of its log, or one that does not
    /// answer in time. No process and no file remains.
    pub fn start(self, guest: &AllowedCommandLine, host: &HostArguments) -> Result<RunningQemu, LaunchError> {
        let (running, _) =
            self.start_with(guest, host, |qemu, options| Client::connect(qemu.qmp_path(), options))?;
        Ok(running)
    }

    /// As [`Launcher::start`], with the monitor's connection made by `connect`, which returns when the
    /// monitor has answered. It is called as soon as the process exists.
    ///
    /// # Errors
    /// As [`Launcher::start`].
    pub fn start_with<T>(
        mut self,
        guest: &AllowedCommandLine,
        host: &HostArguments,
        connect: impl FnOnce(&RunningQemu, &Options) -> Result<T, towline_qmp::Error>,
    ) -> Result<(RunningQemu, T), LaunchError> {
        let started = Instant::now();
        let process = self.prepare(guest, host)?;
        let Self { directory, lifetime, start_timeout, image, generations, .. } = self;
        let mut recorded = Ok(());
        // Before it is QEMU: one whose launcher is killed at any moment is listed.
        let spawned = spawn(process, |pid| {
            let state = directory.new_state(pid, lifetime, image, generations);
            recorded = state.and_then(|state| directory.write_state(&state));
            recorded.is_ok()
        });
        recorded?;
        let process =
            spawned.map_err(|source| LaunchError::Binary { binary: host.binary.clone(), source })?;
        // From here on, dropping it kills the QEMU and removes its directory.
        let mut running = RunningQemu { process, lifetime: Lifetime::WithOwner, directory };
        let within = start_timeout.saturating_sub(started.elapsed());
        let options = Options { greeting_deadline: within, deadline: within, ..Options::default() };
        let connected = connect(&running, &options);
        let connected = connected.map_err(|source| running.not_answered(source, &host.binary))?;
        running.lifetime = lifetime;
        tracing::info!(pid = running.pid(), elapsed = ?started.elapsed(), "started QEMU");
        Ok((running, connected))
    }

    /// Makes the socket, the log and the command.
    fn prepare(&mut self, guest: &AllowedCommandLine, host: &HostArguments) -> Result<ToSpawn, LaunchError> {
        let listener = self.listen()?;
        let arguments = self.arguments(guest, host, listener.as_fd());
        log_start(&self.directory, &host.binary, &arguments);
        let failed = |source| LaunchError::Binary { binary: host.binary.clone(), source };
        let log = Log::new(self.directory.create_log()?).map_err(failed)?;
        let output = || log.output.try_clone().map_err(failed);
        let mut command = command(host);
        command.args(&arguments).stdout(output()?).stderr(output()?);
        let confinement = self.confinement.as_ref().map(Confinement::give);
        let mut descriptors = std::mem::take(&mut self.descriptors);
        descriptors.extend([listener.into(), self.directory.lock().try_clone_to_owned().map_err(failed)?]);
        Ok(ToSpawn { command, descriptors, lifetime: self.lifetime, confinement, log })
    }

    fn listen(&self) -> Result<UnixListener, RuntimeError> {
        let path = self.directory.qmp_path();
        let found = path.as_os_str().as_bytes().len();
        if found > SOCKET_PATH_BYTES_MAX {
            return Err(RuntimeError::PathTooLong { path, found });
        }
        UnixListener::bind(&path).map_err(|error| io_error(&path, "listen on it", error))
    }

    /// The launcher's own options precede the guest's, whose order is kept; the user's come last.
    fn arguments(
        &self,
        guest: &AllowedCommandLine,
        host: &HostArguments,
        listener: BorrowedFd<'_>,
    ) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = Vec::new();
        for directory in &host.firmware_directories {
            arguments.extend(["-L".into(), directory.into()]);
        }
        if self.sandbox == ProcessSandbox::Strict {
            let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
            arguments.extend(["-sandbox".into(), sandbox.into()]);
        }
        let chardev = format!("socket,id=towline-qmp,fd={},server=on,wait=off", listener.as_raw_fd());
        arguments.extend(["-chardev".into(), chardev.into()]);
        arguments.extend(["-mon".into(), "chardev=towline-qmp,mode=control".into()]);
        // The human monitor, which QEMU would show on the guest's display, opens files and runs programs.
        let has_monitor = |line: &CommandLine| line.named("monitor").next().is_some();
        if !has_monitor(&guest.command_line) && !has_monitor(&guest.own) {
            arguments.extend(["-monitor".into(), "none".into()]);
        }
        if self.incoming == IncomingOption::Defer {
            arguments.extend(["-incoming".into(), "defer".into()]);
        }
        if self.is_paused {
            arguments.push("-S".into());
        }
        arguments.extend(guest.command_line.to_arguments());
        let name = format!("guest={},debug-threads=on", self.directory.name());
        arguments.extend(["-name".into(), name.into()]);
        arguments.extend(guest.arguments.iter().cloned());
        arguments
    }
}

impl RunningQemu {
    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Descriptor of its process, which becomes readable when it ends.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd.as_fd()
    }

    /// Directory of the guest.
    pub fn directory(&self) -> &GuestDirectory {
        &self.directory
    }

    /// Path of its monitor's socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.directory().qmp_path()
    }

    /// Waits until it ends. `None` if it still runs after `timeout`.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        self.process.exit.wait(timeout)
    }

    /// Lets QEMU quit, as its monitor's `quit` does. Has no effect on one that has ended.
    pub fn quit(&self) {
        self.signal(Signal::TERM);
    }

    /// Kills it. Has no effect on one that has ended.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        // The descriptor refers to this process even if its id is used again.
        if let Err(errno) = pidfd_send_signal(&self.process.pidfd, signal) {
            tracing::debug!(pid = self.pid(), %errno, "no signal is sent: QEMU has ended");
        }
    }

    /// The last lines that it wrote.
    pub fn log_tail(&self) -> String {
        self.process.exit.wait_for_log();
        log_tail(&self.directory().log_path())
    }

    /// The reason for which its monitor has not answered.
    fn not_answered(&self, source: towline_qmp::Error, binary: &Path) -> LaunchError {
        let is_lost = matches!(
            source,
            towline_qmp::Error::Disconnected { .. }
                | towline_qmp::Error::Refused { .. }
                | towline_qmp::Error::Missing { .. }
        );
        // A lost connection is the first sign that it has ended.
        let status = self.wait(if is_lost { EXIT_TIMEOUT } else { Duration::ZERO });
        let (binary, log) = (binary.to_owned(), self.log_tail());
        match status {
            Some(status) => LaunchError::Exited { binary, status, log },
            None => LaunchError::NotReady { binary, source: Box::new(source), log },
        }
    }
}

impl Drop for RunningQemu {
    fn drop(&mut self) {
        if self.lifetime == Lifetime::WithOwner {
            self.kill();
            if self.wait(EXIT_TIMEOUT).is_none() {
                tracing::warn!(pid = self.pid(), "QEMU was killed and has not ended");
            }
        }
        if self.wait(Duration::ZERO).is_none() {
            self.directory.keep();
        }
    }
}

/// The program in its environment.
pub(crate) fn command(host: &HostArguments) -> Command {
    let mut command = Command::new(&host.binary);
    command.current_dir(host.working_directory.as_deref().unwrap_or(Path::new("/")));
    command.env_clear();
    command.envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command.envs(host.environment.iter().map(|variable| (&variable.name, &variable.value)));
    command.stdin(Stdio::null());
    command
}

impl QemuVersion {
    /// Queries a QEMU binary for its version.
    ///
    /// # Errors
    /// [`LaunchError::Binary`], [`LaunchError::Version`].
    pub fn of_binary(host: &HostArguments) -> Result<Self, LaunchError> {
        let binary = || host.binary.clone();
        let output = command(host).arg("--version").output();
        let output = output.map_err(|source| LaunchError::Binary { binary: binary(), source })?;
        let text = String::from_utf8_lossy(&output.stdout);
        parse_version(&text).ok_or_else(|| LaunchError::Version {
            binary: binary(),
            found: excerpt(text.lines().next().unwrap_or_default()),
        })
    }
}

/// Parses `QEMU emulator version 10.0.2 (Debian …)`.
fn parse_version(text: &str) -> Option<QemuVersion> {
    let (_, version) = text.lines().next()?.split_once("version ")?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some(QemuVersion { major: numbers.next()??, minor: numbers.next()?? })
}

/// Logs the command line without its secrets.
fn log_start(directory: &GuestDirectory, binary: &Path, arguments: &[OsString]) {
    let words = CommandLine::parse(arguments).and_then(|command_line| command_line.without_secrets());
    let words = words.map_or_else(|_| Vec::new(), |recorded| recorded.command_line().to_arguments());
    tracing::info!(name = %directory.name(), binary = %binary.display(), arguments = ?words, "starting QEMU");
}

/// The last lines of a file, without control characters.
fn log_tail(path: &Path) -> String {
    let bytes = fs::File::open(path).and_then(|log| read_end(&log)).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let lines = &lines[lines.len().saturating_sub(LOG_LINES_MAX)..];
    if lines.is_empty() {
        return "no message".into();
    }
    lines.join("\n").chars().map(|c| if c.is_control() && c != '\n' { '?' } else { c }).collect()
}

/// Reads at most the last [`LOG_BYTES_MAX`] bytes.
fn read_end(log: &fs::File) -> io::Result<Vec<u8>> {
    let start = log.metadata()?.len().saturating_sub(LOG_BYTES_MAX as u64);
    let mut bytes = vec![0; LOG_BYTES_MAX];
    let length = log.read_at(&mut bytes, start)?;
    bytes.truncate(length);
    Ok(bytes)
}

#[cfg(test)]
mod tests;
