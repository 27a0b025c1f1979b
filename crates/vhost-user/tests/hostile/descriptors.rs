//! Descriptors of a frontend whose last close waits for another process.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;
use towline_channel::{Address, Listener};
use towline_frontend::Frontend;
use towline_frontend::wire::RequestCode;
use towline_vhost_user::{Cancel, Device, FrontendSource};

use crate::backend::{Log, WITHIN};
use crate::harness::Echo;

/// Far less than the close of [`lingering`] takes.
const AT_ONCE: Duration = Duration::from_secs(15);

/// A TCP connection with unsent data whose last close waits for a minute, and its peer, which ends the wait.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    set_socket_linger(&stream, Some(Duration::from_secs(60))).unwrap();
    (stream, peer)
}

#[test]
fn a_socket_whose_close_waits_keeps_neither_the_next_frontend_nor_the_process() {
    let _log = Log::new();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let listener = Listener::bind(&Address::Unix(path.clone())).unwrap();
    let cancel = Cancel::new().unwrap();
    let ends = cancel.clone();
    let server = std::thread::spawn(move || {
        let device: Arc<dyn Device> = Arc::new(Echo);
        FrontendSource::Listen(listener).serve(&device, &ends)
    });
    let begun = Instant::now();
    let header = |code: u32| [code, 1, 0].map(u32::to_le_bytes).concat();
    let any = || RequestCode("any", 1);
    let (mut peers, mut closing) = (Vec::new(), Vec::new());
    // With a request that takes none; more than a message may have; queued after an invalid message.
    for (first, count) in [(None, 1), (None, 8), (Some([0xff; 12]), 1)] {
        let mut frontend = Frontend::connect(&path, WITHIN).unwrap();
        let (stream, peer) = lingering();
        if let Some(first) = first {
            frontend.send(&first, any(), &[]).unwrap();
        }
        // After an invalid message the connection may be closed already.
        let _ = frontend.send(&header(1), any(), &vec![stream.as_fd(); count]);
        drop(frontend);
        // This close waits, too, if the server was quicker.
        closing.push(std::thread::spawn(move || drop(stream)));
        peers.push(peer);
        let mut next = Frontend::connect(&path, WITHIN).unwrap();
        next.negotiate(0, 0, 0).unwrap();
    }
    cancel.cancel();
    server.join().unwrap().unwrap_err();
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    drop(peers);
    closing.into_iter().for_each(|closes| closes.join().unwrap());
}
