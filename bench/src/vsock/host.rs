//! Applications of the host, over Unix sockets: through a vsock backend, or to each other as the limit.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::entry::{Direction, Work};
use crate::vhost::Signals;
use crate::vhost::latency::Latencies;

/// Port of the listening application.
pub(super) const PORT: u32 = 1024;
/// Size of a receiving application's reads.
const READ_BYTES: usize = 256 << 10;
/// Maximum length of a backend's `OK PORT`.
const REPLY_BYTES_MAX: usize = 32;
/// Timeout of a connection and of a response.
const WITHIN: Duration = Duration::from_secs(10);

/// Other end of a stream.
#[derive(Debug, Clone)]
pub(super) enum Target {
    /// A port of a guest, by Firecracker's convention on a backend's socket.
    Vsock { path: PathBuf, port: u32 },
    /// An application at this socket.
    Socket(PathBuf),
}

/// Threads of this process, which end on their signal and the shutdown of their sockets.
#[derive(Debug, Default)]
pub(super) struct Host {
    threads: Vec<JoinHandle<Result<()>>>,
    /// One end of each stream, to shut it down.
    streams: Arc<Mutex<Vec<UnixStream>>>,
    latencies: Arc<Mutex<Latencies>>,
}

impl Target {
    /// Connects to the guest, or to the application in its place.
    fn connect(&self) -> Result<UnixStream> {
        let (Self::Vsock { path, .. } | Self::Socket(path)) = self;
        let mut stream = UnixStream::connect(path).with_context(|| format!("{}", path.display()))?;
        stream.set_read_timeout(Some(WITHIN))?;
        stream.set_write_timeout(Some(WITHIN))?;
        if let Self::Vsock { port, .. } = self {
            // In one write: vhost-device-vsock refuses a request in several.
            stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
            // Nothing follows it, as the guest sends only after a request.
            let (mut reply, mut len) = ([0; REPLY_BYTES_MAX], 0);
            while !reply[..len].ends_with(b"\n") {
                let count = stream.read(&mut reply[len..])?;
                ensure!(count > 0, "the backend refused a connection to port {port}");
                len += count;
            }
            let reply = String::from_utf8_lossy(&reply[..len]);
            ensure!(reply.starts_with("OK "), "unexpected reply {reply:?}");
        }
        Ok(stream)
    }

    /// Returns the path of the socket that guests connect to.
    pub(super) fn listener(&self) -> PathBuf {
        match self {
            Self::Vsock { path, .. } => format!("{}_{PORT}", path.display()).into(),
            Self::Socket(path) => path.clone(),
        }
    }
}

impl Host {
    fn spawn(&mut self, body: impl FnOnce() -> Result<()> + Send + 'static) {
        self.threads.push(std::thread::spawn(body));
    }

    fn keep(&self, stream: &UnixStream) -> Result<()> {
        self.streams.lock().expect("no thread panics with it").push(stream.try_clone()?);
        Ok(())
    }

    /// Writes messages of `size` bytes to new streams, whose receivers count them.
    pub(super) fn write(
        &mut self,
        signals: &Arc<Signals>,
        target: &Target,
        (size, connections): (usize, usize),
    ) -> Result<()> {
        (0..connections).try_for_each(|_| self.write_one(signals, target, size, |_, _| ()))
    }

    /// As [`Host::write`] on one stream, and counts the bytes itself.
    pub(super) fn write_counted(
        &mut self,
        signals: &Arc<Signals>,
        target: &Target,
        size: usize,
    ) -> Result<()> {
        self.write_one(signals, target, size, Signals::add)
    }

    fn write_one(
        &mut self,
        signals: &Arc<Signals>,
        target: &Target,
        size: usize,
        count: fn(&Signals, u64),
    ) -> Result<()> {
        let mut stream = target.connect()?;
        self.keep(&stream)?;
        let signals = Arc::clone(signals);
        self.spawn(move || {
            let message = vec![0x5a; size];
            while !signals.is_over() {
                match stream.write_all(&message) {
                    Ok(()) => count(&signals, size as u64),
                    Err(_) if signals.is_over() => break,
                    Err(error) => return Err(error).context("writing to the guest"),
                }
            }
            Ok(())
        });
        Ok(())
    }

    /// Has the guest send messages of `size` bytes on a new stream, and counts bytes.
    pub(super) fn receive(&mut self, signals: &Arc<Signals>, target: &Target, size: usize) -> Result<()> {
        let mut stream = target.connect()?;
        self.keep(&stream)?;
        stream.write_all(&u32::try_from(size)?.to_le_bytes())?;
        let signals = Arc::clone(signals);
        self.spawn(move || drain(stream, &signals));
        Ok(())
    }

