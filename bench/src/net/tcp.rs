//! TCP between two hosts: streams, requests, connections.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::hosts::{INSIDE, OUTSIDE, enter};
use crate::vhost::Signals;
use crate::vhost::latency::Latencies;

pub(super) const PORT: u16 = 5000;
const READ_BYTES: usize = 256 << 10;
const WITHIN: Duration = Duration::from_secs(15);
/// Read timeout of a server, after which it checks for the end.
const LOST_AFTER: Duration = Duration::from_secs(1);
const ACCEPT_INTERVAL: Duration = Duration::from_millis(2);
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Work of the applications.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Traffic {
    /// One direction, in messages of `size` bytes.
    Stream { size: usize, sessions: usize, to_guest: bool },
    /// Request and response of `size` bytes, from outside; `reconnects`: each on a new connection.
    Request { size: usize, sessions: usize, reconnects: bool },
}

/// The applications of both hosts.
pub(super) struct Applications {
    threads: Vec<JoinHandle<Result<()>>>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    latencies: Arc<Mutex<Latencies>>,
    connected: Arc<AtomicUsize>,
}

impl Applications {
    /// Starts servers, then clients.
    pub(super) fn start(
        traffic: Traffic,
        (outside, inside): (&str, &str),
        signals: &Arc<Signals>,
    ) -> Result<Self> {
        let mut all = Self {
            threads: Vec::new(),
            streams: Arc::default(),
            latencies: Arc::default(),
            connected: Arc::default(),
        };
        // The receiver of a stream listens.
        let listens_outside = matches!(traffic, Traffic::Stream { to_guest: false, .. });
        let (here, there) = if listens_outside { (outside, inside) } else { (inside, outside) };
        let address: Ipv4Addr = if listens_outside { OUTSIDE } else { INSIDE }.parse()?;
        let address = SocketAddrV4::new(address, PORT);
        let listener = within(here, move || Ok(TcpListener::bind(address)?))?;
        listener.set_nonblocking(true)?;
        all.serve(listener, traffic, signals)?;
        let sessions = match traffic {
            Traffic::Stream { sessions, .. } | Traffic::Request { sessions, .. } => sessions,
        };
        for _ in 0..sessions {
            all.client(traffic, (there.into(), address), signals);
        }
        if let Err(error) = all.wait_connected(sessions) {
            // A client's own error is more precise.
            return Err(all.end(signals).err().unwrap_or(error));
        }
        Ok(all)
    }

    fn wait_connected(&self, sessions: usize) -> Result<()> {
        let until = Instant::now() + WITHIN;
        loop {
            let connected = self.connected.load(Ordering::Relaxed);
            if connected == sessions {
                return Ok(());
            }
            let failed = self.threads.iter().any(JoinHandle::is_finished);
            ensure!(!failed && Instant::now() < until, "{connected} of {sessions} clients have connected");
            std::thread::sleep(ACCEPT_INTERVAL);
        }
    }

    fn serve(&mut self, listener: TcpListener, traffic: Traffic, signals: &Arc<Signals>) -> Result<()> {
        // Short connections are served by the accepting thread, since thread creation would be measured otherwise.
        let (acceptors, inline) = match traffic {
            Traffic::Request { sessions, reconnects: true, .. } => (sessions, true),
            _ => (1, false),
        };
        for _ in 0..acceptors {
            let (listener, signals, streams) =
                (listener.try_clone()?, Arc::clone(signals), Arc::clone(&self.streams));
            self.threads.push(std::thread::spawn(move || {
                std::thread::scope(|scope| {
                    while !signals.is_over() {
                        let stream = match listener.accept() {
                            Ok((stream, _)) => stream,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                                wait(&listener)?;
                                continue;
                            }
                            Err(error) => return Err(error.into()),
                        };
                        stream.set_nonblocking(false)?;
                        stream.set_nodelay(true)?;
                        if inline {
                            serve_connection(stream, traffic, &signals);
                            continue;
                        }
                        streams.lock().expect("no thread panics with it").push(stream.try_clone()?);
                        let signals = &signals;
                        scope.spawn(move || serve_connection(stream, traffic, signals));
                    }
                    Ok(())
                })
            }));
        }
        drop(listener);
        Ok(())
    }

    fn client(&mut self, traffic: Traffic, (host, address): (PathBuf, SocketAddrV4), signals: &Arc<Signals>) {
        let (signals, streams, all) =
            (Arc::clone(signals), Arc::clone(&self.streams), Arc::clone(&self.latencies));
        let connected = Arc::clone(&self.connected);
        self.threads.push(std::thread::spawn(move || {
            enter(&host)?;
            let first = connect(address, &signals)?;
            connected.fetch_add(1, Ordering::Relaxed);
            // A clone would keep a connection open that its client closes.
            if !matches!(traffic, Traffic::Request { reconnects: true, .. }) {
                streams.lock().expect("no thread panics with it").push(first.try_clone()?);
            }
            match traffic {
                Traffic::Stream { size, .. } => send(first, size, &signals),
                Traffic::Request { size, reconnects, .. } => {
                    let latencies = requests(first, size, reconnects.then_some(address), &signals)?;
                    all.lock().expect("no thread panics with it").append(latencies);
                    Ok(())
                }
            }
        }));
    }

    /// Ends all threads. Returns the latencies, or the first error.
    pub(super) fn end(mut self, signals: &Signals) -> Result<Latencies> {
        signals.stop.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().expect("no thread panics with it").drain(..) {
            // It may be shut down already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut outcome = Ok(());
        for thread in self.threads.drain(..) {
            outcome = outcome.and(thread.join().expect("the thread does not panic"));
        }
        outcome?;
        Ok(std::mem::take(&mut self.latencies.lock().expect("no thread panics with it")))
    }
}

