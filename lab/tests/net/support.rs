//! Helpers of these tests: cards, guests with one, and traffic.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
pub(crate) use towline_lab::expect::number;
use towline_lab::{
    Builder, LinuxGuest, MemoryBackend, Network, Qemu, Towline, Version, require_lab, skip, wait_until,
};

/// Timeout of anything that must happen. Generous: emulated guests on two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
/// QEMUs that run guests with a card.
pub(crate) const VERSIONS: [Version; 2] = [Version::V10_0, Version::V7_2];
/// Port of the guest's echo.
pub(crate) const ECHO: u16 = 7;
pub(crate) const HOST: &str = "10.7.0.1";
pub(crate) const GUEST: &str = "10.7.0.2";
pub(crate) const GUEST_6: &str = "fd07::2";
/// Address of the guest on its network.
pub(crate) const MAC: &str = "52:54:00:07:00:02";

/// Creates a network namespace, or prints the skip of `name` with its reason.
pub(crate) fn network(name: &str) -> Option<Network> {
    match Network::new() {
        Ok(network) => Some(network),
        Err(error) => {
            skip(name, &format!("no separate network: {error:#}"));
            None
        }
    }
}

/// Network and directory of a test.
pub(crate) struct Fixture {
    pub(crate) network: Network,
    pub(crate) scratch: TempDir,
}

impl Fixture {
    /// Returns `None`, with the skip of `name` printed, if the test cannot run on this machine.
    pub(crate) fn new(name: &str) -> Option<Self> {
        require_lab(name).then(|| network(name))?.map(|network| Self { network, scratch: scratch() })
    }
}

/// Starts a QEMU, and configures its guest.
pub(crate) fn boot(builder: &Builder) -> (Qemu, LinuxGuest) {
    let (qemu, mut guest) = builder.boot(WITHIN).unwrap();
    set_up(&mut guest);
    (qemu, guest)
}

pub(crate) fn scratch() -> TempDir {
    TempDir::with_prefix("towline-lab-").unwrap()
}

/// Creates a persistent tap, with the host's addresses.
pub(crate) fn add_tap(network: &Network, queues: usize) {
    let add = ["ip", "tuntap", "add", "dev", "tap0", "mode", "tap", "vnet_hdr"];
    let multi: &[&str] = if queues > 1 { &["multi_queue"] } else { &[] };
    network.run(&[&add[..], multi].concat()).unwrap();
    give_addresses(network, "tap0");
}

/// Sets the host's addresses, without duplicate detection of the IPv6 one.
pub(crate) fn give_addresses(network: &Network, interface: &str) {
    network.run(&["ip", "address", "add", &format!("{HOST}/24"), "dev", interface]).unwrap();
    network.run(&["ip", "address", "add", "fd07::1/64", "dev", interface, "nodad"]).unwrap();
    network.run(&["ip", "link", "set", interface, "up"]).unwrap();
}

/// Starts `towline net` in a network.
pub(crate) fn start_card(network: &Network, socket: &Path, arguments: &[&str]) -> Towline {
    let net = ["net", "--json", "--socket", socket.to_str().unwrap()];
    Towline::start_after(&network.prefix(), &[&net[..], arguments].concat()).unwrap()
}

/// Starts `towline net` in a network, and waits until it listens.
pub(crate) fn card(network: &Network, socket: &Path, arguments: &[&str]) -> Towline {
    let _ = std::fs::remove_file(socket);
    let mut card = start_card(network, socket, arguments);
    wait_until("the card's socket", WITHIN, || {
        assert!(card.runs()?, "it ended: {}", card.stderr());
        Ok(socket.exists().then_some(()))
    })
    .unwrap();
    card
}

/// Ends a card as a service manager would; returns its final statistics.
pub(crate) fn end(card: Towline) -> Value {
    towline_lab::signal(card.pid(), rustix::process::Signal::TERM);
    let finished = card.wait_done(WITHIN).unwrap();
    let last = finished.stdout.lines().last().unwrap_or_else(|| panic!("no statistics: {}", finished.stderr));
    serde_json::from_str(last).unwrap()
}