    /// Reads streams that others open, and counts bytes.
    pub(super) fn read(&mut self, signals: &Arc<Signals>, path: &Path, connections: usize) -> Result<()> {
        let listener = UnixListener::bind(path)?;
        let (streams, signals) = (Arc::clone(&self.streams), Arc::clone(signals));
        listener.set_nonblocking(true)?;
        self.spawn(move || {
            std::thread::scope(|scope| {
                let mut readers = Vec::new();
                while readers.len() < connections {
                    let Some(stream) = accept(&listener, &signals)? else { break };
                    streams.lock().expect("no thread panics with it").push(stream.try_clone()?);
                    let signals = &signals;
                    readers.push(scope.spawn(move || drain(stream, signals)));
                }
                readers.into_iter().try_for_each(|reader| reader.join().expect("the thread does not panic"))
            })
        });
        Ok(())
    }

    /// Sends requests and waits for their responses; `reconnects`: each on a new stream.
    pub(super) fn request(
        &mut self,
        signals: &Arc<Signals>,
        target: &Target,
        (size, connections, reconnects): (usize, usize, bool),
    ) -> Result<()> {
        for _ in 0..connections {
            let (signals, target, all) = (Arc::clone(signals), target.clone(), Arc::clone(&self.latencies));
            self.spawn(move || {
                let (mut latencies, mut bytes) = (Latencies::default(), vec![0x5a; size]);
                let mut known = None;
                while !signals.is_over() {
                    let started = Instant::now();
                    let result = exchange(&target, known.take(), &mut bytes);
                    if signals.is_over() {
                        break;
                    }
                    let stream = result?;
                    if !reconnects {
                        known = Some(stream);
                    } else {
                        drop(stream);
                    }
                    signals.add(1);
                    if signals.measuring.load(Ordering::Relaxed) {
                        latencies.push(started.elapsed().as_secs_f64() * 1e6);
                    }
                }
                all.lock().expect("no thread panics with it").append(latencies);
                Ok(())
            });
        }
        Ok(())
    }

    /// Echoes what it receives.
    pub(super) fn echo(&mut self, signals: &Arc<Signals>, path: &Path, threads: usize) -> Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        // Each thread serves its own connections, since thread creation would be measured otherwise.
        for _ in 0..threads {
            let (listener, signals) = (listener.try_clone()?, Arc::clone(signals));
            self.spawn(move || {
                let mut bytes = vec![0; READ_BYTES];
                while let Some(mut stream) = accept(&listener, &signals)? {
                    while let Ok(len) = stream.read(&mut bytes)
                        && len > 0
                        && stream.write_all(&bytes[..len]).is_ok()
                    {}
                }
                Ok(())
            });
        }
        Ok(())
    }

    /// Ends all threads. Returns their latencies, or the first error.
    pub(super) fn end(mut self, signals: &Signals) -> Result<Latencies> {
        self.finish(signals)?;
        Ok(std::mem::take(&mut self.latencies.lock().expect("no thread panics with it")))
    }

    fn finish(&mut self, signals: &Signals) -> Result<()> {
        signals.stop.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().expect("no thread panics with it").drain(..) {
            // It may be shut down already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut outcome = Ok(());
        for thread in self.threads.drain(..) {
            let ended = thread.join().expect("the thread does not panic");
            outcome = outcome.and(ended);
        }
        outcome
    }
}

/// Sends a request on this stream, or a new one, and waits for the response.
fn exchange(target: &Target, known: Option<UnixStream>, bytes: &mut [u8]) -> Result<UnixStream> {
    let mut stream = match known {
        Some(stream) => stream,
        None => target.connect()?,
    };
    stream.write_all(bytes)?;
    stream.read_exact(bytes).context("no response")?;
    Ok(stream)
}

/// Accepts the next stream; `None` at the end of the measurement.
fn accept(listener: &UnixListener, signals: &Signals) -> Result<Option<UnixStream>> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let step = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    while !signals.is_over() {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(Some(stream));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&step))?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

fn drain(mut stream: UnixStream, signals: &Signals) -> Result<()> {
    let mut bytes = vec![0; READ_BYTES];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => signals.add(len as u64),
            Err(_) if signals.is_over() => return Ok(()),
            Err(error) => return Err(error).context("reading from the guest"),
        }
    }
}

/// Starts the applications of both ends, without a backend.
pub(super) fn without_backend(
    host: &mut Host,
    signals: &Arc<Signals>,
    target: &Target,
    work: Work,
) -> Result<()> {
    let path = target.listener();
    match work {
        Work::Stream { size, connections, direction: Direction::ToGuest | Direction::FromGuest } => {
            host.read(signals, &path, connections)?;
            host.write(signals, target, (size, connections))
        }
        Work::Request { size, connections, reconnects } => {
            host.echo(signals, &path, connections)?;
            host.request(signals, target, (size, connections, reconnects))
        }
    }
}