fn within<T: Send>(host: &str, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        scope.spawn(|| enter(host.as_ref()).and_then(|()| body())).join().expect("the thread does not panic")
    })
}

fn wait(listener: &TcpListener) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let step = Timespec { tv_sec: 0, tv_nsec: ACCEPT_INTERVAL.subsec_nanos().into() };
    poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&step))?;
    Ok(())
}

/// Connects, with retries while the link drops frames after it came up.
fn connect(address: SocketAddrV4, signals: &Signals) -> Result<TcpStream> {
    let until = Instant::now() + WITHIN;
    loop {
        match TcpStream::connect_timeout(&address.into(), Duration::from_secs(1)) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(WITHIN))?;
                stream.set_write_timeout(Some(WITHIN))?;
                return Ok(stream);
            }
            Err(error) if Instant::now() > until || signals.is_over() => {
                return Err(error).context("cannot connect");
            }
            Err(_) => std::thread::sleep(CONNECT_INTERVAL),
        }
    }
}

fn send(mut stream: TcpStream, size: usize, signals: &Signals) -> Result<()> {
    let message = vec![0x5a; size];
    // As in netperf and iperf3: TCP may coalesce small messages.
    stream.set_nodelay(false)?;
    while !signals.is_over() {
        match stream.write_all(&message) {
            Ok(()) => {}
            Err(_) if signals.is_over() => break,
            Err(error) => return Err(error).context("sending"),
        }
    }
    Ok(())
}

fn requests(
    first: TcpStream,
    size: usize,
    reconnects: Option<SocketAddrV4>,
    signals: &Signals,
) -> Result<Latencies> {
    let (mut latencies, mut bytes, mut known) = (Latencies::default(), vec![0x5a; size], Some(first));
    while !signals.is_over() {
        let started = Instant::now();
        let mut stream = match (known.take(), reconnects) {
            (Some(stream), _) => stream,
            (None, Some(address)) => {
                let stream = match TcpStream::connect(address) {
                    // The port was used just before, and the peer replied to the old connection: retry.
                    Err(error)
                        if matches!(
                            error.kind(),
                            ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused
                        ) =>
                    {
                        continue;
                    }
                    stream => stream.context("cannot reconnect")?,
                };
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(WITHIN))?;
                // A reset at close frees the client's port at once: thousands of connections per second would exhaust them.
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
                stream
            }
            (None, None) => anyhow::bail!("the connection was closed"),
        };
        let result = stream.write_all(&bytes).and_then(|()| stream.read_exact(&mut bytes));
        if signals.is_over() {
            break;
        }
        result.context("no response")?;
        if reconnects.is_none() {
            known = Some(stream);
        }
        signals.add(1);
        if signals.measuring.load(Ordering::Relaxed) {
            latencies.push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(latencies)
}

/// Serves a connection until its end.
fn serve_connection(mut stream: TcpStream, traffic: Traffic, signals: &Signals) {
    let mut bytes = vec![0; READ_BYTES];
    // A flooded backend may drop the packet that closes a connection, so reads have a timeout.
    if stream.set_read_timeout(Some(LOST_AFTER)).is_err() {
        return;
    }
    let once = matches!(traffic, Traffic::Request { reconnects: true, .. });
    loop {
        let len = match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock && !once && !signals.is_over() => continue,
            Err(_) => return,
        };
        match traffic {
            Traffic::Stream { .. } => signals.add(len as u64),
            Traffic::Request { .. } if stream.write_all(&bytes[..len]).is_err() => return,
            Traffic::Request { .. } => {}
        }
    }
}
