//! Connections of QEMUs, for disks or a guest's stream, forwarded from one QEMU to the other host, and there to the other QEMU.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Channel, ChannelExt as _, ConnectOptions, Error as ChannelError, IoBuf, IoBufMut,
    Listener, RecvFlags, SendFlags, connect_with, is_out_of_resources,
};

use super::error::Error;
use crate::lock::lock;

/// Connections at one time: one for each disk, or lane and a main channel.
const CONNECTIONS_MAX: usize = 300;
/// Bytes that are forwarded at a time, of each direction.
const BUFFER_BYTES: usize = 256 << 10;
/// Timeout for the other end of a forwarded connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause if the kernel has no descriptor left for a connection.
const RESOURCES_PAUSE: Duration = Duration::from_millis(100);
/// No deadline: a listener waits until it is cancelled.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Other ends of forwarded connections.
pub(super) enum FarEnds {
    /// Connected before, so that the QEMU here waits for nothing but the QEMU there.
    Connected(Mutex<Vec<Arc<dyn Channel>>>),
    /// Connected to when they are needed.
    At { address: Address, options: ConnectOptions },
    /// As this connector does when they are needed.
    By(Connector),
}

/// Connects the other end of a connection, which it may read first; `None`: it has served that itself.
pub(super) type Connector = Box<dyn Fn(&Arc<dyn Channel>, &Cancel) -> ForwardResult + Send + Sync>;
type ForwardResult = io::Result<Option<Arc<dyn Channel>>>;

/// Forwards each connection of a listener, until it is dropped.
pub(super) struct Forwarder {
    shared: Arc<Forwarding>,
    thread: Option<JoinHandle<()>>,
}

struct Forwarding {
    listener: Arc<Listener>,
    far: FarEnds,
    cancel: Cancel,
    open: Mutex<Vec<Arc<dyn Channel>>>,
    /// The copy that is cancelled if a connection ends too early: the other host may be off.
    copy: Option<Cancel>,
    are_ends_expected: AtomicBool,
}

impl FarEnds {
    /// Connections to this address without further options.
    pub(super) fn to(address: Address) -> Self {
        Self::At { address, options: ConnectOptions::default() }
    }
}

impl Forwarder {
    /// Forwards what connects to `listener`. `copy` is cancelled when a connection ends before [`Self::expect_ends`].
    pub(super) fn start(listener: Arc<Listener>, far: FarEnds, copy: Option<&Cancel>) -> Result<Self, Error> {
        let (cancel, open, copy) = (Cancel::new()?, Mutex::default(), copy.cloned());
        let are_ends_expected = AtomicBool::new(false);
        let shared = Arc::new(Forwarding { listener, far, cancel, open, copy, are_ends_expected });
        let thread = spawn("forwards", {
            let shared = Arc::clone(&shared);
            move || shared.accept()
        });
        Ok(Self { shared, thread: Some(thread?) })
    }

