//! Zero-copy sends of a TCP socket (`MSG_ZEROCOPY`): the kernel reads the pages themselves, also after the
//! call.
//!
//! ```text
//!   send(.., ZERO_COPY) ──▶ sendmsg ── number n ──▶ Ledger ◀── completions n..=m ── the socket's error queue
//!                              │ ENOBUFS: wait for completions, at last with a shorter send       ▲ read at each send,
//!                              └──────────────────────────────────────────────────────────────────┘ flush and ticket
//! ```
//!
//! Completions are read as they arrive, because the kernel charges unread ones to `net.core.optmem_max`.
//! Several threads may send, flush and wait for tickets at once; zero-copy sends pass one after the other.
//!
//! The kernel copies where it must: on the loopback interface, to a local tap or container, on network cards
//! without scatter-gather or checksums. Then zero-copy costs more than it saves, which [`Flushed::AllCopied`]
//! reports.
//!
//! Limits: a socket whose completions another process reads too is not usable. A poll of the channel's
//! descriptor returns `POLLERR` while completions are pending; it is not an error of the stream.

mod ledger;
mod mode;

pub use ledger::ZeroCopyStatistics;
pub use mode::ZeroCopySend;

use crate::lock::lock;
use crate::socket::Socket;
use crate::sys::error_queue;
use crate::sys::iobuf::limit;
use crate::wait::{Woken, wait};
use crate::{Error, Flushed, IoBuf, Result, SendFlags, total_len};
use ledger::SendLedger;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Maximum time for which a send waits for the kernel's memory without a completion. A shorter send timeout
/// takes precedence.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of entries that are read at a time, so a flood of errors does not block sending.
const ENTRIES_MAX: usize = 1024;
/// The longest wait before the ledger is checked again, as another thread may have read the awaited
/// completion.
const SLICE: Duration = Duration::from_millis(5);
/// The first pause when a socket in an error has `POLLERR` but no completion.
const PAUSE: Duration = Duration::from_micros(100);
/// A send this short is not shortened further for lack of memory: its charge no longer depends on its length.
const SHORTEST: usize = 4096;

/// A ticket for the zero-copy sends of a channel up to now; see
/// [`Channel::zero_copy_ticket`](crate::Channel::zero_copy_ticket). While they are not finished, the memory
/// may not be unmapped, resized or given other content. Keeps the socket, but not the connection, open.
#[derive(Debug, Clone, Default)]
pub struct ZeroCopyTicket(Option<(Arc<ZeroCopy>, u64)>);

impl ZeroCopyTicket {
    /// Returns true if the memory is free. Never waits.
    ///
    /// # Errors
    /// [`Error::Io`] if reading the error queue fails.
    pub fn is_done(&self) -> Result<bool> {
        let Some((sends, end)) = &self.0 else { return Ok(true) };
        Ok(sends.drain()?.0 >= *end)
    }

    /// Waits until the memory is free, also on a channel that is shut down. If the peer has stopped
    /// receiving, it is free when the kernel gives up the connection, minutes later.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline, [`Error::Io`] if reading the error queue fails.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        let Some((sends, end)) = &self.0 else { return Ok(()) };
        sends.wait(*end, &Until::Deadline(deadline))
    }
}

/// The zero-copy side of a socket.
#[derive(Debug)]
pub(crate) struct ZeroCopy {
    socket: Arc<Socket>,
    /// Held during a call, so it is known whether a number was given out.
    turn: Mutex<()>,
    ledger: Mutex<SendLedger>,
    /// Both halves were shut down: only tickets still wait.
    ended: AtomicBool,
}

/// Time to wait.
enum Until {
    Deadline(Instant),
    /// The time limit without a completion has passed, and the channel is not shut down.
    Idle(Option<Duration>),
}

impl ZeroCopy {
    /// The socket's option is set, and no zero-copy send was made yet.
    pub(crate) fn new(socket: Arc<Socket>) -> Self {
        Self { socket, turn: Mutex::default(), ledger: Mutex::default(), ended: AtomicBool::new(false) }
    }

    pub(crate) fn statistics(&self) -> ZeroCopyStatistics {
        lock(&self.ledger).statistics
    }

    pub(crate) fn zero_copy_ticket(self: &Arc<Self>) -> ZeroCopyTicket {
        let (issued, finished) = {
            let ledger = lock(&self.ledger);
            (ledger.issued(), ledger.finished())
        };
        ZeroCopyTicket((finished < issued).then(|| (Arc::clone(self), issued)))
    }

