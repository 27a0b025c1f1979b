//! Applications at the ends of a device: streams, requests and connections, over sockets of any family.
//!
//! ```text
//!   write ── messages ──► serve(Read)        counted by one of them
//!   request ── message ──► serve(Echo) ──► the same message, and the time that this took
//! ```
//! Each is a thread, which inherits the network namespace of its creator, and ends on the shutdown of its socket after the signal.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, set_tcp_nodelay};
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use serde::{Deserialize, Serialize};

use crate::vhost::Signals;

/// Timeout of a connection and of a response.
pub(crate) const WITHIN: Duration = Duration::from_secs(15);
/// Size of a receiving application's reads.
const READ_BYTES: usize = 256 << 10;
/// Read timeouts of a server, after which a connection without data is lost; on a new connection for each request soon.
const LOST_AFTER: Duration = Duration::from_secs(5);
const REQUEST_LOST_AFTER: Duration = Duration::from_secs(1);
/// Interval in which a waiting server checks for the end.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(20);

/// Kind of traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// A stream to the guest.
    ToGuest,
    /// A stream from the guest.
    FromGuest,
    /// Requests on one connection.
    Request,
    /// Requests on a connection each.
    Connection,
}

impl Kind {
    pub(crate) const STREAMS: [Self; 2] = [Self::ToGuest, Self::FromGuest];
    pub(crate) const REQUESTS: [Self; 2] = [Self::Request, Self::Connection];
}

/// Work of the applications, in messages of `size` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Traffic {
    pub(crate) kind: Kind,
    pub(crate) size: usize,
    pub(crate) sessions: usize,
}

impl Traffic {
    /// Each kind with each number of sessions and each size.
    pub(crate) fn all(kinds: [Kind; 2], sizes: &[usize], sessions: &[usize]) -> Vec<Self> {
        let of = |kind| {
            sessions
                .iter()
                .flat_map(move |&sessions| sizes.iter().map(move |&size| Self { kind, size, sessions }))
        };
        kinds.into_iter().flat_map(of).collect()
    }

    pub(crate) fn is_stream(self) -> bool {
        Kind::STREAMS.contains(&self.kind)
    }

    /// Service of the end that is connected to.
    pub(crate) fn service(self) -> Service {
        match self.kind {
            Kind::ToGuest | Kind::FromGuest => Service::Read,
            Kind::Request => Service::Echo,
            Kind::Connection => Service::EchoOnce,
        }
    }
}

/// The end that counts the bytes of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountedBy {
    Writer,
    Reader,
}

/// Use of a connection by a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    /// Reads and counts bytes.
    Read,
    /// Sends back what it reads.
    Echo,
    /// The same, for one request.
    EchoOnce,
    /// Sends messages of the size that the peer requests, until it closes.
    Send,
}

/// Connects to the other end.
pub(crate) type Dial = Arc<dyn Fn() -> Result<File> + Send + Sync>;

/// Running applications.
pub(crate) struct Applications {
    signals: Arc<Signals>,
    threads: Vec<JoinHandle<Result<()>>>,
    /// One end of each stream, to shut it down.
    streams: Arc<Mutex<Vec<File>>>,
    /// In microseconds.
    latencies: Arc<Mutex<Vec<f64>>>,
}

impl Applications {
    pub(crate) fn new(signals: &Arc<Signals>) -> Self {
        let signals = Arc::clone(signals);
        Self { signals, threads: Vec::new(), streams: Arc::default(), latencies: Arc::default() }
    }

    /// Runs this in a thread, which returns at the end of the measurement.
    pub(crate) fn spawn(&mut self, body: impl FnOnce(&Signals) -> Result<()> + Send + 'static) {
        let signals = Arc::clone(&self.signals);
        self.threads.push(std::thread::spawn(move || match body(&signals) {
            Err(_) if signals.is_over() => Ok(()),
            ended => ended,
        }));
    }

    /// Has this stream shut down at the end.
    fn keep(&self, stream: &File) -> Result<()> {
        self.streams.lock().expect("no thread panics with it").push(stream.try_clone()?);
        Ok(())
    }

    /// Connects the clients of this traffic, which write or send requests.
    pub(crate) fn connect(&mut self, dial: &Dial, traffic: Traffic, counted_by: CountedBy) -> Result<()> {
        (0..traffic.sessions).try_for_each(|_| match traffic.kind {
            Kind::ToGuest | Kind::FromGuest => self.write(dial()?, traffic.size, counted_by),
            Kind::Request | Kind::Connection => self.request(dial, traffic),
        })
    }

    /// Writes messages of `size` bytes.
    fn write(&mut self, mut stream: File, size: usize, counted_by: CountedBy) -> Result<()> {
        self.keep(&stream)?;
        self.spawn(move |signals| {
            let message = vec![0x5a; size];
            while !signals.is_over() {
                stream.write_all(&message).context("sending")?;
                if counted_by == CountedBy::Writer {
                    signals.add(size as u64);
                }
            }
            Ok(())
        });
        Ok(())
    }

