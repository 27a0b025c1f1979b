//! A queue of lines, and its writing thread.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use indicatif::{MultiProgress, ProgressDrawTarget};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::lock::lock;

/// Maximum size of waiting notices, statistics and log lines.
pub(crate) const LIMITED_BYTES_MAX: usize = 256 << 10;

/// Policy for an item while the queue is not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverflowPolicy {
    /// Replaced by the next item with this key: progress.
    Latest(usize),
    /// Dropped while more than [`LIMITED_BYTES_MAX`] are queued.
    Limited,
    /// Never dropped. The number of such items is bounded by the caller.
    Always,
}

/// Destination of lines.
pub(super) type LineSink = Arc<dyn AsFd + Send + Sync>;

/// Handle of a queue, with a sink.
#[derive(Clone)]
pub(crate) struct QueueHandle {
    sink: LineSink,
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<ConsoleQueue>,
    changed: Condvar,
    bars: OnceLock<MultiProgress>,
    /// Called when lines were dropped, with their number.
    report_dropped: fn(u64),
}

#[derive(Default)]
struct ConsoleQueue {
    items: VecDeque<ConsoleItem>,
    /// Size of all items.
    bytes: usize,
    /// Number of lines dropped since the last write.
    dropped: u64,
    /// True while the thread writes an item that it has removed from `items`.
    is_writing: bool,
    is_started: bool,
}

struct ConsoleItem {
    keep: OverflowPolicy,
    /// Size of a text; of a drawing 0.
    bytes: usize,
    write: Box<dyn FnOnce(&Shared) + Send>,
}

impl QueueHandle {
    pub(super) fn new(sink: LineSink, report_dropped: fn(u64)) -> Self {
        let shared = Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            bars: OnceLock::new(),
            report_dropped,
        };
        Self { sink, shared: Arc::new(shared) }
    }

    /// Returns a handle of the same queue with another sink.
    pub(super) fn with_sink(&self, sink: LineSink) -> Self {
        Self { sink, shared: Arc::clone(&self.shared) }
    }

    pub(super) fn bars(&self) -> &MultiProgress {
        self.shared.bars.get_or_init(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))
    }

    /// Queues bytes, which are written together.
    pub(crate) fn push(&self, keep: OverflowPolicy, bytes: Vec<u8>) {
        let (sink, length) = (self.sink.clone(), bytes.len());
        let write = Box::new(move |shared: &Shared| shared.text(&sink, &bytes));
        self.shared.push(ConsoleItem { keep, bytes: length, write });
    }

    pub(super) fn push_draw(&self, keep: OverflowPolicy, draw: impl FnOnce() + Send + 'static) {
        self.shared.push(ConsoleItem { keep, bytes: 0, write: Box::new(|_| draw()) });
    }

    /// Starts the thread, unless it is running. If the host has no room for one, what is queued is written here, as it would be lost.
    pub(crate) fn start(&self) {
        let mut queue = lock(&self.shared.queue);
        if !queue.is_started {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("output".into()).spawn(move || shared.write());
            queue.is_started = thread.is_ok();
        }
        while !queue.is_started && !queue.items.is_empty() {
            self.shared.write_next(queue);
            queue = lock(&self.shared.queue);
        }
    }

    /// Waits until at most `bytes_max` are queued. Returns false if the deadline has passed.
    pub(super) fn wait_space(&self, bytes_max: usize, deadline: Instant) -> bool {
        self.shared.wait(deadline, |queue| queue.bytes <= bytes_max)
    }

    /// Waits until everything is written. Returns false if the deadline has passed.
    pub(crate) fn wait_written(&self, deadline: Instant) -> bool {
        self.shared.wait(deadline, |queue| queue.items.is_empty() && !queue.is_writing)
    }
}

impl Shared {
    fn push(&self, item: ConsoleItem) {
        let mut queue = lock(&self.queue);
        match item.keep {
            OverflowPolicy::Limited if queue.bytes + item.bytes > LIMITED_BYTES_MAX => {
                queue.dropped += 1;
                return;
            }
            OverflowPolicy::Latest(_) => {
                let older = queue.items.iter().position(|other| other.keep == item.keep);
                if let Some(older) = older.and_then(|index| queue.items.remove(index)) {
                    queue.bytes -= older.bytes;
                }
            }
            OverflowPolicy::Limited | OverflowPolicy::Always => {}
        }
        queue.bytes += item.bytes;
        queue.items.push_back(item);
        self.changed.notify_all();
    }

