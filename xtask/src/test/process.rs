//! Builds and test programs as processes.

use std::io::{BufRead as _, BufReader};
use std::iter::from_fn;
use std::panic::resume_unwind;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::{available_parallelism, scope};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::command::{like, shown};
use crate::lint;
use crate::times::{self, Usage};

/// Settings of the one build: nothing is kept for an incremental one.
pub(super) fn built(command: &mut Command) -> Result<&mut Command> {
    lint::with_clippy(command.env("CARGO_INCREMENTAL", "0"))
}

/// Does the work on each item in turn, on as many threads as there are processors and some `more`, and returns the results.
pub(super) fn in_threads<T: Send, R: Send>(
    more: usize,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let count = available_parallelism().map_or(1, usize::from) + more;
    scope(|scope| {
        let worker = || from_fn(next).map(&work).collect::<Vec<_>>();
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(worker)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Runs the command in its arguments with a separate, empty /run/towline, as tests list the records there: those that other tests leave,
/// or earlier runs have left, must not be among them. Users without mount namespaces run it as it is.
const WITHOUT_RECORDS: &str = r#"
unshare --mount true 2> /dev/null || exec "$0" "$@"
mkdir -p /run/towline
exec unshare --mount sh -c 'mount -t tmpfs -o mode=755 tmpfs /run/towline && exec "$0" "$@"' "$0" "$@""#;

/// Runs `command` [without records](WITHOUT_RECORDS) and gives each line of its standard output to `look`. Past `within` it is killed by
/// coreutils' timeout, with all that it started. Returns how it ended, and what it took.
pub(super) fn watched(
    command: &Command,
    within: Duration,
    mut look: impl FnMut(&str),
) -> Result<(Result<()>, Usage)> {
    let started = Instant::now();
    let mut limited = Command::new("timeout");
    limited.args(["--signal=KILL", &within.as_secs().max(1).to_string(), "sh", "-c", WITHOUT_RECORDS]);
    like(command, &mut limited);
    limited.stdout(Stdio::piped());
    let mut child = limited.spawn().with_context(|| format!("{} cannot be started", shown(&limited)))?;
    let output = child.stdout.take().context("the output was asked for")?;
    // Ends with the output; bytes that are not UTF-8 are replaced.
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        look(&String::from_utf8_lossy(&line));
    }
    let usage = times::exited(&child, started)?;
    let status = child.wait()?;
    let outcome = if usage.elapsed >= within {
        Err(anyhow!("{} killed after {} s", shown(command), within.as_secs()))
    } else if status.success() {
        Ok(())
    } else {
        Err(anyhow!("{} failed with {status}", shown(command)))
    };
    Ok((outcome, usage))
}
