//! Helpers shared by the tests of this crate.
#![allow(dead_code)] // Not every test file needs all of it.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_channel::{
    Address, Cancel, Channel, ChannelExt, ConnectOptions, IoBuf, IoBufMut, ListenOptions, Listener, Result,
    SendFlags, TlsChannel, TlsClient, TlsServer, WebSocketChannel, connect, connect_with,
};
use towline_lab::certificates::Authority;

/// Far enough that only a test that hangs meets it.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(crate) fn cancel() -> Cancel {
    Cancel::new().unwrap()
}

pub(crate) fn open(address: &str) -> Box<dyn Channel> {
    connect(&address.parse().unwrap(), soon(), &cancel()).unwrap()
}

/// A connection over a listener: the connecting end, the accepting end.
pub(crate) fn through(listener: &Listener) -> (Box<dyn Channel>, Box<dyn Channel>) {
    let near = connect(listener.local_address(), soon(), &cancel()).unwrap();
    (near, listener.accept(soon(), &cancel()).unwrap())
}

pub(crate) fn tcp() -> (Box<dyn Channel>, Box<dyn Channel>) {
    through(&Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap())
}

/// A connection whose two ends can send without copying.
pub(crate) fn tcp_zero_copy() -> (Box<dyn Channel>, Box<dyn Channel>) {
    let options = ListenOptions { zero_copy: true, ..Default::default() };
    let listener = Listener::bind_with(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
    let options = ConnectOptions { zero_copy: true, ..Default::default() };
    let near = connect_with(listener.local_address(), soon(), &cancel(), &options).unwrap();
    (near, listener.accept(soon(), &cancel()).unwrap())
}

/// A directory with good certificates for both ends.
pub(crate) fn credentials() -> TempDir {
    let directory = TempDir::new().unwrap();
    Authority::new("the test's CA").unwrap().furnish(directory.path()).unwrap();
    directory
}

/// TLS over both ends of a connection: its client, its server. What is between them may be a fault layer.
pub(crate) fn tls_over(
    (near, far): (Box<dyn Channel>, Box<dyn Channel>),
) -> (Result<TlsChannel>, Result<TlsChannel>) {
    let directory = credentials();
    let client = TlsClient::load(directory.path(), None).unwrap();
    let server = TlsServer::load(directory.path()).unwrap();
    std::thread::scope(|scope| {
        let near = scope.spawn(|| TlsChannel::client(near, &client, "localhost", soon(), &cancel()));
        let far = TlsChannel::server(far, &server, soon(), &cancel());
        (near.join().unwrap(), far)
    })
}

pub(crate) fn tls(ends: (Box<dyn Channel>, Box<dyn Channel>)) -> (Box<dyn Channel>, Box<dyn Channel>) {
    let (client, server) = tls_over(ends);
    (Box::new(client.unwrap()), Box::new(server.unwrap()))
}

/// A WebSocket over both ends of a connection: its client, its server.
pub(crate) fn websocket(
    (near, far): (Box<dyn Channel>, Box<dyn Channel>),
) -> (Box<dyn Channel>, Box<dyn Channel>) {
    std::thread::scope(|scope| {
        let near = scope.spawn(|| WebSocketChannel::client(near, "localhost:1", "/vm", soon(), &cancel()));
        let far = WebSocketChannel::server(far, "/vm", soon(), &cancel()).unwrap();
        (Box::new(near.join().unwrap().unwrap()) as Box<dyn Channel>, Box::new(far) as Box<dyn Channel>)
    })
}

pub(crate) fn unix_address(directory: &Path) -> Address {
    Address::Unix(directory.join("s"))
}

/// Bytes that differ from their neighbours and from those a power of two away.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

pub(crate) fn send_all(channel: &dyn Channel, bytes: &[u8]) -> Result<()> {
    channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty())
}

pub(crate) fn recv_exact(channel: &dyn Channel, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    channel.recv_exact(&mut [IoBufMut::from(bytes.as_mut_slice())])?;
    Ok(bytes)
}

/// All bytes to the end of the stream.
pub(crate) fn recv_to_end(channel: &dyn Channel) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let mut bytes = [0; 1000];
        match channel.recv(&mut [IoBufMut::from(&mut bytes)], Default::default())? {
            0 => return Ok(all),
            n => all.extend_from_slice(&bytes[..n]),
        }
    }
}

/// Starts a thread and returns once it sleeps in a system call.
pub(crate) fn spawn_asleep<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    work: impl FnOnce() -> T + Send + 's,
) -> ScopedJoinHandle<'s, T> {
    let (tell, told) = mpsc::channel::<PathBuf>();
    let thread = scope.spawn(move || {
        tell.send(Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap())).unwrap();
        work()
    });
    let stat = told.recv().unwrap().join("stat");
    let deadline = soon();
    let mut asleep = 0;
    while asleep < 5 {
        assert!(Instant::now() < deadline, "the thread never fell asleep");
        let text = std::fs::read_to_string(&stat).unwrap_or_default();
        let state = text.rsplit(") ").next().and_then(|rest| rest.chars().next());
        asleep = if state == Some('S') { asleep + 1 } else { 0 };
        if thread.is_finished() {
            return thread;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    thread
}

/// Waits for a condition.
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = soon();
    while !condition() {
        assert!(Instant::now() < deadline, "{what} never came");
        std::thread::sleep(Duration::from_millis(1));
    }
}