/// Sums a number of all queue pairs.
pub(crate) fn sum(statistics: &Value, way: &str, key: &str) -> u64 {
    let pairs = statistics["pairs"].as_array().unwrap();
    pairs.iter().map(|pair| pair[way][key].as_u64().unwrap()).sum()
}

/// Builder of a Linux whose card is served on this socket.
pub(crate) fn builder(version: Version, socket: &Path, queues: usize) -> Builder {
    // QEMU 7.2 without KVM dereferences a null pointer when it sets up the vectors of a vhost-user-net
    // device.
    let vectors = if version == Version::V7_2 { 0 } else { 2 * queues + 2 };
    builder_with(version, socket, queues, vectors)
}

/// As [`builder`], with this number of interrupt vectors; both ends of a migration must have the same.
pub(crate) fn builder_with(version: Version, socket: &Path, queues: usize, vectors: usize) -> Builder {
    Qemu::builder(version)
        .cpu("Nehalem")
        .linux()
        .memory_backend(MemoryBackend::Memfd { prealloc: false })
        .processors(u32::try_from(queues.max(2)).unwrap())
        .args(card_options(version, socket, queues, vectors))
}

/// QEMU's options for the card on this socket.
pub(crate) fn card_options(version: Version, socket: &Path, queues: usize, vectors: usize) -> [String; 6] {
    // The newest has only the other name, which 7.2 lacks.
    let reconnect = if version == Version::Newest { "reconnect-ms=1000" } else { "reconnect=1" };
    [
        "-chardev".to_owned(),
        format!("socket,id=net0,path={},{reconnect}", socket.display()),
        "-netdev".to_owned(),
        format!("vhost-user,id=n0,chardev=net0,queues={queues}"),
        "-device".to_owned(),
        format!("virtio-net-pci,id=card,netdev=n0,mac={MAC},mq={},vectors={vectors}", on_off(queues > 1)),
    ]
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

pub(crate) fn shell(guest: &mut LinuxGuest, line: &str) -> String {
    guest.shell(line, WITHIN).unwrap().trim().to_owned()
}

/// Configures the guest's addresses and starts its echo.
pub(crate) fn set_up(guest: &mut LinuxGuest) {
    shell(guest, "ip link set lo up; sysctl -q -w net.ipv6.conf.eth0.accept_dad=0 2>/dev/null; true");
    shell(guest, "echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad");
    shell(guest, &format!("ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up"));
    shell(guest, &format!("ip -6 addr add {GUEST_6}/64 dev eth0"));
    guest.echo(ECHO).unwrap();
}

pub(crate) fn guest_address(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), ECHO)
}