    /// Accepts that connections end from now on.
    pub(super) fn expect_ends(&self) {
        self.shared.are_ends_expected.store(true, Ordering::Relaxed);
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.shared.cancel.cancel();
        lock(&self.shared.open).iter().for_each(end);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Forwarding {
    fn accept(self: Arc<Self>) {
        let mut connections: Vec<JoinHandle<()>> = Vec::new();
        while !self.cancel.is_cancelled() {
            match self.listener.accept(Instant::now() + FOREVER, &self.cancel) {
                Ok(near) => {
                    connections.retain(|connection| !connection.is_finished());
                    if connections.len() < CONNECTIONS_MAX {
                        // One after another: QEMU 7.2 tells its connections apart by their order.
                        let (shared, far) = (Arc::clone(&self), self.connect());
                        connections.extend(spawn("forward", move || shared.forward(&near.into(), far)));
                    }
                }
                Err(error) if is_out_of_resources(&error) => thread::park_timeout(RESOURCES_PAUSE),
                Err(error) => tracing::debug!(%error, "no forwarded connection"),
            }
        }
        connections.into_iter().for_each(|connection| drop(connection.join()));
    }

    /// Connects the other end of the next connection, if that does not depend on what it sends.
    fn connect(&self) -> Option<ForwardResult> {
        match &self.far {
            FarEnds::Connected(far) => Some(Ok(lock(far).pop())),
            FarEnds::At { address, options } => {
                let deadline = Instant::now() + CONNECT_TIMEOUT;
                let connected = connect_with(address, deadline, &self.cancel, options);
                Some(connected.map(|far| Some(Arc::from(far))).map_err(io::Error::other))
            }
            FarEnds::By(_) => None,
        }
    }

    fn forward(&self, near: &Arc<dyn Channel>, far: Option<ForwardResult>) {
        lock(&self.open).push(Arc::clone(near));
        // Else it is ended with the others.
        if !self.cancel.is_cancelled() {
            self.serve(near, far);
        }
        end(near);
        if let Some(copy) = self.copy.as_ref().filter(|_| !self.are_ends_expected.load(Ordering::Relaxed)) {
            copy.cancel();
        }
        lock(&self.open).retain(|channel| !Arc::ptr_eq(channel, near));
    }

    fn serve(&self, near: &Arc<dyn Channel>, far: Option<ForwardResult>) {
        let far = match (&self.far, far) {
            (FarEnds::By(connector), None) => connector(near, &self.cancel),
            (_, far) => far.unwrap_or(Ok(None)),
        };
        let far = match far {
            Ok(Some(far)) => far,
            Ok(None) => return,
            Err(error) => return tracing::info!(%error, "a forwarded connection"),
        };
        lock(&self.open).push(Arc::clone(&far));
        if !self.cancel.is_cancelled() {
            thread::scope(|scope| match Builder::new().spawn_scoped(scope, || pass_on(near, &far)) {
                Ok(_) => pass_on(&far, near),
                Err(error) => tracing::info!(%error, "a forwarded connection"),
            });
        }
        lock(&self.open).retain(|channel| !Arc::ptr_eq(channel, &far));
    }
}

/// The same host at this port.
pub(super) fn at_port(address: &Address, port: u16) -> Address {
    match address {
        Address::Tcp { host, .. } => Address::Tcp { host: host.clone(), port },
        other => other.clone(),
    }
}

impl fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Forwarder")
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, ChannelError> {
    Builder::new().name(name.into()).spawn(work).map_err(ChannelError::NoThread)
}

/// Passes bytes on until one end closes its part or fails, and ends both.
fn pass_on(from: &Arc<dyn Channel>, to: &Arc<dyn Channel>) {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut step = || {
        let count = from.recv(&mut [IoBufMut::from(&mut buffer[..])], RecvFlags::empty())?;
        to.send_all(&[IoBuf::from(&buffer[..count])], SendFlags::empty())?;
        Ok::<_, towline_channel::Error>(count)
    };
    loop {
        match step() {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a forwarded connection");
                break;
            }
        }
    }
    [from, to].into_iter().for_each(end);
}

fn end(channel: &Arc<dyn Channel>) {
    if let Err(error) = channel.shutdown(std::net::Shutdown::Both) {
        tracing::trace!(%error, "closing");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_forwarder_passes_bytes_on_until_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let (path, far) = (directory.path().join("near.sock"), TcpListener::bind("127.0.0.1:0").unwrap());
        let listener = Arc::new(Listener::bind(&Address::Unix(path.clone())).unwrap());
        let to = Address::Tcp { host: "127.0.0.1".into(), port: far.local_addr().unwrap().port() };
        let forwarder = Forwarder::start(listener, FarEnds::to(to), None).unwrap();
        let connect = || -> (UnixStream, TcpStream) {
            let near = UnixStream::connect(&path).unwrap();
            (near, far.accept().unwrap().0)
        };
        let (mut near, mut other) = connect();
        let sent: Vec<u8> = (0..3 * BUFFER_BYTES).map(|n| n as u8).collect();
        thread::scope(|scope| {
            scope.spawn(|| near.write_all(&sent).unwrap());
            let mut received = vec![0; sent.len()];
            other.read_exact(&mut received).unwrap();
            assert_eq!(received, sent);
        });
        other.write_all(b"back").unwrap();
        let mut back = [0; 4];
        near.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"back");
        // One end closes: so does the other.
        other.shutdown(Shutdown::Both).unwrap();
        assert_eq!(near.read(&mut back).unwrap(), 0);
        let (mut near, mut other) = connect();
        drop(forwarder);
        assert_eq!((near.read(&mut back).unwrap(), other.read(&mut back).unwrap()), (0, 0));
        assert!(UnixStream::connect(&path).is_err(), "nothing listens");
    }
}