    /// Wakes the threads that wait in `flush` or for memory.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(crate) fn flush(&self) -> Result<Flushed> {
        let issued = lock(&self.ledger).issued();
        self.wait(issued, &Until::Idle(self.socket.timeout(Timeout::Send)))?;
        let mut ledger = lock(&self.ledger);
        match ledger.failure() {
            Some(errno) => {
                Err(Error::io("flush", self.socket.peer(), std::io::Error::from_raw_os_error(errno)))
            }
            None => Ok(ledger.verdict()),
        }
    }

    pub(crate) fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        let mut most = total_len(bufs);
        if most == 0 {
            return Ok(0);
        }
        let _turn = lock(&self.turn);
        let (mut finished, _) = self.drain()?;
        let timeout = self.socket.timeout(Timeout::Send).map_or(MEMORY_TIMEOUT, |t| t.min(MEMORY_TIMEOUT));
        let mut hungry_since = None;
        loop {
            let source = match self.call(&limit(bufs, most), flags) {
                Ok(sent) => return Ok(sent),
                Err(source) if source.raw_os_error() == Some(libc::ENOBUFS) => source,
                Err(source) => return Err(self.socket.failed("send", Timeout::Send, source)),
            };
            lock(&self.ledger).statistics.no_memory += 1;
            let (now_finished, _) = self.drain()?;
            let outstanding = now_finished < lock(&self.ledger).issued();
            if now_finished > finished {
                (finished, hungry_since) = (now_finished, None);
            } else if !outstanding && most > SHORTEST {
                most /= 2;
            } else if hungry_since.get_or_insert_with(Instant::now).elapsed() >= timeout {
                return Err(no_memory(self.socket.peer(), timeout, source));
            } else {
                self.doze(SLICE)?;
            }
        }
    }

    fn call(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> std::io::Result<usize> {
        lock(&self.ledger).begin();
        let result = self.socket.send_once(bufs, flags);
        lock(&self.ledger).end(result.as_ref().ok().copied());
        result
    }

    /// Drains the error queue; returns the number below which all sends have finished, and true if there were
    /// entries.
    fn drain(&self) -> Result<(u64, bool)> {
        // Read and recorded under one lock: a thread that finds the queue empty must find the entries
        // recorded.
        let mut ledger = lock(&self.ledger);
        let found = read(&mut ledger, self.socket.fd())
            .map_err(|source| Error::io("read completions", self.socket.peer(), source))?;
        Ok((ledger.finished(), found))
    }

    fn wait(&self, target: u64, until: &Until) -> Result<()> {
        let (mut began, mut last, mut pause) = (Instant::now(), 0, PAUSE);
        loop {
            let (finished, found) = self.drain()?;
            if finished >= target {
                return Ok(());
            }
            if finished > last {
                (began, last) = (Instant::now(), finished);
            }
            let left = self.time_left(began, until)?;
            if self.doze(left.min(SLICE))? == Woken::Ready && !found {
                // In an error or at its end, the socket is always ready: it cannot be waited for.
                std::thread::sleep(pause.min(left));
                pause = (pause * 2).min(SLICE);
            } else {
                pause = PAUSE;
            }
        }
    }

    fn time_left(&self, began: Instant, until: &Until) -> Result<Duration> {
        let (op, limit, left) = match until {
            Until::Deadline(deadline) => {
                ("wait for a ticket", began.elapsed(), deadline.saturating_duration_since(Instant::now()))
            }
            Until::Idle(_) if self.ended.load(Ordering::Acquire) => {
                return Err(Error::io("flush", self.socket.peer(), Errno::PIPE));
            }
            Until::Idle(None) => return Ok(SLICE),
            Until::Idle(Some(limit)) => ("flush", *limit, limit.saturating_sub(began.elapsed())),
        };
        if left.is_zero() { Err(Error::timeout(op, self.socket.peer(), limit)) } else { Ok(left) }
    }

    /// Waits until the error queue may have entries, for at most this time.
    fn doze(&self, at_most: Duration) -> Result<Woken> {
        wait(self.socket.fd().as_fd(), PollFlags::empty(), None, Some(Instant::now() + at_most))
            .map_err(|errno| Error::io("wait for completions", self.socket.peer(), errno))
    }
}

/// Records the entries of a socket's error queue. Returns true if there were any.
fn read(ledger: &mut SendLedger, socket: BorrowedFd<'_>) -> std::io::Result<bool> {
    let mut found = false;
    for _ in 0..ENTRIES_MAX {
        if ledger.finished() == ledger.open_end() {
            break;
        }
        match error_queue::read_entry(socket)? {
            Some(report) => ledger.book(report),
            None => break,
        }
        found = true;
    }
    Ok(found)
}

fn no_memory(peer: &str, after: Duration, source: std::io::Error) -> Error {
    let optmem = std::fs::read_to_string("/proc/sys/net/core/optmem_max");
    let memlock = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    Error::ZeroCopyMemory {
        peer: peer.to_owned(),
        after,
        optmem_max: optmem.map_or_else(|_| "unknown".to_owned(), |text| format!("{} bytes", text.trim())),
        memlock: memlock.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes")),
        source,
    }
}
