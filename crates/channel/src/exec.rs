//! A shell command as the other end: sent bytes go to its standard input, received bytes come from its
//! standard output.
//!
//! ```text
//!   send ──pipe──▶ stdin  /bin/sh -c COMMAND  stdout ──pipe──▶ recv        stderr: ours
//! ```
//!
//! A failing command must not look like a short stream. So when its output ends or its input breaks, the
//! command has [`STATUS_GRACE`] to exit too, and if it failed the call's error is [`Error::Command`].
//! [`Channel::finish`] waits for the exit status itself.
//!
//! The command has its own process group, so this process handles a Ctrl-C in the terminal. Dropping the
//! channel closes both pipes and waits [`EXIT_GRACE`]; then the group gets SIGTERM, and after [`TERM_GRACE`]
//! SIGKILL. Background processes of a command that has already exited are left alone.

use crate::channel::forward_channel;
use crate::lock::lock;
use crate::pipe::PipeChannel;
use crate::wait::{Woken, wait};
use crate::{Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len_mut};
use rustix::event::PollFlags;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Timeout for the exit status after the end of a command's pipe.
const STATUS_GRACE: Duration = Duration::from_millis(200);
/// Time for which a command may still run when its channel is dropped.
const EXIT_GRACE: Duration = Duration::from_secs(1);
/// Timeout for the command to end after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(1);

/// A running command.
#[derive(Debug)]
pub struct ExecChannel {
    pipes: PipeChannel,
    command: String,
    process: ChildProcess,
}

impl ExecChannel {
    /// Starts `/bin/sh -c command`.
    ///
    /// # Errors
    /// [`Error::Io`] if the shell cannot be started. A missing command is reported later, as its failure.
    pub fn spawn(command: &str) -> Result<Self> {
        let peer = format!("exec:{command}");
        let mut child = Command::new("/bin/sh")
            .args(["-c", command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|source| Error::io("start", &peer, source))?;
        let input = child.stdout.take().map(OwnedFd::from);
        let output = child.stdin.take().map(OwnedFd::from);
        // From here on the process ends with us, even if a later step fails.
        let process = ChildProcess::new(child).map_err(|source| Error::io("watch", &peer, source))?;
        Ok(Self { pipes: PipeChannel::new(input, output, peer)?, command: command.to_owned(), process })
    }

    /// Returns the exit status of the command; `None` if it still runs at the deadline. Closes nothing: a
    /// command that reads to the end of its input ends only after a shutdown of the sending half.
    ///
    /// # Errors
    /// [`Error::Io`] if waiting fails.
    pub fn wait(&self, deadline: Instant) -> Result<Option<ExitStatus>> {
        self.process.wait(deadline).map_err(|source| Error::io("wait for", self.peer(), source))
    }

    /// The failure of a command that has just ended, if that ended the pipe.
    fn failure(&self) -> Option<Error> {
        self.check(self.wait(Instant::now() + STATUS_GRACE).ok().flatten()?).err()
    }

    fn check(&self, status: ExitStatus) -> Result<()> {
        let failed = || Error::Command { command: self.command.clone(), status };
        if status.success() { Ok(()) } else { Err(failed()) }
    }
}

impl Channel for ExecChannel {
    forward_channel!(pipes: peer, calls, capabilities, flush, shutdown, set_timeouts, as_fd);

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        self.pipes.send(bufs, flags).map_err(|error| match error.raw_os_error() {
            Some(libc::EPIPE) if !self.pipes.is_output_closed() => self.failure().unwrap_or(error),
            _ => error,
        })
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        match self.pipes.recv(bufs, flags)? {
            0 if total_len_mut(bufs) > 0 && !self.pipes.is_input_closed() => {
                self.failure().map_or(Ok(0), Err)
            }
            received => Ok(received),
        }
    }

    fn finish(&self, deadline: Instant) -> Result<()> {
        self.shutdown(Shutdown::Write)?;
        let began = Instant::now();
        let timeout = || Error::timeout("wait for", self.peer(), began.elapsed());
        self.check(self.wait(deadline)?.ok_or_else(timeout)?)
    }
}

impl Drop for ExecChannel {
    fn drop(&mut self) {
        // The rest of the command's output has no reader: shut down first, so it notices before
        // `ChildProcess` waits for it.
        let _ = self.pipes.shutdown(Shutdown::Both);
    }
}

/// A child that leads a process group, and a descriptor that becomes readable when it exits.
#[derive(Debug)]
struct ChildProcess {
    child: Mutex<Child>,
    group: Pid,
    pidfd: OwnedFd,
}

impl ChildProcess {
    fn new(mut child: Child) -> std::io::Result<Self> {
        let group = Pid::from_child(&child);
        match pidfd_open(group, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { child: Mutex::new(child), group, pidfd }),
            Err(errno) => {
                let _ = kill_process_group(group, Signal::KILL);
                let _ = child.wait();
                Err(errno.into())
            }
        }
    }

    fn wait(&self, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
        match wait(self.pidfd.as_fd(), PollFlags::IN, None, Some(deadline))? {
            Woken::TimedOut => Ok(None),
            _ => lock(&self.child).wait().map(Some),
        }
    }

    fn has_ended_within(&self, grace: Duration) -> bool {
        wait(self.pidfd.as_fd(), PollFlags::IN, None, Some(Instant::now() + grace)) == Ok(Woken::Ready)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if !self.has_ended_within(EXIT_GRACE) {
            // As long as it is not reaped, the leader keeps the group's number from being reused.
            let _ = kill_process_group(self.group, Signal::TERM);
            self.has_ended_within(TERM_GRACE);
            let _ = kill_process_group(self.group, Signal::KILL);
        }
        let _ = lock(&self.child).wait();
    }
}