    /// Reads and counts bytes.
    pub(crate) fn read(&mut self, stream: File) -> Result<()> {
        self.keep(&stream)?;
        self.spawn(move |signals| {
            serve(stream, Service::Read, signals);
            Ok(())
        });
        Ok(())
    }

    /// Sends requests and waits for their responses.
    fn request(&mut self, dial: &Dial, traffic: Traffic) -> Result<()> {
        let (first, dial, all) = (dial()?, Arc::clone(dial), Arc::clone(&self.latencies));
        let is_kept = traffic.kind == Kind::Request;
        // A clone would keep a connection open that its client closes.
        if is_kept {
            self.keep(&first)?;
        }
        self.spawn(move |signals| {
            let (mut latencies, mut bytes, mut known) = (Vec::new(), vec![0x5a; traffic.size], Some(first));
            while !signals.is_over() {
                let started = Instant::now();
                let responded = known.take().map_or_else(|| dial(), Ok).and_then(|mut stream| {
                    stream
                        .write_all(&bytes)
                        .and_then(|()| stream.read_exact(&mut bytes))
                        .context("no response")?;
                    Ok(is_kept.then_some(stream))
                });
                if signals.is_over() {
                    break;
                }
                known = responded?;
                signals.add(1);
                if signals.measuring.load(Ordering::Relaxed) {
                    latencies.push(started.elapsed().as_secs_f64() * 1e6);
                }
            }
            all.lock().expect("no thread panics with it").append(&mut latencies);
            Ok(())
        });
        Ok(())
    }

    /// Serves as many connections at a time as there are sessions. All threads exist before they are needed, since their creation
    /// would be measured otherwise. The listener does not block.
    pub(crate) fn serve(&mut self, listener: impl Into<OwnedFd>, service: Service, sessions: usize) {
        let listener = Arc::new(listener.into());
        let is_kept = service != Service::EchoOnce;
        let lost_after = if is_kept { LOST_AFTER } else { REQUEST_LOST_AFTER };
        for _ in 0..sessions {
            let (listener, streams) = (Arc::clone(&listener), Arc::clone(&self.streams));
            self.spawn(move |signals| {
                while let Some(stream) = accept(&listener, signals, lost_after)? {
                    if is_kept {
                        streams.lock().expect("no thread panics with it").push(stream.try_clone()?);
                    }
                    serve(stream, service, signals);
                }
                Ok(())
            });
        }
    }

    /// Waits until one fails, which does not happen as long as the other end exists.
    pub(crate) fn wait(self) -> Result<()> {
        let ended = |thread: JoinHandle<Result<()>>| thread.join().expect("the thread does not panic");
        self.threads.into_iter().try_for_each(ended)
    }

    /// Ends all threads. Returns the latencies in microseconds, or the first error.
    pub(crate) fn end(self) -> Result<Vec<f64>> {
        self.signals.stop.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().expect("no thread panics with it").drain(..) {
            // It may be shut down already.
            let _ = shutdown(&stream, Shutdown::Both);
        }
        let mut outcome = Ok(());
        for thread in self.threads {
            outcome = outcome.and(thread.join().expect("the thread does not panic"));
        }
        outcome?;
        Ok(std::mem::take(&mut self.latencies.lock().expect("no thread panics with it")))
    }
}

/// Accepts the next connection; `None` at the end of the measurement.
fn accept(listener: &OwnedFd, signals: &Signals, lost_after: Duration) -> Result<Option<File>> {
    while !signals.is_over() {
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(stream) => {
                set_socket_timeout(&stream, Timeout::Recv, Some(lost_after))?;
                // Only TCP delays.
                let _ = set_tcp_nodelay(&stream, true);
                return Ok(Some(stream.into()));
            }
            Err(Errno::AGAIN) => {
                towline_frontend::wait_any(&[listener.as_fd()], ACCEPT_INTERVAL)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Serves a connection until its end.
fn serve(mut stream: File, service: Service, signals: &Signals) {
    let (mut bytes, mut is_known) = (vec![0; READ_BYTES], false);
    if service == Service::Send {
        let mut size = [0; 4];
        if stream.read_exact(&mut size).is_ok() {
            bytes.resize(u32::from_le_bytes(size) as usize, 0x5a);
            while stream.write_all(&bytes).is_ok() {}
        }
        return;
    }
    loop {
        let len = match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(len) => len,
            // A flooded backend may drop the packets that open or close a connection, which then has no other end.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let is_lost = !is_known || service == Service::EchoOnce;
                if is_lost || signals.is_over() {
                    return;
                }
                continue;
            }
            Err(_) => return,
        };
        is_known = true;
        match service {
            Service::Read => signals.add(len as u64),
            Service::Send => {}
            Service::Echo | Service::EchoOnce => {
                if stream.write_all(&bytes[..len]).is_err() {
                    return;
                }
            }
        }
    }
}
