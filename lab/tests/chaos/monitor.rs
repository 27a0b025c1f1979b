//! A proxy between towline and a monitor, as a management layer may run one.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use towline_lab::Qemu;

/// Interval at which the proxy checks whether it is cut or held.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
const BUFFER_BYTES: usize = 16 << 10;

/// Forwards each connection to the monitor until it is cut or dropped. File descriptors are not forwarded.
pub(crate) struct MonitorProxy {
    path: PathBuf,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    cut: AtomicBool,
    guest_state: AtomicBool,
}

impl MonitorProxy {
    /// Listens at `path`.
    pub(crate) fn start(qemu: &Qemu, path: PathBuf) -> Self {
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (state, monitor) = (Arc::new(State::default()), qemu.qmp_path().to_owned());
        let accepting = Arc::clone(&state);
        std::thread::spawn(move || accepting.accept(&listener, &monitor));
        Self { path, state }
    }

    /// The endpoint of a command line.
    pub(crate) fn endpoint(&self) -> String {
        format!("qmp:{}", self.path.display())
    }

    /// Closes all connections, and accepts no more.
    pub(crate) fn cut(&self) {
        self.state.cut.store(true, Ordering::Release);
    }

    /// Forwards nothing until [`Self::release`].
    pub(crate) fn hold(&self) {
        self.state.guest_state.store(true, Ordering::Release);
    }

    /// Forwards again.
    pub(crate) fn release(&self) {
        self.state.guest_state.store(false, Ordering::Release);
    }
}

impl Drop for MonitorProxy {
    fn drop(&mut self) {
        self.cut();
    }
}

impl State {
    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    fn accept(self: &Arc<Self>, listener: &UnixListener, monitor: &Path) {
        while !self.is_cut() {
            match listener.accept() {
                Ok((client, _)) => self.join(client, monitor),
                Err(_) => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Forwards both directions, in a thread each. If the monitor cannot be reached, the connection is
    /// closed.
    fn join(self: &Arc<Self>, client: UnixStream, monitor: &Path) {
        let Ok(server) = UnixStream::connect(monitor) else { return };
        let ways = [(client.try_clone(), server.try_clone()), (Ok(server), Ok(client))];
        for (from, to) in ways {
            let (from, to, state) = (from.unwrap(), to.unwrap(), Arc::clone(self));
            std::thread::spawn(move || state.forward(from, to));
        }
    }

    fn forward(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut buffer = [0; BUFFER_BYTES];
        from.set_read_timeout(Some(POLL_INTERVAL)).unwrap();
        while !self.is_cut() {
            if self.guest_state.load(Ordering::Acquire) {
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(received) if to.write_all(&buffer[..received]).is_ok() => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Ok(_) | Err(_) => break,
            }
        }
        for stream in [from, to] {
            // The peer may have closed the connection.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
