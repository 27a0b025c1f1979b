//! Backends that listen, connect, or inherit a socket: frontends are served one after the other until
//! cancelled.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use tempfile::TempDir;
use towline_vhost_user::message::{MessageHeader, RequestCode};
use towline_vhost_user::{Address, Cancel, Device, FrontendSource, Listener, ServeError};

use crate::harness::Echo;

struct Backend {
    cancel: Cancel,
    thread: JoinHandle<Result<(), ServeError>>,
}

impl Backend {
    fn start(frontends: FrontendSource) -> Self {
        let cancel = Cancel::new().unwrap();
        let token = cancel.clone();
        let thread = std::thread::spawn(move || {
            let device: Arc<dyn Device> = Arc::new(Echo);
            frontends.serve(&device, &token)
        });
        Self { cancel, thread }
    }

    /// Cancels it while it waits for a frontend, or serves one.
    fn cancel(self) {
        self.cancel.cancel();
        let error = self.thread.join().unwrap().unwrap_err();
        assert!(matches!(error, ServeError::Channel(towline_channel::Error::Cancelled)), "{error}");
    }
}

/// Requests the number of queues, which is two.
#[track_caller]
fn request_queue_num(stream: &mut UnixStream) {
    let header = MessageHeader { code: RequestCode::GET_QUEUE_NUM, need_reply: false, length: 0 }.encode();
    // In two parts, as a stream permits.
    stream.write_all(&header[..5]).unwrap();
    stream.write_all(&header[5..]).unwrap();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [17, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0]);
    assert_eq!(reply[12..], 2u64.to_le_bytes());
}

/// A frontend that disconnects within a message, one that sends garbage, and a conforming one.
fn frontends(path: &Path) -> UnixStream {
    let mut broken = UnixStream::connect(path).unwrap();
    request_queue_num(&mut broken);
    broken.write_all(&[1, 0, 0]).unwrap();
    drop(broken);
    let mut garbage = UnixStream::connect(path).unwrap();
    garbage.write_all(&[0xff; 12]).unwrap();
    // Its connection is closed.
    assert_eq!(garbage.read(&mut [0; 1]).unwrap(), 0);
    let mut last = UnixStream::connect(path).unwrap();
    request_queue_num(&mut last);
    last
}

#[test]
fn a_listening_backend_serves_frontends() {
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("backend.sock");
    let backend =
        Backend::start(FrontendSource::Listen(Listener::bind(&Address::Unix(path.clone())).unwrap()));
    let _last = frontends(&path);
    backend.cancel();
    assert!(!path.exists(), "the socket file is left behind");
}

#[test]
fn a_backend_serves_an_inherited_socket() {
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("manager.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let backend = Backend::start(FrontendSource::from_fd(OwnedFd::from(listener)).unwrap());
    drop(frontends(&path));
    backend.cancel();
}

#[test]
fn a_backend_serves_an_inherited_connection() {
    let (mut near, far) = UnixStream::pair().unwrap();
    let backend = Backend::start(FrontendSource::from_fd(OwnedFd::from(far)).unwrap());
    request_queue_num(&mut near);
    drop(near);
    // It has no other frontend, so it ends.
    backend.thread.join().unwrap().unwrap();
}

#[test]
fn a_connecting_backend_reconnects() {
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("frontend.sock");
    // Started before its frontend.
    let backend = Backend::start(FrontendSource::Connect(Address::Unix(path.clone())));
    for _ in 0..3 {
        let listener = UnixListener::bind(&path).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        request_queue_num(&mut stream);
        std::fs::remove_file(&path).unwrap();
    }
    backend.cancel();
}

#[test]
fn a_descriptor_of_another_file_is_refused() {
    let null = std::fs::File::open("/dev/null").unwrap();
    let error = FrontendSource::from_fd(OwnedFd::from(null)).unwrap_err().to_string();
    assert!(error.starts_with("the descriptor given as a socket: "), "{error}");
}
