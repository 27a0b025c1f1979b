//! Channels that send by simpler methods, and one that counts calls.
//!
//! ```text
//!   engine ─► Linear | OnePage ─► Counted ─► TCP
//! ```

use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use towline_channel::{
    CallCounters, Capabilities, Channel, ChannelExt, Flushed, IoBuf, IoBufMut, RecvFlags, Result, SendFlags,
    ZeroCopyStatistics, ZeroCopyTicket, gather, total_len,
};

/// QEMU's linear buffer before its stream took vectors.
const LINEAR_BYTES: usize = 32 << 10;
const PAGE_BYTES: usize = 4096;
/// Interval of timed calls, as reading a thread's clock is a system call too.
const TIMED_EVERY: u64 = 8;

/// Send calls of all channels of a migration.
#[derive(Debug, Default)]
pub(super) struct Calls {
    sends: AtomicU64,
    timed: AtomicU64,
    timed_ns: AtomicU64,
}

impl Calls {
    pub(super) fn sends(&self) -> u64 {
        self.sends.load(Ordering::Relaxed)
    }

    /// Returns the CPU time of a call in nanoseconds.
    pub(super) fn call_ns(&self) -> f64 {
        let timed = self.timed.load(Ordering::Relaxed).max(1);
        self.timed_ns.load(Ordering::Relaxed) as f64 / timed as f64
    }
}

/// Counts and times send calls.
#[derive(Debug)]
pub(super) struct Counted {
    inner: Box<dyn Channel>,
    calls: Arc<Calls>,
}

/// Copies data into a linear buffer, which is written when it is full or no data follows.
#[derive(Debug)]
pub(super) struct Linear {
    inner: Box<dyn Channel>,
    buffer: Mutex<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    filled: usize,
}

/// Sends one page per call.
#[derive(Debug)]
pub(super) struct OnePage {
    inner: Box<dyn Channel>,
}

impl Counted {
    pub(super) fn new(inner: Box<dyn Channel>, calls: &Arc<Calls>) -> Self {
        Self { inner, calls: Arc::clone(calls) }
    }
}

impl Linear {
    pub(super) fn new(inner: Box<dyn Channel>) -> Self {
        let buffer = Mutex::new(Buffer { bytes: vec![0; LINEAR_BYTES], filled: 0 });
        Self { inner, buffer }
    }
}

impl OnePage {
    pub(super) fn new(inner: Box<dyn Channel>) -> Self {
        Self { inner }
    }
}

/// Forwards all functions but `send`.
macro_rules! forward {
    () => {
        fn peer(&self) -> &str {
            self.inner.peer()
        }
        fn capabilities(&self) -> Capabilities {
            self.inner.capabilities()
        }
        fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
            self.inner.recv(bufs, flags)
        }
        fn calls(&self) -> Option<Arc<CallCounters>> {
            self.inner.calls()
        }
        fn flush(&self) -> Result<Flushed> {
            self.inner.flush()
        }
        fn zero_copy_ticket(&self) -> ZeroCopyTicket {
            self.inner.zero_copy_ticket()
        }
        fn zero_copy_statistics(&self) -> Option<ZeroCopyStatistics> {
            self.inner.zero_copy_statistics()
        }
        fn shutdown(&self, how: Shutdown) -> Result<()> {
            self.inner.shutdown(how)
        }
        fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()> {
            self.inner.set_timeouts(recv, send)
        }
        fn as_fd(&self) -> Option<BorrowedFd<'_>> {
            self.inner.as_fd()
        }
        fn finish(&self, deadline: Instant) -> Result<()> {
            self.inner.finish(deadline)
        }
    };
}

impl Channel for Counted {
    forward!();

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        let number = self.calls.sends.fetch_add(1, Ordering::Relaxed);
        if !number.is_multiple_of(TIMED_EVERY) {
            return self.inner.send(bufs, flags);
        }
        let before = thread_cpu_ns();
        let sent = self.inner.send(bufs, flags);
        self.calls.timed_ns.fetch_add(thread_cpu_ns() - before, Ordering::Relaxed);
        self.calls.timed.fetch_add(1, Ordering::Relaxed);
        sent
    }
}

impl Channel for Linear {
    forward!();

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let Buffer { bytes, filled } = &mut *buffer;
        let taken = gather(bufs, &mut bytes[*filled..]);
        *filled += taken;
        let is_last = taken == total_len(bufs) && !flags.contains(SendFlags::MORE);
        if *filled == bytes.len() || is_last {
            self.inner.send_all(&[IoBuf::from(&bytes[..*filled])], SendFlags::empty())?;
            *filled = 0;
        }
        Ok(taken)
    }
}

impl Channel for OnePage {
    forward!();

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        match bufs.iter().find(|buf| !buf.is_empty()) {
            Some(first) => self.inner.send(&[first.prefix(PAGE_BYTES)], flags),
            None => Ok(0),
        }
    }
}

fn thread_cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_channel::pair;

    /// Sends 100,000 bytes as a header and pages. Returns the received bytes and the number of calls.
    fn sent(layer: impl FnOnce(Box<dyn Channel>) -> Box<dyn Channel>) -> (Vec<u8>, u64) {
        let (one, other) = pair(1 << 20);
        let calls = Arc::<Calls>::default();
        let channel = layer(Box::new(Counted::new(Box::new(one), &calls)));
        let bytes: Vec<u8> = (0..100_000_u32).map(|number| number.to_le_bytes()[0]).collect();
        channel
            .send_all(&[IoBuf::from(&bytes[..1344]), IoBuf::from(&bytes[1344..])], SendFlags::empty())
            .unwrap();
        let mut received = vec![0; bytes.len()];
        other.recv_exact(&mut [IoBufMut::from(&mut received[..])]).unwrap();
        assert_eq!(received, bytes);
        (received, calls.sends())
    }

    #[test]
    fn layers_change_the_calls_and_not_the_data() {
        assert_eq!(sent(|channel| channel).1, 1);
        assert_eq!(sent(|channel| Box::new(Linear::new(channel))).1, 100_000_u64.div_ceil(32 << 10));
        assert_eq!(
            sent(|channel| Box::new(OnePage::new(channel))).1,
            1 + (100_000_u64 - 1344).div_ceil(4096)
        );
    }
}
