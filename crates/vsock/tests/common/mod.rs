//! A running device, with a driver over shared memory in place of a guest.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::{Read, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towline_frontend::vsock::{Options, PortPair, VsockEvent, VsockGuest};
use towline_frontend::wire::{feature, protocol};
use towline_frontend::{Frontend, MemoryArena};
use towline_vhost_user::{Address, Cancel, Device, FrontendSource, Listener};
use towline_vsock::{ConnectionLimits, LocalGuests, Settings, Vsock};

/// Time limit of everything that a test waits for.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const CID: u64 = 33;
/// `VHOST_USER_PROTOCOL_F_DEVICE_STATE`.
pub(crate) const DEVICE_STATE: u64 = 1 << 19;

/// A running device.
pub(crate) struct Served {
    directory: TempDir,
    cid: u64,
    pub(crate) device: Arc<Vsock>,
    cancel: Cancel,
    threads: Vec<JoinHandle<()>>,
}

impl Served {
    pub(crate) fn new(limits: ConnectionLimits) -> Self {
        Self::with_rules(limits, CID, &[])
    }

    /// Starts a device for the guest `cid` with these rules.
    pub(crate) fn with_rules(limits: ConnectionLimits, cid: u64, rules: &[String]) -> Self {
        Self::with_settings(limits, cid, |settings, _| {
            settings.rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        })
    }

    /// Starts a device for the guest `cid`. `change` adapts its settings, and gets its directory.
    pub(crate) fn with_settings(
        limits: ConnectionLimits,
        cid: u64,
        change: impl FnOnce(&mut Settings, &Path),
    ) -> Self {
        Self::with_local_guests(limits, cid, &Arc::default(), change)
    }

    /// Starts the device of one of several guests of a process.
    pub(crate) fn with_local_guests(
        limits: ConnectionLimits,
        cid: u64,
        local_guests: &Arc<LocalGuests>,
        change: impl FnOnce(&mut Settings, &Path),
    ) -> Self {
        let directory = TempDir::with_prefix("towline-vsock-").unwrap();
        let mut settings = Settings {
            cid,
            uds: Some(directory.path().join("v")),
            uds_seqpacket: None,
            rules: Vec::new(),
            groups: Vec::new(),
            limits,
            busy_poll: Duration::from_micros(50),
        };
        change(&mut settings, directory.path());
        let device = Arc::new(Vsock::new(settings, local_guests).unwrap());
        let listener = Listener::bind(&Address::Unix(directory.path().join("d"))).unwrap();
        let cancel = Cancel::new().unwrap();
        let (serving, cancelled) = (Arc::clone(&device), cancel.clone());
        let thread = std::thread::spawn(move || {
            let device: Arc<dyn Device> = serving;
            assert!(FrontendSource::Listen(listener).serve(&device, &cancelled).is_err());
        });
        let (serving, cancelled) = (Arc::clone(&device), cancel.clone());
        let clients = std::thread::spawn(move || serving.serve_unconnected(&cancelled).unwrap());
        Self { directory, cid, device, cancel, threads: vec![thread, clients] }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn guest(&self) -> (Frontend, VsockGuest) {
        self.guest_with_rings(128)
    }

    /// Connects a guest whose rings have `size` entries.
    pub(crate) fn guest_with_rings(&self, size: u16) -> (Frontend, VsockGuest) {
        self.guest_with_features(size, feature::EVENT_IDX)
    }

    /// As [`Served::guest_with_rings`], with these features if the device has them.
    pub(crate) fn guest_with_features(&self, size: u16, features: u64) -> (Frontend, VsockGuest) {
        let options = Options { cid: self.cid, size, receive_bytes: 4096, features: 0, takes_at_once: true };
        let mut frontend = Frontend::connect(&self.path("d"), TIMEOUT).unwrap();
        let agreed = frontend.negotiate(0, features, DEVICE_STATE | protocol::MEM_SLOTS).unwrap();
        let options = Options { features: agreed.features, ..options };
        let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options)).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let guest = VsockGuest::start(&mut frontend, &memory, options).unwrap();
        (frontend, guest)
    }

    pub(crate) fn connect(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.path("v")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        stream
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.cancel.cancel();
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// Polls the driver until `found` returns a value.
pub(crate) fn poll_until<T>(
    guest: &mut VsockGuest,
    mut found: impl FnMut(&mut VsockGuest, VsockEvent) -> Option<T>,
) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let mut what = None;
        guest.poll(|guest, event| what = what.take().or(found(guest, event))).unwrap();
        if let Some(what) = what {
            return what;
        }
        assert!(Instant::now() < deadline, "the expected event has not come");
        guest.wait(false, Duration::from_millis(20)).unwrap();
    }
}

/// Connects the guest to a Unix socket of the host.
pub(crate) fn connect_guest(served: &Served, guest: &mut VsockGuest, port: u32) -> ((u32, u32), UnixStream) {
    let listener = UnixListener::bind(served.path(&format!("v_{port}"))).unwrap();
    let ports = (port + 1000, port);
    guest.request(ports);
    poll_until(guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    (ports, stream)
}

/// Sends all of this, as fast as the guest has credit.
pub(crate) fn send_all(guest: &mut VsockGuest, ports: PortPair, content: &[u8]) {
    let deadline = Instant::now() + TIMEOUT;
    let mut sent = 0;
    while sent < content.len() {
        let len = (guest.credit(ports) as usize).min(60_000).min(content.len() - sent);
        if len > 0 && guest.can_send() && guest.send(ports, &content[sent..sent + len], 0) {
            sent += len;
            continue;
        }
        guest.poll(|_, _| ()).unwrap();
        assert!(Instant::now() < deadline, "{sent} of {} bytes were sent", content.len());
        guest.wait(!guest.can_send(), Duration::from_millis(20)).unwrap();
    }
    guest.poll(|_, _| ()).unwrap();
}

/// Sends packets of `packet_bytes` until the device accepts no more for a while, or all was sent. Returns the
/// number of bytes sent.
pub(crate) fn send_until_full(
    guest: &mut VsockGuest,
    ports: PortPair,
    content: &[u8],
    packet_bytes: usize,
) -> usize {
    let (mut sent, mut idle) = (0, 0);
    while sent < content.len() && idle < 20 {
        let packet = &content[sent..(sent + packet_bytes).min(content.len())];
        if guest.can_send() && guest.send(ports, packet, 0) {
            sent += packet.len();
            idle = 0;
        } else {
            idle += 1;
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
        guest.poll(|_, _| ()).unwrap();
    }
    sent
}

/// Reads a stream to its end, on a separate thread.
pub(crate) fn read_to_end(mut stream: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        received
    })
}

/// Bytes that differ from their neighbours.
pub(crate) fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]).collect()
}

/// Listens on a `SOCK_SEQPACKET` socket.
pub(crate) fn listen_seqpacket(path: &Path) -> OwnedFd {
    let fd = seqpacket_socket();
    rustix::net::bind(&fd, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&fd, 16).unwrap();
    fd
}

/// Returns a `SOCK_SEQPACKET` socket.
pub(crate) fn seqpacket_socket() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}
