//! The host's applications, over Unix sockets: through a vsock backend, or to each other as its limit.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Direction;
use crate::vhost::Signals;
use crate::vhost::latency::Latencies;

/// The port that somebody listens on.
pub(super) const PORT: u32 = 1024;
/// What a receiving application reads at once.
const READ_BYTES: usize = 256 << 10;
/// How long a connection may take, and an answer.
const WITHIN: Duration = Duration::from_secs(10);

/// Where the other end of a stream is.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// Behind a backend's socket, by Firecracker's convention.
    Vsock(PathBuf),
    /// At this socket.
    Socket(PathBuf),
}

/// Threads of this process; they end when the signals say so and their sockets are shut.
#[derive(Debug, Default)]
pub(super) struct Host {
    threads: Vec<JoinHandle<Result<()>>>,
    /// One end of each stream, to end who waits in it.
    streams: Arc<Mutex<Vec<UnixStream>>>,
    latencies: Arc<Mutex<Latencies>>,
}

impl Place {
    /// A stream to the guest, or to who stands for it.
    fn connect(&self) -> Result<UnixStream> {
        let (Self::Vsock(path) | Self::Socket(path)) = self;
        let mut stream = UnixStream::connect(path).with_context(|| format!("{}", path.display()))?;
        stream.set_read_timeout(Some(WITHIN))?;
        stream.set_write_timeout(Some(WITHIN))?;
        if matches!(self, Self::Vsock(_)) {
            // In one piece: vhost-device-vsock refuses one that comes in several.
            stream.write_all(format!("CONNECT {PORT}\n").as_bytes())?;
            let mut line = Vec::new();
            let mut byte = [0];
            while byte != [b'\n'] {
                ensure!(stream.read(&mut byte)? == 1, "the backend refuses a connection to port {PORT}");
                line.push(byte[0]);
            }
            ensure!(line.starts_with(b"OK "), "it says {:?}", String::from_utf8_lossy(&line));
        }
        Ok(stream)
    }

    /// Where guests find an application of the host's.
    pub(super) fn listener(&self) -> PathBuf {
        match self {
            Self::Vsock(path) => format!("{}_{PORT}", path.display()).into(),
            Self::Socket(path) => path.clone(),
        }
    }
}

impl Host {
    fn spawn(&mut self, body: impl FnOnce() -> Result<()> + Send + 'static) {
        self.threads.push(std::thread::spawn(body));
    }

    fn keep(&self, stream: &UnixStream) -> Result<()> {
        self.streams.lock().expect("nobody panics with it").push(stream.try_clone()?);
        Ok(())
    }

    /// Writes messages of `size` bytes into streams of its own.
    pub(super) fn write(
        &mut self,
        signals: &Arc<Signals>,
        place: &Place,
        (size, connections): (usize, usize),
    ) -> Result<()> {
        for _ in 0..connections {
            let mut stream = place.connect()?;
            self.keep(&stream)?;
            let signals = Arc::clone(signals);
            self.spawn(move || {
                let message = vec![0x5a; size];
                while !signals.is_over() {
                    match stream.write_all(&message) {
                        Ok(()) => {}
                        Err(_) if signals.is_over() => break,
                        Err(error) => return Err(error).context("writing to the guest"),
                    }
                }
                Ok(())
            });
        }
        Ok(())
    }

    /// Reads what comes in streams that others open; counts bytes.
    pub(super) fn read(&mut self, signals: &Arc<Signals>, path: &Path, connections: usize) -> Result<()> {
        let listener = UnixListener::bind(path)?;
        let (streams, signals) = (Arc::clone(&self.streams), Arc::clone(signals));
        listener.set_nonblocking(true)?;
        self.spawn(move || {
            std::thread::scope(|scope| {
                let mut readers = Vec::new();
                while readers.len() < connections {
                    let Some(stream) = accept(&listener, &signals)? else { break };
                    streams.lock().expect("nobody panics with it").push(stream.try_clone()?);
                    let signals = &signals;
                    readers.push(scope.spawn(move || drain(stream, signals)));
                }
                readers.into_iter().try_for_each(|reader| reader.join().expect("it does not panic"))
            })
        });
        Ok(())
    }

    /// Asks and waits for the answer, again and again; `anew`: in a stream of its own each time.
    pub(super) fn ask(
        &mut self,
        signals: &Arc<Signals>,
        place: &Place,
        (size, connections, anew): (usize, usize, bool),
    ) -> Result<()> {
        for _ in 0..connections {
            let (signals, place, all) = (Arc::clone(signals), place.clone(), Arc::clone(&self.latencies));
            self.spawn(move || {
                let (mut latencies, mut bytes) = (Latencies::default(), vec![0x5a; size]);
                let mut known = None;
                while !signals.is_over() {
                    let started = Instant::now();
                    let done = exchange(&place, known.take(), &mut bytes);
                    if signals.is_over() {
                        break;
                    }
                    let stream = done?;
                    if !anew {
                        known = Some(stream);
                    } else {
                        drop(stream);
                    }
                    signals.add(1);
                    if signals.measuring.load(Ordering::Relaxed) {
                        latencies.push(started.elapsed().as_secs_f64() * 1e6);
                    }
                }
                all.lock().expect("nobody panics with it").append(latencies);
                Ok(())
            });
        }
        Ok(())
    }

    /// Answers what comes with the same.
    pub(super) fn answer(&mut self, signals: &Arc<Signals>, path: &Path, threads: usize) -> Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        // Each serves whom it accepted: a thread for each connection would be measured instead.
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

    /// Ends all threads. The first error of any of them, and their latencies.
    pub(super) fn end(mut self, signals: &Signals) -> Result<Latencies> {
        self.finish(signals)?;
        Ok(std::mem::take(&mut self.latencies.lock().expect("nobody panics with it")))
    }

    fn finish(&mut self, signals: &Signals) -> Result<()> {
        signals.stop.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().expect("nobody panics with it").drain(..) {
            // It may be shut already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut outcome = Ok(());
        for thread in self.threads.drain(..) {
            let ended = thread.join().expect("it does not panic");
            outcome = outcome.and(ended);
        }
        outcome
    }
}

/// Asks, in the stream that is there or in a new one.
fn exchange(place: &Place, known: Option<UnixStream>, bytes: &mut [u8]) -> Result<UnixStream> {
    let mut stream = match known {
        Some(stream) => stream,
        None => place.connect()?,
    };
    stream.write_all(bytes)?;
    stream.read_exact(bytes).context("no answer comes")?;
    Ok(stream)
}

/// The next stream, or none if it is over.
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

/// What both ends do when the one is the host's application and the other, in the guest's place, too.
pub(super) fn without_backend(
    host: &mut Host,
    signals: &Arc<Signals>,
    place: &Place,
    work: super::Work,
) -> Result<()> {
    let path = place.listener();
    match work {
        super::Work::Stream { size, connections, direction: Direction::ToGuest | Direction::FromGuest } => {
            host.read(signals, &path, connections)?;
            host.write(signals, place, (size, connections))
        }
        super::Work::Ask { size, connections, anew } => {
            host.answer(signals, &path, connections)?;
            host.ask(signals, place, (size, connections, anew))
        }
    }
}