    fn wait(&self, deadline: Instant, done: impl Fn(&ConsoleQueue) -> bool) -> bool {
        let mut queue = lock(&self.queue);
        while !done(&queue) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Writes items forever.
    fn write(&self) {
        loop {
            let mut queue = lock(&self.queue);
            while queue.items.is_empty() {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            self.write_next(queue);
        }
    }

    /// Writes the first item, if there is one.
    fn write_next(&self, mut queue: MutexGuard<'_, ConsoleQueue>) {
        let Some(item) = queue.items.pop_front() else { return };
        queue.bytes -= item.bytes;
        queue.is_writing = true;
        let dropped = std::mem::take(&mut queue.dropped);
        drop(queue);
        self.changed.notify_all();
        (item.write)(self);
        if dropped > 0 {
            (self.report_dropped)(dropped);
        }
        lock(&self.queue).is_writing = false;
        self.changed.notify_all();
    }

    fn text(&self, sink: &LineSink, bytes: &[u8]) {
        // A failure cannot be reported. The next line is written anyway: a full disk may have space again.
        let _ = match self.bars.get() {
            Some(bars) => bars.suspend(|| write_all(sink.as_fd(), bytes)),
            None => write_all(sink.as_fd(), bytes),
        };
    }
}

/// Writes everything, also to a descriptor that another process has made non-blocking.
pub(crate) fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(fd, PollFlags::OUT)?,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Waits for a descriptor that another process has made non-blocking.
pub(crate) fn wait_for(fd: BorrowedFd<'_>, events: PollFlags) -> Result<(), Errno> {
    match poll(&mut [PollFd::from_borrowed_fd(fd, events)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::time::Duration;

    use super::*;

    const WITHIN: Duration = Duration::from_secs(60);

    fn pipe() -> (std::io::PipeReader, QueueHandle) {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader, QueueHandle::new(Arc::new(writer), |_| {}))
    }

    fn read(mut reader: std::io::PipeReader, output: &QueueHandle) -> String {
        assert!(output.wait_written(Instant::now() + WITHIN));
        let (mut text, mut buffer) = (String::new(), [0; 1 << 16]);
        while !text.ends_with("end\n") {
            let count = reader.read(&mut buffer).unwrap();
            text.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
        text
    }

    #[test]
    fn progress_replaces_queued_progress_and_phases_stay() {
        let (reader, output) = pipe();
        for (keep, text) in [
            (OverflowPolicy::Always, "phase 1\n"),
            (OverflowPolicy::Latest(0), "progress 1 of a\n"),
            (OverflowPolicy::Latest(1), "progress 1 of b\n"),
            (OverflowPolicy::Always, "phase 2\n"),
            (OverflowPolicy::Latest(0), "progress 2 of a\n"),
            (OverflowPolicy::Always, "end\n"),
        ] {
            output.push(keep, text.into());
        }
        output.start();
        assert_eq!(read(reader, &output), "phase 1\nprogress 1 of b\nphase 2\nprogress 2 of a\nend\n");
    }

    #[test]
    fn unread_output_is_bounded_and_results_are_not_lost() {
        let (reader, output) = pipe();
        let notice = vec![b'n'; 1000];
        for _ in 0..10_000 {
            output.push(OverflowPolicy::Limited, notice.clone());
        }
        output.push(OverflowPolicy::Always, b"end\n".to_vec());
        let queued = lock(&output.shared.queue).bytes;
        let dropped = lock(&output.shared.queue).dropped;
        assert!(queued <= LIMITED_BYTES_MAX + 4, "{queued}");
        assert_eq!(dropped as usize, 10_000 - LIMITED_BYTES_MAX / 1000);
        output.start();
        // A pipe holds 64 KiB, so the rest waits for its reader.
        assert!(!output.wait_written(Instant::now() + Duration::from_millis(1)));
        let reads = thread::spawn({
            let output = output.clone();
            move || {
                let mut all = Vec::new();
                let mut reader = reader;
                let mut buffer = [0; 1 << 16];
                while !all.ends_with(b"end\n") {
                    let count = reader.read(&mut buffer).unwrap();
                    all.extend_from_slice(&buffer[..count]);
                }
                drop(output);
                all.len()
            }
        });
        assert_eq!(reads.join().unwrap(), LIMITED_BYTES_MAX / 1000 * 1000 + 4);
        assert!(output.wait_written(Instant::now() + WITHIN));
    }

    #[test]
    fn writing_to_a_closed_pipe_ends() {
        let (reader, output) = pipe();
        drop(reader);
        output.push(OverflowPolicy::Always, b"lost\n".to_vec());
        output.start();
        assert!(output.wait_written(Instant::now() + WITHIN));
    }
}
