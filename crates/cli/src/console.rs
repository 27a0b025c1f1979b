//! Standard output and standard error, each written by its own thread.
//!
//! ```text
//!   plan, engine, signals, log ── push: never blocks ──► queue ──► thread ── write(2) ──► pipe, file, terminal
//! ```
//! A pipe that is not read, or a terminal whose output is stopped (Ctrl-S), blocks only the writing thread:
//! the copy continues, and signals are handled. Output that cannot be written (a closed pipe, a full disk) is
//! dropped.
//!
//! The queues are bounded by the kind of line ([`OverflowPolicy`]): the latest progress of each destination;
//! [`LIMITED_BYTES_MAX`] of notices, statistics and log lines, beyond which they are dropped and counted;
//! phases and results are never dropped, and a command has fewer than twenty of them for each destination.
//!
//! Threads are started by [`start`], which a process calls after it has confined itself, as landlock
//! restricts only threads that are started later. Lines wait until then. [`finish`] writes the remaining ones
//! at the end of the process.

mod queue;

use std::borrow::Cow;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use indicatif::MultiProgress;

pub(crate) use queue::OverflowPolicy;
pub(crate) use queue::{LIMITED_BYTES_MAX, QueueHandle, wait_for, write_all};

/// Time limit of the remaining output at the end of the process.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of checks for a signal while the process waits for a reader.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

static CONSOLE: OnceLock<Console> = OnceLock::new();

struct Console {
    stdout: QueueHandle,
    stderr: QueueHandle,
    /// True after a signal: the process no longer waits for readers.
    is_ending: AtomicBool,
}

fn console() -> &'static Console {
    CONSOLE.get_or_init(|| {
        let stderr = QueueHandle::new(Arc::new(io::stderr()), report_dropped);
        // A common file has a common queue, which keeps the lines' order and keeps them out of a progress
        // bar.
        let stdout = if is_one_file() {
            stderr.with_sink(Arc::new(io::stdout()))
        } else {
            QueueHandle::new(Arc::new(io::stdout()), report_dropped)
        };
        Console { stdout, stderr, is_ending: AtomicBool::new(false) }
    })
}

/// Returns true if standard output and standard error are the same file.
fn is_one_file() -> bool {
    let identity = |path: &str| std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    let [stdout, stderr] = ["/proc/self/fd/1", "/proc/self/fd/2"].map(identity);
    stdout.is_some() && stdout == stderr
}

/// Queues a line for standard output.
pub(crate) fn print(keep: OverflowPolicy, text: &str) {
    console().stdout.push(keep, line(text));
}

/// Queues a line for standard output once the queue has space: for commands that do not hold a guest.
pub(crate) fn print_blocking(text: &str) {
    let Console { stdout, is_ending, .. } = console();
    stdout.start();
    while !stdout.wait_space(LIMITED_BYTES_MAX, Instant::now() + CHECK_INTERVAL) {
        if is_ending.load(Relaxed) {
            return;
        }
    }
    stdout.push(OverflowPolicy::Always, line(text));
}

/// Queues a line for standard error that is never dropped: a result, or the response to a signal.
pub(crate) fn error(text: &str) {
    console().stderr.push(OverflowPolicy::Always, line(&format!("towline: {}", printable_lines(text))));
}

/// Queues a line for standard error as it is, for a program that reads it.
pub(crate) fn plain_error(text: &str) {
    console().stderr.push(OverflowPolicy::Always, line(text));
}

/// Queues a line for standard error if the queue has space.
pub(crate) fn notice(text: &str) {
    console().stderr.push(OverflowPolicy::Limited, line(&format!("towline: {}", printable_lines(text))));
}

fn report_dropped(lines: u64) {
    notice(&format!("{lines} lines of output were dropped, as they were not read in time"));
}

/// Returns the progress bars on standard error, which are hidden while a line is written there. Only
/// functions passed to [`draw`] may draw them.
pub(crate) fn bars() -> &'static MultiProgress {
    console().stderr.bars()
}

/// Queues a drawing function for the writing thread; `OverflowPolicy::Latest` replaces an earlier one.
pub(crate) fn draw(keep: OverflowPolicy, draw: impl FnOnce() + Send + 'static) {
    console().stderr.push_draw(keep, draw);
}

