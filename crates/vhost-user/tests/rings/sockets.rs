//! Whoever connects to whom: each frontend is served, one after the other, until it is enough.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use tempfile::TempDir;
use towline_vhost_user::message::{Code, Header};
use towline_vhost_user::{Address, Cancel, Device, Frontends, Listener, ServeError};

use crate::harness::Echo;

struct Backend {
    cancel: Cancel,
    thread: JoinHandle<Result<(), ServeError>>,
}

impl Backend {
    fn start(frontends: Frontends) -> Self {
        let cancel = Cancel::new().unwrap();
        let pulled = cancel.clone();
        let thread = std::thread::spawn(move || {
            let device: Arc<dyn Device> = Arc::new(Echo);
            frontends.serve(&device, &pulled)
        });
        Self { cancel, thread }
    }

    /// Ends it while it waits for a frontend, or serves one.
    fn cancelled(self) {
        self.cancel.cancel();
        let error = self.thread.join().unwrap().unwrap_err();
        assert!(matches!(error, ServeError::Channel(towline_channel::Error::Cancelled)), "{error}");
    }
}

/// Asks how many queues there are; two.
#[track_caller]
fn answered(stream: &mut UnixStream) {
    let header = Header { code: Code::GET_QUEUE_NUM, need_reply: false, length: 0 }.encode();
    // In two pieces, as a stream may have it.
    stream.write_all(&header[..5]).unwrap();
    stream.write_all(&header[5..]).unwrap();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [17, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0]);
    assert_eq!(reply[12..], 2u64.to_le_bytes());
}

/// A frontend that breaks off within a message, one that says nonsense, and one that behaves.
fn frontends(path: &Path) -> UnixStream {
    let mut broken = UnixStream::connect(path).unwrap();
    answered(&mut broken);
    broken.write_all(&[1, 0, 0]).unwrap();
    drop(broken);
    let mut nonsense = UnixStream::connect(path).unwrap();
    nonsense.write_all(&[0xff; 12]).unwrap();
    // It is hung up on.
    assert_eq!(nonsense.read(&mut [0; 1]).unwrap(), 0);
    let mut last = UnixStream::connect(path).unwrap();
    answered(&mut last);
    last
}

#[test]
fn a_backend_that_listens() {
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("backend.sock");
    let backend = Backend::start(Frontends::Listen(Listener::bind(&Address::Unix(path.clone())).unwrap()));
    let _last = frontends(&path);
    backend.cancelled();
    assert!(!path.exists(), "it leaves no socket behind");
}

#[test]
fn a_backend_with_a_socket_of_its_manager() {
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("manager.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let backend = Backend::start(Frontends::from_fd(OwnedFd::from(listener)).unwrap());
    drop(frontends(&path));
    backend.cancelled();
}

#[test]
fn a_backend_with_a_connection_of_its_manager() {
    let (mut near, far) = UnixStream::pair().unwrap();
    let backend = Backend::start(Frontends::from_fd(OwnedFd::from(far)).unwrap());
    answered(&mut near);
    drop(near);
    // There is no other, so that was it.
    backend.thread.join().unwrap().unwrap();
}

#[test]
fn a_backend_that_connects_comes_back() {
    let scratch = TempDir::new().unwrap();
    let path = scratch.path().join("frontend.sock");
    // It comes before the frontend is there.
    let backend = Backend::start(Frontends::Connect(Address::Unix(path.clone())));
    for _ in 0..3 {
        let listener = UnixListener::bind(&path).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        answered(&mut stream);
        std::fs::remove_file(&path).unwrap();
    }
    backend.cancelled();
}

#[test]
fn what_is_no_socket_is_refused() {
    let null = std::fs::File::open("/dev/null").unwrap();
    let error = Frontends::from_fd(OwnedFd::from(null)).unwrap_err().to_string();
    assert!(error.starts_with("the descriptor given as a socket: "), "{error}");
}
