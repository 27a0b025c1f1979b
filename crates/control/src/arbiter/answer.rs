//! A program of the user's that decides what towline cannot know.

use std::io::{self, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Longest run of the program.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time for the output of a program that has ended.
const OUTPUT_WITHIN: Duration = Duration::from_millis(100);
/// Bytes of its output that are read.
const OUTPUT_MAX: u64 = 1 << 10;

/// Answer of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// True for exit status 0, false for 1.
    pub is_yes: bool,
    /// Beginning of its standard output.
    pub output: String,
    /// Beginning of its standard error.
    pub message: String,
}

/// Reason for which a program has not answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoAnswer {
    /// It cannot be started, or waited for.
    #[error("sh: {0}")]
    Start(#[from] io::Error),
    /// It runs for too long, and was killed.
    #[error("no end within {} s", ANSWER_WITHIN.as_secs())]
    Late,
    /// Another exit status.
    #[error("{status}: {message}")]
    Status {
        /// The status, or the signal.
        status: String,
        /// Beginning of its standard error.
        message: String,
    },
}

/// Runs a program by a shell with these variables, and all that it starts, for its answer.
///
/// # Errors
/// [`NoAnswer`].
pub fn ask(command: &str, variables: &[(&str, String)]) -> Result<Answer, NoAnswer> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let outputs = (child.stdout.take().map(beginning), child.stderr.take().map(beginning));
    let ended = wait(&mut child);
    if let Ok(group) = i32::try_from(child.id())
        && let Some(group) = Pid::from_raw(group)
    {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if ended.is_err() {
        // It may be in the kernel for long.
        thread::Builder::new().name("program".into()).spawn(move || child.wait())?;
    }
    let text = |output: Option<io::Result<Receiver<Vec<u8>>>>| -> String {
        let bytes = output.and_then(Result::ok).and_then(|output| output.recv_timeout(OUTPUT_WITHIN).ok());
        String::from_utf8_lossy(&bytes.unwrap_or_default()).trim().to_owned()
    };
    match ended? {
        Some(code @ (0 | 1)) => {
            Ok(Answer { is_yes: code == 0, output: text(outputs.0), message: text(outputs.1) })
        }
        code => {
            let status = code.map_or("a signal".into(), |code| format!("exit status {code}"));
            Err(NoAnswer::Status { status, message: text(outputs.1) })
        }
    }
}

/// Reads the beginning of an output, and drops the rest: a program that says more does not wait for a reader.
fn beginning(mut output: impl Read + Send + 'static) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, beginning) = mpsc::channel();
    thread::Builder::new().name("output".into()).spawn(move || {
        let mut text = Vec::new();
        let _ = output.by_ref().take(OUTPUT_MAX).read_to_end(&mut text);
        let _ = sender.send(text);
        io::copy(&mut output, &mut io::sink())
    })?;
    Ok(beginning)
}

/// Waits for the exit status of a program.
fn wait(child: &mut Child) -> Result<Option<i32>, NoAnswer> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(status.code()),
            None if Instant::now() >= deadline => return Err(NoAnswer::Late),
            None => thread::sleep(POLL_INTERVAL),
        }
    }
}
