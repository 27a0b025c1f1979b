//! Standard output and standard error, each written by a thread of its own.
//!
//! ```text
//!   plan, engine, signals, log ── push: never blocks ──► queue ──► thread ── write(2) ──► pipe, file, terminal
//! ```
//! A pipe that is not read and a terminal whose output is stopped (Ctrl-S) block the thread that writes, and no other: the
//! copy goes on, and signals are obeyed. What cannot be written at all (a closed pipe, a full disk) is dropped.
//!
//! What a queue holds is bounded by what may be in it ([`Keep`]): of progress the latest line of each destination, of notices,
//! statistics and the log [`LIMITED_BYTES_MAX`], beyond which they are dropped and counted; phases and outcomes are never
//! dropped, and a command has less than twenty lines of them for each destination.
//!
//! No thread is started before [`start`]: a process that confines itself calls that afterwards, since landlock binds only the
//! threads that are started later. Until then lines wait. At the end of a process [`finish`] writes what waits.

mod queue;

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use indicatif::MultiProgress;
use tracing_subscriber::fmt::MakeWriter;

pub(crate) use queue::Keep;
pub(crate) use queue::Output;
use queue::Sink;

/// Notices, statistics and lines of the log that may wait, in bytes.
pub(crate) const LIMITED_BYTES_MAX: usize = 256 << 10;
/// How long output that is not read may delay the end of a process.
const FINISH_WITHIN: Duration = Duration::from_secs(2);
/// How often it is looked whether a process that waits for a reader shall end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

static CONSOLE: OnceLock<Console> = OnceLock::new();

struct Console {
    stdout: Output,
    stderr: Output,
    /// A signal asked for the end: a reader is no longer waited for.
    hurries: AtomicBool,
}

fn console() -> &'static Console {
    CONSOLE.get_or_init(|| {
        let stderr = Output::new(Sink::Stderr);
        // One queue for one file, so that lines keep their order and no line is written into a bar.
        let stdout = if is_one_file() { stderr.beside(Sink::Stdout) } else { Output::new(Sink::Stdout) };
        Console { stdout, stderr, hurries: AtomicBool::new(false) }
    })
}

/// Whether standard output and standard error are the same file.
fn is_one_file() -> bool {
    let identity = |path: &str| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let [stdout, stderr] = ["/proc/self/fd/1", "/proc/self/fd/2"].map(identity);
    stdout.is_some() && stdout == stderr
}

/// Queues a line for standard output.
pub(crate) fn print(keep: Keep, text: &str) {
    console().stdout.push(keep, line(text));
}

/// Queues a line for standard output, once there is room for it: for commands that hold no guest.
pub(crate) fn print_when_there_is_room(text: &str) {
    let Console { stdout, hurries, .. } = console();
    stdout.start();
    while !stdout.wait_room(LIMITED_BYTES_MAX, Instant::now() + LOOK_INTERVAL) {
        if hurries.load(Relaxed) {
            return;
        }
    }
    stdout.push(Keep::Always, line(text));
}

/// Queues a line for standard error that is not dropped: an outcome, or an answer to a signal.
pub(crate) fn error(text: &str) {
    console().stderr.push(Keep::Always, line(&format!("towline: {text}")));
}

/// Queues a line for standard error, if there is room for it.
pub(crate) fn notice(text: &str) {
    console().stderr.push(Keep::Limited, line(&format!("towline: {text}")));
}

/// The bars on standard error, which are taken away while a line is written there. Only what [`draw`] is given may draw them.
pub(crate) fn bars() -> &'static MultiProgress {
    console().stderr.bars()
}

/// Has the writing thread draw; `Keep::Latest` replaces what was to be drawn before.
pub(crate) fn draw(keep: Keep, draw: impl FnOnce() + Send + 'static) {
    console().stderr.push_draw(keep, Box::new(draw));
}

/// Starts the writing threads. To be called once the process is confined.
pub(crate) fn start() {
    let Console { stdout, stderr, .. } = console();
    stdout.start();
    stderr.start();
}

/// A signal asked for the end: from now on a reader delays it by [`FINISH_WITHIN`] at most.
pub(crate) fn hurry() {
    console().hurries.store(true, Relaxed);
}

/// Whether the end of a process waits for whoever reads its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    /// [`FINISH_WITHIN`] at most.
    Briefly,
    /// Until all is read, or a signal comes.
    ToTheEnd,
}

/// Writes what waits. What is not read in time is lost.
pub(crate) fn finish(readers: Readers) {
    start();
    let Console { stdout, stderr, hurries } = console();
    let mut deadline = (readers == Readers::Briefly).then(|| Instant::now() + FINISH_WITHIN);
    for output in [stderr, stdout] {
        loop {
            if hurries.load(Relaxed) && deadline.is_none() {
                deadline = Some(Instant::now() + FINISH_WITHIN);
            }
            let look = Instant::now() + LOOK_INTERVAL;
            if output.wait_written(deadline.map_or(look, |deadline| deadline.min(look))) {
                break;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
    }
}

/// Sends panics the way of all lines: the default hook writes to standard error itself, which may block.
pub(crate) fn catch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let backtrace = std::backtrace::Backtrace::capture();
        let traced = backtrace.status() == std::backtrace::BacktraceStatus::Captured;
        let backtrace = if traced { format!("\n{backtrace}") } else { String::new() };
        notice(&format!("thread '{}' {panic}{backtrace}", thread.name().unwrap_or("unnamed")));
    }));
}

/// Where the log goes. Writing to it never fails, which `tracing_subscriber` would report by a panic.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log;

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        console().stderr.push(Keep::Limited, bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A queue and a thread for a socket of datagrams, one for each push.
pub(crate) fn datagrams(socket: std::os::unix::net::UnixDatagram) -> Output {
    Output::new(Sink::Descriptor(std::sync::Arc::new(socket.into())))
}

fn line(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(b'\n');
    bytes
}
