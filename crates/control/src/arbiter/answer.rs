//! A program of the user's that decides what towline cannot know.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process_group};

/// Longest run of the program.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Bytes of its output that are kept.
const OUTPUT_MAX: usize = 1 << 10;
/// Bytes that a pipe has at most (pipe(7)).
const PIPE_BYTES: usize = 64 << 10;

/// Reason for which a program has not answered.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// It cannot be started, or waited for.
    #[error("sh: {0}")]
    Start(#[from] io::Error),
    /// It runs for too long, and was killed.
    #[error("no end within {} s", ANSWER_WITHIN.as_secs())]
    Late,
    /// Another exit status than 0.
    #[error("{}: {message}", code.map_or("a signal".into(), |code| format!("exit status {code}")))]
    Status {
        /// The status; `None`: a signal.
        code: Option<i32>,
        /// Beginning of its standard error.
        message: String,
    },
}

/// Runs a program by a shell with these variables, and all that it starts. Returns the beginning of its standard output.
///
/// # Errors
/// [`NoAnswer`].
pub fn ask(command: &str, variables: &[(&str, String)]) -> Result<String, NoAnswer> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let (mut output, mut message) = (Output::of(child.stdout.take())?, Output::of(child.stderr.take())?);
    let ended = wait(&mut child, || {
        output.read();
        message.read();
    });
    if let Ok(group) = i32::try_from(child.id())
        && let Some(group) = Pid::from_raw(group)
    {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if ended.is_err() {
        // It may be in the kernel for long.
        thread::Builder::new().name("program".into()).spawn(move || child.wait())?;
    }
    match ended? {
        Some(0) => Ok(output.text()),
        code => Err(NoAnswer::Status { code, message: message.text() }),
    }
}

/// Output of a program. What is not of its beginning is dropped: a program that says more does not wait for a reader.
struct Output<P> {
    pipe: Option<P>,
    beginning: Vec<u8>,
}

impl<P: Read + AsFd> Output<P> {
    fn of(pipe: Option<P>) -> io::Result<Self> {
        pipe.as_ref().map(|pipe| ioctl_fionbio(pipe, true)).transpose()?;
        Ok(Self { pipe, beginning: Vec::new() })
    }

    /// Reads what is in the pipe. After the end of the program that is all it has written, even if another process holds the other end.
    fn read(&mut self) {
        let mut part = [0; PIPE_BYTES];
        let read = self.pipe.as_mut().and_then(|pipe| pipe.read(&mut part).ok()).unwrap_or(0);
        let kept = read.min(OUTPUT_MAX - self.beginning.len());
        self.beginning.extend_from_slice(&part[..kept]);
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.beginning).trim().to_owned()
    }
}

/// Waits for the exit status of a program, and calls `read` at times, and once more at the end.
fn wait(child: &mut Child, mut read: impl FnMut()) -> Result<Option<i32>, NoAnswer> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        let status = child.try_wait()?;
        read();
        match status {
            Some(status) => return Ok(status.code()),
            None if Instant::now() >= deadline => return Err(NoAnswer::Late),
            None => thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(command: &str) -> String {
        ask(command, &[]).unwrap()
    }

    #[test]
    fn an_output_is_complete_when_the_program_has_ended() {
        assert_eq!(
            output("setsid sleep 1 & echo 7"),
            "7",
            "its end of the pipe is held by a process that it leaves"
        );
        assert_eq!(output("yes | head -c 1000000; echo 7").len(), OUTPUT_MAX - 1, "trimmed");
        let refused = ask("echo why >&2; exit 1", &[]).unwrap_err();
        assert!(
            matches!(&refused, NoAnswer::Status { code: Some(1), message } if message == "why"),
            "{refused}"
        );
        assert_eq!(ask("kill $$", &[]).unwrap_err().to_string(), "a signal: ");
    }
}
