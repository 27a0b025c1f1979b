//! `towline vsock` with a driver over shared memory in the place of a guest.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_frontend::vsock::{Event, Guest, Options, Ports};
use towline_frontend::wire::feature;
use towline_frontend::{Frontend, Memory};

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");
const WITHIN: Duration = Duration::from_secs(60);
const CID: u64 = 33;

/// A directory, and processes that serve guests there.
struct Place {
    directory: tempfile::TempDir,
}

/// Killed with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Place {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&self, args: &[&str]) -> Process {
        let mut command = Command::new(TOWLINE);
        command.arg("vsock").args(args).current_dir(self.directory.path());
        Process(command.stdout(Stdio::null()).spawn().unwrap())
    }

    /// A guest whose frontend is at this socket.
    fn guest(&self, socket: &str, cid: u64) -> (Frontend, Guest) {
        let mut frontend = Frontend::connect(&self.path(socket), WITHIN).unwrap();
        let features = frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap().features;
        let options = Options { cid, size: 64, receive_bytes: 4096, features, takes_at_once: true };
        let memory = Arc::new(Memory::new(Guest::memory_bytes(&options)).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let guest = Guest::start(&mut frontend, &memory, options).unwrap();
        (frontend, guest)
    }
}

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

fn reach(guest: &mut Guest, ports: Ports) {
    guest.request(ports);
    until(guest, |_, event| (event == Event::Connected(ports)).then_some(()));
}

/// A process dies with packets that it holds for a host side that does not read, while later ones were completed: the used
/// index does not say which chains are in flight, the record does.
#[test]
fn a_process_that_is_killed_completes_no_chain_twice_and_loses_none() {
    let place = Place::new();
    let args = ["--socket", "s", "--cid", "33", "--uds", "v", "--state", "record"];
    let mut process = place.start(&args);
    let (frontend, mut guest) = place.guest("s", CID);
    let (silent, quick) = (place.path("v_5000"), place.path("v_5001"));
    let (silent, quick) = (UnixListener::bind(silent).unwrap(), UnixListener::bind(quick).unwrap());
    let (stalled, busy) = ((6000, 5000), (6001, 5001));
    reach(&mut guest, stalled);
    reach(&mut guest, busy);
    let (_never_read, (mut read, _)) = (silent.accept().unwrap(), quick.accept().unwrap());
    // Until no more is taken, and the device holds what it could not hand on.
    let mut idle = 0;
    while idle < 20 {
        let sent = guest.has_room() && guest.send_any(stalled, 20_000);
        guest.poll(|_, _| ()).unwrap();
        idle = if sent { 0 } else { idle + 1 };
        if !sent {
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
    let held = guest.tx().in_flight();
    assert!(held > 0, "no chain is held");
    let mut bytes = [0; 5];
    for _ in 0..10 {
        assert!(guest.send(busy, b"later", 0));
        guest.poll(|_, _| ()).unwrap();
        read.read_exact(&mut bytes).unwrap();
    }
    let deadline = Instant::now() + WITHIN;
    while guest.tx().in_flight() > held {
        guest.poll(|_, _| ()).unwrap();
        assert!(Instant::now() < deadline, "{} chains are out, {held} are held", guest.tx().in_flight());
    }
    process.0.kill().unwrap();
    process.0.wait().unwrap();
    drop(frontend);

    let _process = place.start(&args);
    let mut frontend = Frontend::connect(&place.path("s"), WITHIN).unwrap();
    frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap();
    frontend.set_mem_table(Some(&Arc::clone(guest.memory()))).unwrap();
    // What a frontend knows of rings whose backend did not stop them: the used index.
    let bases = [guest.rx().last_used_idx(), guest.tx().last_used_idx()];
    frontend.start(guest.rx(), bases[0]).unwrap();
    frontend.start(guest.tx(), bases[1]).unwrap();
    // The driver fails at a chain that comes back and was not out. What it sent leads nowhere any more, and it is told so.
    until(&mut guest, |_, event| (event == Event::Reset(stalled)).then_some(()));
    let deadline = Instant::now() + WITHIN;
    while guest.tx().in_flight() > 0 {
        guest.poll(|_, _| ()).unwrap();
        assert!(Instant::now() < deadline, "{} of {held} chains do not come back", guest.tx().in_flight());
    }
    let again = (6002, 5001);
    reach(&mut guest, again);
    let (mut read, _) = quick.accept().unwrap();
    assert!(guest.send(again, b"again", 0));
    guest.poll(|_, _| ()).unwrap();
    read.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"again");
}

/// The lines of a process's log until one has these words.
fn wait_for_line(log: &mut BufReader<ChildStderr>, words: &str) {
    let mut all = String::new();
    while !all.lines().last().is_some_and(|line| line.contains(words)) {
        assert!(log.read_line(&mut all).unwrap() > 0, "{words:?} is not in {all:?}");
    }
}

/// With few descriptors each guest has its share, so one with all the connections that it may have takes nothing of another's:
/// neither connections nor its frontend.
#[test]
fn a_guest_with_all_its_connections_leaves_another_its_own() {
    let place = Place::new();
    // The shell lowers the limit of the process that takes its place.
    let script = format!(
        "ulimit -n 400; exec {TOWLINE} vsock --guest cid=33,socket=a,uds=av --guest cid=34,socket=b,uds=bv"
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(place.directory.path());
    let _process = Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let (_hostile_frontend, mut hostile) = place.guest("a", 33);
    let listener = UnixListener::bind(place.path("av_5000")).unwrap();
    let mut streams = Vec::new();
    for port in 0..1000 {
        hostile.request((port, 5000));
        let connected = until(&mut hostile, |_, event| match event {
            Event::Connected(_) => Some(true),
            Event::Reset(_) => Some(false),
            _ => None,
        });
        if !connected {
            break;
        }
        streams.push(listener.accept().unwrap().0);
    }
    assert!((50..200).contains(&streams.len()), "{} connections", streams.len());
    // Its clients on the host say nothing.
    let silent: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(place.path("av")).unwrap()).collect();
    for _ in 0..3 {
        let (_frontend, mut guest) = place.guest("b", 34);
        let mut client = UnixStream::connect(place.path("bv")).unwrap();
        client.write_all(b"CONNECT 22\n").unwrap();
        until(&mut guest, |_, event| matches!(event, Event::Request((22, _))).then_some(()));
    }
    drop(silent);
}

/// More connections than a share are promised by no option.
#[test]
fn a_limit_beyond_the_descriptors_is_named() {
    let place = Place::new();
    let script = format!("ulimit -n 400; exec {TOWLINE} vsock --cid 33 --socket s --connections-limit 1000");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(place.directory.path());
    let mut process = Process(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut log = BufReader::new(process.0.stderr.take().unwrap());
    wait_for_line(&mut log, "--connections-limit is more than a guest's share");
}
