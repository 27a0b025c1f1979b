//! A process that has no descriptor left for a frontend. In a separate binary, because the limit is that of
//! the process.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towline_vhost_user::message::{MessageHeader, RequestCode};
use towline_vhost_user::{
    Address, BackendError, Cancel, Device, FrontendSource, Listener, Next, Queues, ServeError, Worker,
};

/// A device with unused queues.
struct Idle;

impl Device for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn queue_count(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(Idle))
    }
}

impl Worker for Idle {
    fn run(&mut self, _: &mut Queues<'_>) -> Next {
        Next::Wait
    }
}

const WITHIN: Duration = Duration::from_secs(60);

/// Opens all descriptors that the process may have, except for `spare`.
fn exhaust(spare: usize) -> Vec<File> {
    let mut files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    files.truncate(files.len() - spare);
    files
}

fn request_queue_num(stream: &mut UnixStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(WITHIN))?;
    let header = MessageHeader { code: RequestCode::GET_QUEUE_NUM, need_reply: false, length: 0 }.encode();
    stream.write_all(&header)?;
    stream.read_exact(&mut [0; 20])
}

#[test]
fn a_frontend_is_served_when_descriptors_are_released() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum: limit.maximum }).unwrap();
    let scratch = tempfile::TempDir::new().unwrap();
    let paths = ["listen.sock", "manager.sock"].map(|name| scratch.path().join(name));
    let listener = Listener::bind(&Address::Unix(paths[0].clone())).unwrap();
    let manager = UnixListener::bind(&paths[1]).unwrap();
    let all = [FrontendSource::Listen(listener), FrontendSource::from_fd(OwnedFd::from(manager)).unwrap()];
    let mut backends = Vec::from(all.map(|frontends| {
        let cancel = Cancel::new().unwrap();
        let token = cancel.clone();
        let serve = move || {
            let device: Arc<dyn Device> = Arc::new(Idle);
            frontends.serve(&device, &token)
        };
        (cancel, std::thread::spawn(serve))
    }));
    // They listen, and have all descriptors for that.
    paths.iter().for_each(|path| request_queue_num(&mut UnixStream::connect(path).unwrap()).unwrap());
    for (path, spare) in [(&paths[0], 1), (&paths[1], 1), (&paths[0], 2), (&paths[1], 3), (&paths[0], 4)] {
        // One of them is the frontend's own, the next for its connection, the others for its workers.
        let files = exhaust(spare);
        let mut stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let early = stream.read(&mut [0; 1]).unwrap_err();
        if let Some(at) = backends.iter().position(|(_, thread)| thread.is_finished()) {
            drop(files);
            panic!("spare {spare}: {:?}", backends.remove(at).1.join());
        }
        assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock, "the connection stays open without a reply");
        drop(files);
        request_queue_num(&mut stream).unwrap();
    }
    for (cancel, thread) in backends {
        cancel.cancel();
        let error = thread.join().unwrap().unwrap_err();
        assert!(matches!(error, ServeError::Channel(towline_channel::Error::Cancelled)), "{error}");
    }
}
