//! A device that serves, with a driver over shared memory in the place of a guest.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towline_frontend::vsock::{Event, Guest, Options};
use towline_frontend::wire::{feature, protocol};
use towline_frontend::{Frontend, Memory};
use towline_vhost_user::{Address, Cancel, Device, Frontends, Listener};
use towline_vsock::{Limits, LocalGuests, Settings, Vsock, ZeroCopySend};

pub(crate) const WITHIN: Duration = Duration::from_secs(60);
pub(crate) const CID: u64 = 33;
/// `VHOST_USER_PROTOCOL_F_DEVICE_STATE`.
pub(crate) const DEVICE_STATE: u64 = 1 << 19;

/// A device that serves.
pub(crate) struct Served {
    directory: TempDir,
    cid: u64,
    pub(crate) device: Arc<Vsock>,
    cancel: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub(crate) fn new(limits: Limits) -> Self {
        Self::with(limits, CID, &[])
    }

    /// A device for the guest `cid` with these rules.
    pub(crate) fn with(limits: Limits, cid: u64, rules: &[String]) -> Self {
        Self::adapted(limits, cid, |settings, _| {
            settings.rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        })
    }

    /// A device for the guest `cid` whose settings are changed, given its directory.
    pub(crate) fn adapted(limits: Limits, cid: u64, change: impl FnOnce(&mut Settings, &Path)) -> Self {
        Self::among(limits, cid, &Arc::default(), change)
    }

    /// One of several guests of a process.
    pub(crate) fn among(
        limits: Limits,
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
            // The loopback copies in the end, but only the peer's acknowledgement frees a packet there too.
            zero_copy_send: ZeroCopySend::On,
            busy_poll: Duration::from_micros(50),
            unmigratable: false,
        };
        change(&mut settings, directory.path());
        let device = Arc::new(Vsock::new(settings, local_guests).unwrap());
        let listener = Listener::bind(&Address::Unix(directory.path().join("d"))).unwrap();
        let cancel = Cancel::new().unwrap();
        let (serving, cancelled) = (Arc::clone(&device), cancel.clone());
        let thread = std::thread::spawn(move || {
            let device: Arc<dyn Device> = serving;
            assert!(Frontends::Listen(listener).serve(&device, &cancelled).is_err());
        });
        Self { directory, cid, device, cancel, thread: Some(thread) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn guest(&self) -> (Frontend, Guest) {
        self.guest_with(128)
    }

    /// A guest whose rings have so many entries.
    pub(crate) fn guest_with(&self, size: u16) -> (Frontend, Guest) {
        let options = Options { cid: self.cid, size, receive_bytes: 4096, features: 0, takes_at_once: true };
        let mut frontend = Frontend::connect(&self.path("d"), WITHIN).unwrap();
        let agreed = frontend.negotiate(0, feature::EVENT_IDX, DEVICE_STATE | protocol::MEM_SLOTS).unwrap();
        let options = Options { features: agreed.features, ..options };
        let memory = Arc::new(Memory::new(Guest::memory_bytes(&options)).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let guest = Guest::start(&mut frontend, &memory, options).unwrap();
        (frontend, guest)
    }

    pub(crate) fn connect(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.path("v")).unwrap();
        stream.set_read_timeout(Some(WITHIN)).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        stream
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// Polls until something is found.
pub(crate) fn until<T>(guest: &mut Guest, mut found: impl FnMut(&mut Guest, Event) -> Option<T>) -> T {
    let deadline = Instant::now() + WITHIN;
    loop {
        let mut what = None;
        guest.poll(|guest, event| what = what.take().or(found(guest, event))).unwrap();
        if let Some(what) = what {
            return what;
        }
        assert!(Instant::now() < deadline, "nothing came");
        guest.wait(false, Duration::from_millis(20)).unwrap();
    }
}

/// The guest's connection to a socket of the host's.
pub(crate) fn reach(served: &Served, guest: &mut Guest, port: u32) -> ((u32, u32), UnixStream) {
    let listener = UnixListener::bind(served.path(&format!("v_{port}"))).unwrap();
    let ports = (port + 1000, port);
    guest.request(ports);
    until(guest, |_, event| (event == Event::Connected(ports)).then_some(()));
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    (ports, stream)
}

/// Sends all of this, as the host takes it.
pub(crate) fn send_all(guest: &mut Guest, ports: (u32, u32), content: &[u8]) {
    let deadline = Instant::now() + WITHIN;
    let mut sent = 0;
    while sent < content.len() {
        let room = (guest.credit(ports) as usize).min(60_000).min(content.len() - sent);
        if room > 0 && guest.has_room() && guest.send(ports, &content[sent..sent + room], 0) {
            sent += room;
            continue;
        }
        guest.poll(|_, _| ()).unwrap();
        assert!(Instant::now() < deadline, "{sent} of {} bytes were taken", content.len());
        guest.wait(!guest.has_room(), Duration::from_millis(20)).unwrap();
    }
    guest.poll(|_, _| ()).unwrap();
}

/// Bytes that differ from their neighbours.
pub(crate) fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]).collect()
}

/// A socket of the host that keeps messages apart and listens.
pub(crate) fn listen_for_messages(path: &Path) -> OwnedFd {
    let fd = message_socket();
    rustix::net::bind(&fd, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&fd, 16).unwrap();
    fd
}

/// A socket of the host that keeps messages apart.
pub(crate) fn message_socket() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}
