//! TCP between the two hosts: streams, requests, connections.

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

const PORT: u16 = 5000;
const READ_BYTES: usize = 256 << 10;
const WITHIN: Duration = Duration::from_secs(15);
/// How long a server waits before it looks whether all is over.
const LOST_AFTER: Duration = Duration::from_secs(1);
const ACCEPT_INTERVAL: Duration = Duration::from_millis(2);
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// What the applications do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Traffic {
    /// One way, in messages of `size` bytes.
    Stream { size: usize, sessions: usize, to_guest: bool },
    /// Request and answer of `size` bytes, from outside; `anew`: in a connection of its own each time.
    Ask { size: usize, sessions: usize, anew: bool },
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
        // Who receives a stream listens.
        let listens_outside = matches!(traffic, Traffic::Stream { to_guest: false, .. });
        let (here, there) = if listens_outside { (outside, inside) } else { (inside, outside) };
        let address: Ipv4Addr = if listens_outside { OUTSIDE } else { INSIDE }.parse()?;
        let address = SocketAddrV4::new(address, PORT);
        let listener = within(here, move || Ok(TcpListener::bind(address)?))?;
        listener.set_nonblocking(true)?;
        all.serve(listener, traffic, signals)?;
        let sessions = match traffic {
            Traffic::Stream { sessions, .. } | Traffic::Ask { sessions, .. } => sessions,
        };
        for _ in 0..sessions {
            all.client(traffic, (there.into(), address), signals);
        }
        if let Err(error) = all.wait_connected(sessions) {
            // What a client says of it is worth more.
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
        // A short connection is served by who accepted it: a thread for each would be measured instead.
        let (acceptors, inline) = match traffic {
            Traffic::Ask { sessions, anew: true, .. } => (sessions, true),
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
                            served(stream, traffic, &signals);
                            continue;
                        }
                        streams.lock().expect("nobody panics with it").push(stream.try_clone()?);
                        let signals = &signals;
                        scope.spawn(move || served(stream, traffic, signals));
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
            // A connection that its client closes must not live on here.
            if !matches!(traffic, Traffic::Ask { anew: true, .. }) {
                streams.lock().expect("nobody panics with it").push(first.try_clone()?);
            }
            match traffic {
                Traffic::Stream { size, .. } => send(first, size, &signals),
                Traffic::Ask { size, anew, .. } => {
                    let latencies = ask(first, size, anew.then_some(address), &signals)?;
                    all.lock().expect("nobody panics with it").append(latencies);
                    Ok(())
                }
            }
        }));
    }

    /// Ends all. The first error, and the latencies.
    pub(super) fn end(mut self, signals: &Signals) -> Result<Latencies> {
        signals.stop.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().expect("nobody panics with it").drain(..) {
            // It may be shut already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut outcome = Ok(());
        for thread in self.threads.drain(..) {
            outcome = outcome.and(thread.join().expect("it does not panic"));
        }
        outcome?;
        Ok(std::mem::take(&mut self.latencies.lock().expect("nobody panics with it")))
    }
}

fn within<T: Send>(host: &str, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        scope.spawn(|| enter(host.as_ref()).and_then(|()| body())).join().expect("it does not panic")
    })
}

fn wait(listener: &TcpListener) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let step = Timespec { tv_sec: 0, tv_nsec: ACCEPT_INTERVAL.subsec_nanos().into() };
    poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&step))?;
    Ok(())
}

/// The first connection waits until frames get through: a link that came up just now loses some.
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
                return Err(error).context("no TCP connection comes about");
            }
            Err(_) => std::thread::sleep(CONNECT_INTERVAL),
        }
    }
}

fn send(mut stream: TcpStream, size: usize, signals: &Signals) -> Result<()> {
    let message = vec![0x5a; size];
    // As netperf and iperf3 have it: TCP may gather small messages.
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

fn ask(first: TcpStream, size: usize, anew: Option<SocketAddrV4>, signals: &Signals) -> Result<Latencies> {
    let (mut latencies, mut bytes, mut known) = (Latencies::default(), vec![0x5a; size], Some(first));
    while !signals.is_over() {
        let started = Instant::now();
        let mut stream = match (known.take(), anew) {
            (Some(stream), _) => stream,
            (None, Some(address)) => {
                let stream = match TcpStream::connect(address) {
                    // The port was used a moment ago, and the other side still answered to that: as good as not tried.
                    Err(error)
                        if matches!(
                            error.kind(),
                            ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused
                        ) =>
                    {
                        continue;
                    }
                    stream => stream.context("no further connection comes about")?,
                };
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(WITHIN))?;
                // The client's port is free again at once: thousands of connections a second would use them up.
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
                stream
            }
            (None, None) => anyhow::bail!("the connection is gone"),
        };
        let done = stream.write_all(&bytes).and_then(|()| stream.read_exact(&mut bytes));
        if signals.is_over() {
            break;
        }
        done.context("no answer comes")?;
        if anew.is_none() {
            known = Some(stream);
        }
        signals.add(1);
        if signals.measuring.load(Ordering::Relaxed) {
            latencies.push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(latencies)
}

/// What a server does with a connection, until it ends.
fn served(mut stream: TcpStream, traffic: Traffic, signals: &Signals) {
    let mut bytes = vec![0; READ_BYTES];
    // That a client has gone is told once, and a backend that is flooded may lose it.
    if stream.set_read_timeout(Some(LOST_AFTER)).is_err() {
        return;
    }
    let once = matches!(traffic, Traffic::Ask { anew: true, .. });
    loop {
        let len = match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock && !once && !signals.is_over() => continue,
            Err(_) => return,
        };
        match traffic {
            Traffic::Stream { .. } => signals.add(len as u64),
            Traffic::Ask { .. } if stream.write_all(&bytes[..len]).is_err() => return,
            Traffic::Ask { .. } => {}
        }
    }
}
