//! The whole device, with a driver over shared memory in the place of a guest, and real sockets.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towline_frontend::vsock::{Event, Guest, Options};
use towline_frontend::wire::{Code, halves};
use towline_frontend::{Frontend, Memory};
use towline_vhost_user::{Address, Cancel, Device, Frontends, Listener};
use towline_vsock::{Limits, Settings, Siblings, Vsock};

const WITHIN: Duration = Duration::from_secs(60);
const CID: u64 = 33;
/// `VHOST_USER_PROTOCOL_F_DEVICE_STATE`.
const DEVICE_STATE: u64 = 1 << 19;

/// A device that serves.
struct Served {
    directory: TempDir,
    device: Arc<Vsock>,
    cancel: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn new(limits: Limits) -> Self {
        let directory = TempDir::with_prefix("towline-vsock-").unwrap();
        let settings = Settings {
            cid: CID,
            uds: Some(directory.path().join("v")),
            uds_seqpacket: None,
            rules: Vec::new(),
            groups: Vec::new(),
            limits,
            unmigratable: false,
        };
        let device = Arc::new(Vsock::new(settings, &Arc::default()).unwrap());
        let listener = Listener::bind(&Address::Unix(directory.path().join("d"))).unwrap();
        let cancel = Cancel::new().unwrap();
        let (serving, cancelled) = (Arc::clone(&device), cancel.clone());
        let thread = std::thread::spawn(move || {
            let device: Arc<dyn Device> = serving;
            assert!(Frontends::Listen(listener).serve(&device, &cancelled).is_err());
        });
        Self { directory, device, cancel, thread: Some(thread) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn guest(&self) -> (Frontend, Guest) {
        let options = Options { cid: CID, size: 128, receive_bytes: 4096, features: 0, takes_at_once: true };
        let mut frontend = Frontend::connect(&self.path("d"), WITHIN).unwrap();
        let agreed = frontend.negotiate(0, 1 << 29, DEVICE_STATE).unwrap();
        let options = Options { features: agreed.features, ..options };
        let memory = Arc::new(Memory::new(Guest::memory_bytes(&options)).unwrap());
        frontend.share(Some(&memory)).unwrap();
        let guest = Guest::start(&mut frontend, &memory, options).unwrap();
        (frontend, guest)
    }

    fn connect(&self, port: u32) -> UnixStream {
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
fn until<T>(guest: &mut Guest, mut found: impl FnMut(&mut Guest, Event) -> Option<T>) -> T {
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
fn reach(served: &Served, guest: &mut Guest, port: u32) -> ((u32, u32), UnixStream) {
    let listener = UnixListener::bind(served.path(&format!("v_{port}"))).unwrap();
    let ports = (port + 1000, port);
    guest.request(ports);
    until(guest, |_, event| (event == Event::Connected(ports)).then_some(()));
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    (ports, stream)
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]).collect()
}

#[test]
fn what_is_held_when_a_ring_stops_is_not_lost() {
    let served = Served::new(Limits::default());
    let (mut frontend, mut guest) = served.guest();
    let (ports, mut stream) = reach(&served, &mut guest, 5000);
    // As much as the device takes for a socket that nobody reads.
    let content = bytes(8 << 20);
    let (mut sent, mut idle) = (0, 0);
    while idle < 20 {
        let piece = &content[sent..(sent + 20_000).min(content.len())];
        if guest.has_room() && guest.send(ports, piece, 0) {
            sent += piece.len();
            idle = 0;
        } else {
            idle += 1;
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
        guest.poll(|_, _| ()).unwrap();
    }
    assert!(sent > 200_000 && sent < content.len(), "{sent}");
    let in_flight = guest.tx().in_flight();
    assert!(in_flight > 0, "chains are held");
    let base = frontend.stop(1).unwrap();
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(guest.tx().in_flight(), 0);
    frontend.start(guest.tx(), base).unwrap();
    guest.shutdown(ports, 2);
    guest.poll(|_, _| ()).unwrap();
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).unwrap();
    assert!(heard == content[..sent], "{} of {sent} bytes", heard.len());
}

#[test]
fn a_driver_that_begins_anew_has_no_connections() {
    let served = Served::new(Limits::default());
    let (mut frontend, mut guest) = served.guest();
    let (_, mut stream) = reach(&served, &mut guest, 5000);
    frontend.stop(0).unwrap();
    frontend.stop(1).unwrap();
    let options = Options {
        cid: CID,
        size: 64,
        receive_bytes: 4096,
        features: frontend.agreed().features,
        takes_at_once: true,
    };
    let memory = Arc::new(Memory::new(Guest::memory_bytes(&options)).unwrap());
    frontend.share(Some(&memory)).unwrap();
    let mut guest = Guest::start(&mut frontend, &memory, options).unwrap();
    let mut heard = Vec::new();
    // Its end may be a reset.
    let _ = stream.read_to_end(&mut heard);
    assert!(heard.is_empty());
    std::fs::remove_file(served.path("v_5000")).unwrap();
    let (ports, mut stream) = reach(&served, &mut guest, 5000);
    assert!(guest.send(ports, b"again", 0));
    guest.poll(|_, _| ()).unwrap();
    let mut heard = [0; 5];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"again");
}

#[test]
fn a_state_resets_what_the_guest_had_elsewhere() {
    let (here, there) = (Served::new(Limits::default()), Served::new(Limits::default()));
    let (mut frontend, mut guest) = here.guest();
    let (ports, _stream) = reach(&here, &mut guest, 5000);
    let _other = here.connect(22);
    let asked = until(&mut guest, |guest, event| match event {
        Event::Request(ports) => {
            guest.accept(ports);
            Some(ports)
        }
        _ => None,
    });
    guest.poll(|_, _| ()).unwrap();
    let bases = [0, 1].map(|index| frontend.stop(index).unwrap());
    let state = save(&mut frontend);
    // The guest goes on with another device: same memory, same rings, connections that are not there.
    let mut other = Frontend::connect(&there.path("d"), WITHIN).unwrap();
    other.negotiate(0, 1 << 29, DEVICE_STATE).unwrap();
    other.share(Some(&Arc::clone(guest.memory()))).unwrap();
    assert_ne!(load(&mut other, &state[1..]), 0, "half a state is taken");
    assert_eq!(load(&mut other, &state), 0);
    other.start(guest.rx(), bases[0]).unwrap();
    other.start(guest.tx(), bases[1]).unwrap();
    let mut left = vec![ports, asked];
    until(&mut guest, |_, event| {
        if let Event::Reset(ports) = event {
            left.retain(|other| *other != ports);
        }
        left.is_empty().then_some(())
    });
    // New ones get other ports than the last process gave.
    let _stream = there.connect(22);
    let again =
        until(&mut guest, |_, event| if let Event::Request(ports) = event { Some(ports) } else { None });
    assert_eq!(again.1, asked.1 + 1);
    assert_eq!(there.device.migration_version(), here.device.migration_version());
    assert!(there.device.accepts(&here.device.migration_version().unwrap()).is_ok());
    let refused = there.device.accepts("vsock 1 seqpacket cid 34").unwrap_err();
    assert!(refused.to_string().contains("context 34, and this is for 33"));
}

fn save(frontend: &mut Frontend) -> Vec<u8> {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let reply = frontend.ask(Code::SET_DEVICE_STATE_FD, &halves(0, 0), &[writer.as_fd()]).unwrap();
    assert_eq!(reply[0], 0);
    drop(writer);
    let mut state = Vec::new();
    reader.read_to_end(&mut state).unwrap();
    assert_eq!(frontend.number(Code::CHECK_DEVICE_STATE).unwrap(), 0);
    state
}

/// What CHECK_DEVICE_STATE says.
fn load(frontend: &mut Frontend, state: &[u8]) -> u64 {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let reply = frontend.ask(Code::SET_DEVICE_STATE_FD, &halves(1, 0), &[reader.as_fd()]).unwrap();
    assert_eq!(reply[0], 0);
    writer.write_all(state).unwrap();
    drop((writer, reader));
    frontend.number(Code::CHECK_DEVICE_STATE).unwrap()
}

#[test]
fn thousands_of_connections_take_the_memory_that_was_stated() {
    towline_vsock::allow_descriptors();
    let limits = Limits { memory: 32 << 20, ..Limits::default() };
    let served = Served::new(limits);
    let (_frontend, mut guest) = served.guest();
    let listener = UnixListener::bind(served.path("v_5000")).unwrap();
    let wanted = 2_000;
    let accepting =
        std::thread::spawn(move || (0..wanted).map(|_| listener.accept().unwrap().0).collect::<Vec<_>>());
    let mut connected = 0;
    for port in 0..wanted {
        guest.request((port, 5000));
        guest.poll(|_, event| connected += u32::from(matches!(event, Event::Connected(_)))).unwrap();
    }
    until(&mut guest, |_, event| {
        assert!(!matches!(event, Event::Reset(_)), "refused after {connected}");
        connected += u32::from(matches!(event, Event::Connected(_)));
        (connected == wanted).then_some(())
    });
    assert_eq!(accepting.join().unwrap().len(), wanted as usize);
    let report = served.device.report();
    assert_eq!((report.statistics.connections, report.kept), (u64::from(wanted), 0));
    // One more than there is memory promised for: 16 KiB each.
    guest.request((1_000_000, 5000));
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(report.statistics.table.refused_by_limit, 0);
}

/// Siblings that nobody else has.
#[test]
fn a_context_is_one_guest_s() {
    let siblings = Arc::new(Siblings::default());
    let settings = |cid| Settings {
        cid,
        uds: None,
        uds_seqpacket: None,
        rules: Vec::new(),
        groups: Vec::new(),
        limits: Limits::default(),
        unmigratable: false,
    };
    let _one = Vsock::new(settings(3), &siblings).unwrap();
    let other = Vsock::new(settings(3), &siblings).unwrap_err();
    assert_eq!(other.to_string(), "the context 3 is another guest's already; each needs one of its own");
}
