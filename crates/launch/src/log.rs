//! The log of a QEMU, which is bounded: a guest can make QEMU print without end.
//!
//! ```text
//!   QEMU's output ─► pipe, never waited for ─► a process that outlives towline, and ends with QEMU ─► qemu.log, the newest half kept
//! ```
//! A detached QEMU has no towline, hence the process. It has no other descriptors and makes four kinds of
//! system calls. Limits: output that QEMU prints faster than it is written is dropped, and so is output that
//! a full filesystem does not take.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, ftruncate};
use rustix::io::{Errno, pread, pwrite, read, write};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};

use crate::runtime::wait_exit;
use crate::sys;

/// Length at which the older half of a log is dropped.
pub(crate) const LOG_BYTES_MAX: u64 = 256 << 10;
const KEPT: u64 = LOG_BYTES_MAX / 2;
/// Read and moved at once, by a child that does not allocate.
const BUFFER_BYTES: usize = 4096;
/// Time for the last output to be written. Only a process that has QEMU's output too, and prints without end, takes it.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(60);
/// Wakes the process that writes. It is not written, nor is another one at the end of a part that is read.
const WAKE: u8 = 0;

/// A log for a QEMU that is about to start.
#[derive(Debug)]
pub(crate) struct Log {
    /// The end that QEMU writes.
    pub(crate) output: OwnedFd,
    input: OwnedFd,
    file: File,
}

/// The process that writes a log.
#[derive(Debug)]
pub(crate) struct LogWriter {
    process: Pid,
    input: OwnedFd,
    output: OwnedFd,
}

impl Log {
    /// A log in this file.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let (input, output) = pipe_with(PipeFlags::CLOEXEC)?;
        // QEMU never waits for it.
        fcntl_setfl(&output, fcntl_getfl(&output)? | OFlags::NONBLOCK)?;
        Ok(Self { output, input, file })
    }

    /// Starts the process. QEMU must already have its end.
    pub(crate) fn write(self) -> io::Result<LogWriter> {
        let Self { input, output, file } = self;
        let pid = sys::fork(input.as_fd(), file.as_fd(), copy)?;
        let process = Pid::from_raw(pid).ok_or_else(|| io::Error::other("no process"))?;
        Ok(LogWriter { process, input, output })
    }
}

impl LogWriter {
    /// Has it write everything that is there, and end, once QEMU has: another process may have QEMU's output too.
    pub(crate) fn wait(self) {
        // From now on its reads fail where they would wait, and the byte ends one that waits.
        let woken = fcntl_getfl(&self.input)
            .and_then(|flags| fcntl_setfl(&self.input, flags | OFlags::NONBLOCK))
            .and_then(|()| write(&self.output, &[WAKE]));
        let Ok(process) = pidfd_open(self.process, PidfdFlags::empty()) else { return };
        let reaped =
            wait_exit(&process, LAST_WORDS).and_then(|_| waitpid(Some(self.process), WaitOptions::NOHANG));
        if !matches!(reaped, Ok(Some(_))) {
            tracing::debug!(pid = self.process.as_raw_pid(), ?woken, "the log is not complete");
        }
    }
}

/// Copies the input to a file until it ends.
fn copy(input: BorrowedFd<'_>, file: BorrowedFd<'_>) {
    let mut buffer = [0; BUFFER_BYTES];
    let mut length = 0;
    loop {
        let bytes = match read(input, &mut buffer) {
            Ok(0) => return,
            Ok(bytes) => &buffer[..bytes.min(BUFFER_BYTES)],
            Err(Errno::INTR) => continue,
            Err(_) => return,
        };
        let bytes = bytes.strip_suffix(&[WAKE]).unwrap_or(bytes);
        if let Ok(written) = pwrite(file, bytes, length) {
            length += written as u64;
        }
        if length >= LOG_BYTES_MAX {
            length = drop_older_half(file, length);
        }
    }
}

/// Moves the newest bytes to the beginning. Returns the new length.
fn drop_older_half(file: BorrowedFd<'_>, length: u64) -> u64 {
    let mut buffer = [0; BUFFER_BYTES];
    let (mut from, mut to) = (length.saturating_sub(KEPT), 0);
    while from < length {
        let Ok(bytes @ 1..) = pread(file, &mut buffer, from) else { break };
        let Ok(written @ 1..) = pwrite(file, buffer.get(..bytes).unwrap_or_default(), to) else { break };
        from += written as u64;
        to += written as u64;
    }
    let _ = ftruncate(file, to);
    to
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::thread;

    use rustix::process::{Signal, kill_process};

    use super::*;

    #[test]
    fn the_last_words_are_awaited_on_a_busy_host() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qemu.log");
        let log = Log::new(File::create(&path).unwrap()).unwrap();
        // As a process has it that QEMU has started, and that lives on.
        let mut output = File::from(log.output.try_clone().unwrap());
        let writer = log.write().unwrap();
        let process = writer.process;
        kill_process(process, Signal::STOP).unwrap();
        output.write_all(b"the last words\n").unwrap();
        let other_work = thread::spawn(move || {
            thread::sleep(Duration::from_secs(2));
            kill_process(process, Signal::CONT).unwrap();
        });
        writer.wait();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "the last words\n");
        other_work.join().unwrap();
    }

    #[test]
    fn a_log_is_bounded_and_has_the_newest_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qemu.log");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let log = Log::new(file).unwrap();
        let mut output = File::from(log.output.try_clone().unwrap());
        let writer = log.write().unwrap();
        let mut lines = 0_u32;
        for _ in 0..200_000 {
            // One that is not taken is dropped.
            lines +=
                u32::from(output.write_all(b"a page that cannot be returned: 0123456789abcdef\n").is_ok());
        }
        // The pipe must have room for the last one.
        while output.write_all(b"the last words\n").is_err() {
            std::thread::yield_now();
        }
        drop(output);
        writer.wait();
        let text = std::fs::read(&path).unwrap();
        assert!(u64::from(lines) * 51 > LOG_BYTES_MAX, "{lines} lines prove nothing");
        assert!(text.len() as u64 <= LOG_BYTES_MAX && text.len() as u64 >= KEPT, "{}", text.len());
        assert!(text.ends_with(b"\nthe last words\n"));
    }
}
