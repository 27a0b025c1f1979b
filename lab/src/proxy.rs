//! A TCP proxy in front of a destination: a link that a test slows down, holds, or cuts at a chosen point.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::net::sockopt::set_socket_linger;

use crate::lines::is_timeout;

/// Interval at which a test's settings are read.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const BUFFER_BYTES: usize = 16 << 10;
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// A direction of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// From the source to the destination.
    ToDestination,
    /// From the destination to the source.
    ToSource,
}

/// Action of the proxy where it finds the bytes of a [`Trigger`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Forwards nothing in this direction until [`Proxy::release`].
    Hold(Flow),
    /// Resets all connections and accepts no more.
    Cut,
}

/// Bytes of a stream, and the action at their first occurrence.
#[derive(Debug, Clone)]
pub struct Trigger {
    /// Direction in which they are searched for.
    pub flow: Flow,
    /// Bytes to find.
    pub bytes: Vec<u8>,
    /// True if the bytes themselves are forwarded before the action.
    pub forwards: bool,
    /// Action.
    pub action: Action,
}

/// A link through the proxy; see the module's text. Dropping it cuts the link.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Bytes per second in each direction; 0: unlimited.
    rate: AtomicU64,
    held: [AtomicBool; 2],
    cut: AtomicBool,
    fired: AtomicBool,
    forwarded: [AtomicU64; 2],
    trigger: Mutex<Option<Trigger>>,
}

/// One direction of one connection.
struct Direction {
    flow: Flow,
    /// Bytes that are received and not yet forwarded.
    pending: Vec<u8>,
    /// Number of those bytes that may be forwarded before the trigger's action, once its bytes are found.
    action: Option<(usize, Action)>,
    /// The last bytes received, which may be the beginning of the trigger's.
    tail: Vec<u8>,
    /// The sender has closed its direction; the receiver's is closed too.
    ended: bool,
    closed: bool,
    /// Time before which no more is forwarded.
    next: Instant,
}