/// Starts the writing threads. To be called after the process has confined itself.
pub(crate) fn start() {
    let Console { stdout, stderr, .. } = console();
    stdout.start();
    stderr.start();
}

/// Limits the time for which readers can delay the end of the process to [`FINISH_TIMEOUT`], after a signal.
pub(crate) fn limit_flush() {
    console().is_ending.store(true, Relaxed);
}

/// Time for which the end of the process waits for the readers of its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// At most [`FINISH_TIMEOUT`].
    Limited,
    /// Until all is read, or a signal arrives.
    All,
}

/// Writes the remaining output. Output that is not read in time is lost.
pub(crate) fn finish(flush: Flush) {
    start();
    let Console { stdout, stderr, is_ending } = console();
    let mut deadline = (flush == Flush::Limited).then(|| Instant::now() + FINISH_TIMEOUT);
    for output in [stderr, stdout] {
        loop {
            if is_ending.load(Relaxed) && deadline.is_none() {
                deadline = Some(Instant::now() + FINISH_TIMEOUT);
            }
            let check = Instant::now() + CHECK_INTERVAL;
            if output.wait_written(deadline.map_or(check, |deadline| deadline.min(check))) {
                break;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
    }
}

/// Reports panics through the queue: the default hook writes to standard error itself, which may block.
pub(crate) fn catch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let backtrace = std::backtrace::Backtrace::capture();
        let is_captured = backtrace.status() == std::backtrace::BacktraceStatus::Captured;
        let backtrace = if is_captured { format!("\n{backtrace}") } else { String::new() };
        error(&format!("thread '{}' {panic}{backtrace}", thread.name().unwrap_or("unnamed")));
    }));
}

/// Writer of the log. It never fails, which `tracing_subscriber` would report by a panic.
pub(crate) struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        console().stderr.push(OverflowPolicy::Limited, bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a queue for a datagram socket; each push is one datagram.
pub(crate) fn datagrams(socket: std::os::unix::net::UnixDatagram) -> QueueHandle {
    QueueHandle::new(Arc::new(socket), report_dropped)
}

/// Replaces control characters, which names, images and servers may contain and a terminal would execute, by
/// `?`; also those that change the direction of text.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let is_unsafe =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if text.contains(is_unsafe) { text.replace(is_unsafe, "?").into() } else { text.into() }
}

/// As [`printable`], for a text of several lines.
fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

fn line(text: &str) -> Vec<u8> {
    format!("{text}\n").into_bytes()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::{Command, Output, Stdio};

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    /// Set in the process that has no room for a thread.
    const NO_THREADS: &str = "TOWLINE_TEST_NO_THREADS";

    /// Runs a test in a process that cannot start a thread, where this returns `None`; elsewhere its end.
    pub(crate) fn without_threads(name: &str) -> Option<Output> {
        if std::env::var_os(NO_THREADS).is_some() {
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
            // Less than a stack.
            let current = Some(pages * rustix::param::page_size() as u64 + (1 << 20));
            setrlimit(Resource::As, Rlimit { current, ..getrlimit(Resource::As) }).unwrap();
            assert!(std::thread::Builder::new().spawn(|| ()).is_err());
            return None;
        }
        let mut command = Command::new("timeout");
        command.arg("60").arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture"]);
        Some(command.env(NO_THREADS, "1").stderr(Stdio::piped()).output().unwrap())
    }

    #[test]
    fn a_process_that_cannot_start_a_thread_writes_its_result_and_ends() {
        const NAME: &str = "console::tests::a_process_that_cannot_start_a_thread_writes_its_result_and_ends";
        let Some(output) = without_threads(NAME) else {
            error("the result");
            finish(Flush::All);
            std::process::exit(0);
        };
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("towline: the result"), "{}: {text}", output.status);
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\r\n\t\u{7f}\u{9b}\u{202e}c é"), "a?[2Jb??????c é");
        assert_eq!(printable_lines("a\n  - b\u{1b}"), "a\n  - b?");
    }
}
