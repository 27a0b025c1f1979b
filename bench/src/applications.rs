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
use towline_channel::lock::lock;
use towline_lab::Towline as Process;

use crate::options::Bench;
use crate::stats::quantiles;
use crate::table::Figures;
use crate::vhost::{Signals, Window, window};

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

/// Running applications, and the guests that they run in or talk to.
#[derive(Default)]
pub(crate) struct Applications {
    pub(crate) signals: Arc<Signals>,
    threads: Vec<JoinHandle<Result<()>>>,
    /// Those end after the applications that they respond to.
    guests: Vec<JoinHandle<Result<()>>>,
    /// One end of each stream, to shut it down.
    streams: Arc<Mutex<Vec<File>>>,
    /// In microseconds.
    latencies: Arc<Mutex<Vec<f64>>>,
}

impl Applications {
    /// Runs this in a thread, which returns at the end of the measurement.
    pub(crate) fn spawn(&mut self, body: impl FnOnce(&Signals) -> Result<()> + Send + 'static) {
        let signals = Arc::clone(&self.signals);
        self.threads.push(std::thread::spawn(move || match body(&signals) {
            Err(_) if signals.is_over() => Ok(()),
            ended => ended,
        }));
    }

    /// Runs a guest in a thread, which returns when the power is off.
    pub(crate) fn guest(&mut self, body: impl FnOnce(&Signals) -> Result<()> + Send + 'static) {
        let signals = Arc::clone(&self.signals);
        self.guests.push(std::thread::spawn(move || body(&signals)));
    }

    /// Has this stream shut down at the end.
    fn keep(&self, stream: &File) -> Result<()> {
        lock(&self.streams).push(stream.try_clone()?);
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
            lock(&all).append(&mut latencies);
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
                        lock(&streams).push(stream.try_clone()?);
                    }
                    serve(stream, service, signals);
                }
                Ok(())
            });
        }
    }

    /// Waits until one fails, which does not happen as long as the other end exists.
    pub(crate) fn wait(self) -> Result<()> {
        self.threads.into_iter().try_for_each(joined)
    }

    /// Measures a window once they have started. The exit of the backend is the reason of every other error.
    pub(crate) fn window(
        &self,
        started: Result<()>,
        backend: Option<&mut Process>,
        bench: &Bench,
        length: Duration,
    ) -> Result<Window> {
        let pid = backend.as_ref().map(|backend| backend.pid());
        let measured = started.and_then(|()| window(&self.signals, pid, bench.window(length), &bench.cancel));
        backend.map_or(Ok(()), Process::check)?;
        measured
    }

    /// Measures this traffic in a window once they have started, and ends them.
    pub(crate) fn measure(
        self,
        started: Result<()>,
        backend: Option<&mut Process>,
        bench: &Bench,
        length: Duration,
        traffic: Traffic,
    ) -> Result<Figures> {
        let measured = self.window(started, backend, bench, length);
        let latencies = self.end();
        let mut figures = measured?.figures(traffic);
        figures.extend(latencies?);
        Ok(figures)
    }

    /// Ends all threads. Returns the figures of latencies, if there are any, or the first error.
    pub(crate) fn end(self) -> Result<Figures> {
        self.signals.stop.store(true, Ordering::Relaxed);
        for stream in lock(&self.streams).drain(..) {
            // It may be shut down already.
            let _ = shutdown(&stream, Shutdown::Both);
        }
        let first = |outcome: Result<()>, thread| outcome.and(joined(thread));
        let ended = self.threads.into_iter().fold(Ok(()), first);
        self.signals.power_off.store(true, Ordering::Relaxed);
        self.guests.into_iter().fold(ended, first)?;
        let latencies = std::mem::take(&mut *lock(&self.latencies));
        Ok(Figures::from_iter(quantiles(latencies, [("p50 µs", 0.5), ("p99 µs", 0.99)])))
    }
}

impl Window {
    /// Figures of streams, whose units are bytes, or of requests.
    fn figures(&self, traffic: Traffic) -> Figures {
        let (rate, machine) = (self.rate(), self.machine_percent);
        let (both, backend_seconds) = (self.backend_percent + self.own_percent, self.backend_seconds());
        let mut figures =
            Figures::from([("backend % CPU", self.backend_percent), ("machine % CPU", machine)]);
        figures.extend(if traffic.is_stream() {
            [
                ("Gbit/s", rate * 8e-9),
                ("Mbit/s per % CPU", rate / both * 8e-6),
                ("norm Mbit/s", rate / machine * 8e-6),
                ("backend ms/GB", backend_seconds * 1e12),
            ]
        } else {
            [
                ("1/s", rate),
                ("1/s per % CPU", rate / both),
                ("norm", rate / machine),
                ("backend µs", backend_seconds * 1e6),
            ]
        });
        figures
    }
}

/// Waits for the end of a thread.
fn joined(thread: JoinHandle<Result<()>>) -> Result<()> {
    thread.join().expect("the thread does not panic")
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