impl Proxy {
    /// Listens on a free port, and connects to `destination` for each connection.
    pub fn start(destination: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared::default());
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            while !accepting.is_cut() {
                match listener.accept() {
                    Ok((source, _)) => {
                        let shared = Arc::clone(&accepting);
                        // To its peers, a connection that cannot be made or breaks is one that ends.
                        std::thread::spawn(move || shared.join(&source, destination));
                    }
                    Err(_) => std::thread::sleep(LOOK_INTERVAL),
                }
            }
        });
        Ok(Self { address, shared })
    }

    /// Address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Limits each connection to `rate` bytes per second in each direction.
    pub fn limit(&self, rate: u64) {
        self.shared.rate.store(rate, Ordering::Release);
    }

    /// Sets the trigger, for the next occurrence of its bytes.
    pub fn set_trigger(&self, trigger: Trigger) {
        *self.shared.trigger() = Some(trigger);
    }

    /// Returns true if the trigger's bytes were found.
    pub fn has_fired(&self) -> bool {
        self.shared.fired.load(Ordering::Acquire)
    }

    /// Bytes forwarded in this direction.
    pub fn forwarded(&self, flow: Flow) -> u64 {
        self.shared.forwarded[flow as usize].load(Ordering::Acquire)
    }

    /// Holds this direction until it is released.
    pub fn hold(&self, flow: Flow) {
        self.shared.held[flow as usize].store(true, Ordering::Release);
    }

    /// Forwards in both directions.
    pub fn release(&self) {
        self.shared.held.iter().for_each(|held| held.store(false, Ordering::Release));
    }

    /// Resets all connections and accepts no more.
    pub fn cut(&self) {
        self.shared.cut.store(true, Ordering::Release);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Shared {
    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    fn trigger(&self) -> MutexGuard<'_, Option<Trigger>> {
        self.trigger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forwards in both directions until both have ended, one breaks, or the link is cut.
    fn join(&self, source: &TcpStream, destination: SocketAddr) -> Result<()> {
        let destination = &TcpStream::connect_timeout(&destination, CONNECT_WITHIN)?;
        for stream in [source, destination] {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        let mut directions = [Direction::new(Flow::ToDestination), Direction::new(Flow::ToSource)];
        while !self.is_cut() && !directions.iter().all(|direction| direction.closed) {
            let mut moved = false;
            for direction in &mut directions {
                let (from, to) = match direction.flow {
                    Flow::ToDestination => (source, destination),
                    Flow::ToSource => (destination, source),
                };
                moved |= direction.receive(self, from)?;
                moved |= direction.forward(self, to)?;
            }
            if !moved {
                std::thread::sleep(LOOK_INTERVAL);
            }
        }
        if self.is_cut() {
            // Reset, as on a lost link, not closed in order.
            for stream in [source, destination] {
                set_socket_linger(stream, Some(Duration::ZERO))?;
            }
        }
        Ok(())
    }

    fn act(&self, action: Action) {
        match action {
            Action::Hold(flow) => self.held[flow as usize].store(true, Ordering::Release),
            Action::Cut => self.cut.store(true, Ordering::Release),
        }
        self.fired.store(true, Ordering::Release);
    }
}

impl Direction {
    fn new(flow: Flow) -> Self {
        let (pending, tail) = (Vec::new(), Vec::new());
        Self { flow, pending, action: None, tail, ended: false, closed: false, next: Instant::now() }
    }

    /// Receives what is available, unless enough is pending. False if nothing was received.
    fn receive(&mut self, shared: &Shared, mut from: &TcpStream) -> Result<bool> {
        if self.ended || !self.pending.is_empty() {
            return Ok(false);
        }
        let mut buffer = [0; BUFFER_BYTES];
        let Some(received) = if_ready(from.read(&mut buffer))? else { return Ok(false) };
        self.ended = received == 0;
        self.pending.extend(&buffer[..received]);
        self.look_for(shared, &buffer[..received]);
        Ok(true)
    }

    /// Searches the last received bytes for the trigger's.
    fn look_for(&mut self, shared: &Shared, received: &[u8]) {
        let mut trigger = shared.trigger();
        let Some(wanted) = trigger.as_ref().filter(|trigger| trigger.flow == self.flow) else { return };
        let before = self.tail.len();
        self.tail.extend_from_slice(received);
        let found = self.tail.windows(wanted.bytes.len()).position(|window| window == wanted.bytes);
        let Some(at) = found else {
            let kept = self.tail.len().min(wanted.bytes.len() - 1);
            self.tail.drain(..self.tail.len() - kept);
            return;
        };
        let end = if wanted.forwards { at + wanted.bytes.len() } else { at };
        self.action = Some((end.saturating_sub(before), wanted.action));
        *trigger = None;
    }

    /// Acts if all bytes before the action have been forwarded.
    fn act_when_due(&mut self, shared: &Shared) {
        if let Some((0, action)) = self.action {
            self.action = None;
            shared.act(action);
        }
    }

    /// Sends what may be sent. False if nothing could be sent.
    fn forward(&mut self, shared: &Shared, mut to: &TcpStream) -> Result<bool> {
        self.act_when_due(shared);
        if shared.is_cut() || shared.held[self.flow as usize].load(Ordering::Acquire) {
            return Ok(false);
        }
        if self.pending.is_empty() {
            if self.ended && !self.closed {
                self.closed = true;
                to.shutdown(Shutdown::Write)?;
            }
            return Ok(false);
        }
        if Instant::now() < self.next {
            return Ok(false);
        }
        let may = self.action.map_or(self.pending.len(), |(left, _)| left);
        let Some(sent) = if_ready(to.write(&self.pending[..may]))? else { return Ok(false) };
        self.pending.drain(..sent);
        if let Some((left, _)) = &mut self.action {
            *left -= sent;
        }
        shared.forwarded[self.flow as usize].fetch_add(sent as u64, Ordering::AcqRel);
        // At once: the other direction must not forward an answer to these bytes before it is held.
        self.act_when_due(shared);
        let rate = shared.rate.load(Ordering::Acquire);
        if rate > 0 {
            self.next = Instant::now() + Duration::from_secs_f64(sent as f64 / rate as f64);
        }
        Ok(true)
    }
}

/// `None` if the socket was not ready.
fn if_ready(moved: io::Result<usize>) -> io::Result<Option<usize>> {
    match moved {
        Err(error) if is_timeout(error.kind()) => Ok(None),
        moved => moved.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A proxy, and both ends of a connection through it.
    fn joined() -> (Proxy, TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap()).unwrap();
        let source = TcpStream::connect(proxy.address()).unwrap();
        let (destination, _) = listener.accept().unwrap();
        for stream in [&source, &destination] {
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        }
        (proxy, source, destination)
    }

    #[test]
    fn a_trigger_in_two_segments_cuts_after_or_before_its_bytes() {
        for (forwards, expected) in [(true, &b"abcd"[..]), (false, b"ab")] {
            let (proxy, mut source, mut destination) = joined();
            let (flow, action) = (Flow::ToDestination, Action::Cut);
            proxy.set_trigger(Trigger { flow, bytes: b"bcd".to_vec(), forwards, action });
            source.write_all(b"ab").unwrap();
            let mut first = [0; 2];
            destination.read_exact(&mut first).unwrap();
            source.write_all(b"cde").unwrap();
            let mut rest = Vec::new();
            // Forwarded bytes come first, then the reset.
            let error = destination.read_to_end(&mut rest).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
            assert_eq!([&first[..], &rest].concat(), expected);
            assert!(proxy.has_fired());
        }
    }

    #[test]
    fn held_bytes_arrive_when_the_link_is_released() {
        let (proxy, mut source, mut destination) = joined();
        proxy.hold(Flow::ToDestination);
        source.write_all(b"late").unwrap();
        destination.write_all(b"now").unwrap();
        let mut now = [0; 3];
        source.read_exact(&mut now).unwrap();
        assert_eq!(proxy.forwarded(Flow::ToDestination), 0);
        proxy.release();
        let mut late = [0; 4];
        destination.read_exact(&mut late).unwrap();
        assert_eq!((&now, &late), (b"now", b"late"));
    }
}
