//! Builds and test programs as processes.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::spawn;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::command::shown;
use crate::lint;
use crate::times::{self, Usage};

/// Settings of the one build: nothing is kept for an incremental one.
pub(super) fn built(command: &mut Command) -> Result<&mut Command> {
    lint::with_clippy(command.env("CARGO_INCREMENTAL", "0"))
}

/// Runs `command` and gives each line of its standard output to `look`. Past `within` it is killed with all that it started.
/// Returns how it ended, and what it took.
pub(super) fn watched(
    command: &mut Command,
    within: Duration,
    mut look: impl FnMut(&str),
) -> Result<(Result<()>, Usage)> {
    let started = Instant::now();
    let deadline = started + within;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| format!("{} cannot be started", shown(command)))?;
    let output = child.stdout.take().context("the output was asked for")?;
    let (sender, lines) = channel();
    let reader = spawn(move || {
        // Ends with the output; bytes that are not UTF-8 are replaced.
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    let outcome = loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => look(&line),
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                let group = Pid::from_child(&child);
                kill_process_group(group, Signal::KILL).with_context(|| format!("kill group {group:?}"))?;
                break Err(anyhow::anyhow!("{} killed after {} s", shown(command), within.as_secs()));
            }
        }
    };
    let usage = times::exited(&child, started)?;
    let status = child.wait()?;
    drop(lines);
    reader.join().map_err(|_| anyhow::anyhow!("the reader of {} panicked", shown(command)))?;
    let outcome = outcome.and_then(|()| {
        if status.success() { Ok(()) } else { bail!("{} failed with {status}", shown(command)) }
    });
    Ok((outcome, usage))
}