/// Returns the next bytes of a sequence that does not repeat.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = wait_until("a connection", WITHIN, || match TcpStream::connect_timeout(&to, WITHIN) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(error.into()),
        Err(_) => Ok(None),
    });
    let stream = stream.unwrap();
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    stream.set_write_timeout(Some(WITHIN)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Bytes that are generated and compared at once.
const PART: usize = 1 << 20;

/// Sends `length` bytes to an echo by TCP, and compares the echo.
pub(crate) fn talk(to: SocketAddr, length: usize, seed: u64) {
    let parts = || (0..length).step_by(PART).map(|at| pattern(seed + at as u64, PART.min(length - at)));
    let mut stream = connect(to);
    std::thread::scope(|scope| {
        let mut sender = stream.try_clone().unwrap();
        scope.spawn(move || {
            parts().for_each(|part| sender.write_all(&part).unwrap());
            sender.shutdown(Shutdown::Write).unwrap();
        });
        let mut found = vec![0; PART];
        for (index, part) in parts().enumerate() {
            let found = &mut found[..part.len()];
            stream.read_exact(found).unwrap();
            assert!(found == part, "part {index} came back from {to} as something else");
        }
    });
}

/// Sends a datagram to an echo until it comes back; up to `attempts` may be lost.
pub(crate) fn datagram(to: SocketAddr, length: usize, attempts: usize) {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut found = vec![0; 1 << 16];
    for attempt in 0..attempts {
        let sent = pattern(attempt as u64, length);
        socket.send_to(&sent, to).unwrap();
        // A datagram that came too late is the echo of an earlier one.
        while let Ok((length, _)) = socket.recv_from(&mut found) {
            if found[..length] == sent {
                return;
            }
        }
    }
    panic!("no datagram of {length} bytes came back from {to} in {attempts} attempts");
}

/// Starts an echo in a network of this host, by TCP, until the test ends.
pub(crate) fn host_echo(network: &Network) -> SocketAddr {
    let listener = network.enter(|| TcpListener::bind((HOST, 0)).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let mut bytes = vec![0; 1 << 16];
                while let Ok(length @ 1..) = stream.read(&mut bytes) {
                    if stream.write_all(&bytes[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A connection to the guest's echo that is never idle: blocks of a sequence are sent, and their echo is
/// compared.
pub(crate) struct EchoClient {
    blocks: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    longest: JoinHandle<Duration>,
}

/// Bytes of each block.
const BLOCK: usize = 16 << 10;

impl EchoClient {
    pub(crate) fn begin(network: &Network, to: SocketAddr) -> Self {
        let mut stream = network.enter(|| connect(to)).unwrap();
        let (blocks, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (counter, ends) = (blocks.clone(), stop.clone());
        let longest = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            let mut found = vec![0; BLOCK];
            while !ends.load(SeqCst) {
                let sent = pattern(counter.load(SeqCst), BLOCK);
                let started = Instant::now();
                stream.write_all(&sent).unwrap();
                stream.read_exact(&mut found).unwrap();
                assert!(found == sent, "block {} came back as something else", counter.load(SeqCst));
                longest = longest.max(started.elapsed());
                counter.fetch_add(1, SeqCst);
            }
            longest
        });
        Self { blocks, stop, longest }
    }

    /// Waits until `more` further blocks have come back.
    pub(crate) fn wait_blocks(&self, more: u64) {
        let wanted = self.blocks.load(SeqCst) + more;
        wait_until("progress of a connection", WITHIN, || {
            assert!(!self.longest.is_finished(), "the connection broke");
            Ok((self.blocks.load(SeqCst) >= wanted).then_some(()))
        })
        .unwrap();
    }

    /// Waits for this time, in which all conversations must make progress.
    pub(crate) fn run_for(all: &[Self], time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            all.iter().for_each(|client| client.wait_blocks(1));
        }
    }

    /// Ends it; returns the longest time that a block took.
    pub(crate) fn end(self) -> Duration {
        self.stop.store(true, SeqCst);
        self.longest.join().expect("every block came back as it was sent")
    }
}

/// Connections to the guest's echo, one after the other, that send without waiting for what comes back, which
/// is compared.
pub(crate) struct BulkClient {
    stop: Arc<AtomicBool>,
    bytes: JoinHandle<u64>,
}

impl BulkClient {
    /// Bytes of each connection.
    const BYTES: usize = 4 * PART;

    pub(crate) fn begin(network: &Network, to: SocketAddr) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let ends = stop.clone();
        let talks = move || {
            let rounds = (0..).take_while(|_| !ends.load(SeqCst));
            rounds.map(|round| talk(to, Self::BYTES, round * Self::BYTES as u64)).count() as u64
                * Self::BYTES as u64
        };
        // A thread inherits the network namespace of its parent.
        Self { stop, bytes: network.enter(|| std::thread::spawn(talks)).unwrap() }
    }

    /// Ends after the present connection. Returns the number of bytes received.
    pub(crate) fn end(self) -> u64 {
        self.stop.store(true, SeqCst);
        self.bytes.join().expect("every byte came back as it was sent")
    }
}

pub(crate) fn path(scratch: &TempDir, name: &str) -> PathBuf {
    scratch.path().join(name)
}
