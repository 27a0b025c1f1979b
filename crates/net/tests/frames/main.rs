//! Frames through a card on a real tap, with a driver of `towline-frontend` in place of a guest.
//!
//! ```text
//!   a socket of this host ── UDP, one frame each ── tap0 ── Net ── rings ── a driver with buffers of every size
//! ```
//! The tap is in its own network namespace and has an MTU of 65521, so a datagram of any length is one frame.
#![allow(clippy::unwrap_used, reason = "a failure of a helper is a failure of its test")]

mod acceptance;
#[path = "../common/mod.rs"]
mod common;
mod hold;
mod pause;

use std::net::UdpSocket;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::Served;
use towline_frontend::net::{DriverPair, HEADER_BYTES, Options as DriverOptions, feature};
use towline_frontend::wire::RequestCode;
use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT, LOG_ALL};
use towline_frontend::{Frontend, GUEST_BASE, MemoryArena};
use towline_lab::{Network, skip};
use towline_net::{DropReason, Net, Options, QueueStatistics, Taps};
use towline_vhost_user::Device;

const WITHIN: Duration = Duration::from_secs(60);
const GUEST_MAC: &str = "02:00:00:09:00:02";
const PORT: u16 = 9;
const PAGE: u64 = 4096;
/// Protocol features.
const RARP: u64 = 1 << 2;
const NET_MTU: u64 = 1 << 4;
const DEVICE_STATE: u64 = 1 << 19;
/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;

/// The host's end of the card.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// A tap that the card creates.
    Tap,
    /// A macvtap on one end of a veth pair; the host has the other end.
    Macvtap,
}

/// Rings of the driver.
#[derive(Clone, Copy)]
struct QueueShape {
    /// Index of the pair that the driver uses. The card has no pair after it.
    pair: u32,
    /// Length of a receive buffer.
    receive_bytes: usize,
    size: u16,
    features: u64,
}

/// Held while a macvtap exists: interfaces of two namespaces may have the same index, and thus the same
/// `/dev/tapN`.
static MACVTAP: Mutex<()> = Mutex::new(());

/// A card in a network namespace, served on a thread.
struct Bench {
    // First, because it must be dropped first.
    served: Option<Served>,
    network: Network,
    net: Arc<Net>,
    driver: (Frontend, DriverPair),
    socket: UdpSocket,
    _macvtap: Option<MutexGuard<'static, ()>>,
}

impl Bench {
    /// Returns `None`, and prints the reason, if no network namespace can be created.
    fn new(name: &str, receive_bytes: usize, size: u16, features: u64) -> Option<Self> {
        Self::on(Kind::Tap, name, QueueShape { pair: 0, receive_bytes, size, features })
    }

    fn on(kind: Kind, name: &str, queue: QueueShape) -> Option<Self> {
        let QueueShape { pair, receive_bytes, size, features } = queue;
        let pairs = pair + 1;
        let macvtap = (kind == Kind::Macvtap).then(|| MACVTAP.lock().unwrap_or_else(PoisonError::into_inner));
        let network = network(name)?;
        let run = |line: &str| network.run(&line.split(' ').collect::<Vec<_>>());
        let (card, host) = if kind == Kind::Tap { ("tap0", "tap0") } else { ("card0", "host0") };
        if kind == Kind::Macvtap {
            run("ip link add host0 type veth peer name lower0").unwrap();
            let made = run(&format!(
                "ip link add link lower0 name card0 address {GUEST_MAC} numtxqueues {pairs} numrxqueues {pairs} type macvtap mode bridge"
            ));
            if let Err(error) = made {
                skip(name, &format!("no macvtap: {error:#}"));
                return None;
            }
            for interface in ["host0", "lower0", "card0"] {
                run(&format!("ip link set {interface} mtu 65521 up")).unwrap();
            }
        }
        let taps = network.enter(|| Taps::open(card, pairs as usize)).unwrap().unwrap();
        assert_eq!(taps.is_created(), kind == Kind::Tap);
        for line in [
            &format!("ip link set {host} mtu 65521"),
            &format!("ip address add 10.9.0.1/24 dev {host}"),
            &format!("ip neigh add 10.9.0.2 lladdr {GUEST_MAC} nud permanent dev {host}"),
        ] {
            run(line).unwrap();
        }
        let net = Arc::new(Net::new(taps, Options { device_state: true, ..Options::default() }));
        let (served, mut frontend) = Served::start(&network, &net);
        assert_eq!(frontend.number(RequestCode::GET_QUEUE_NUM).unwrap(), u64::from(pairs), "pairs");
        let taken = frontend.negotiate(features, EVENT_IDX | INDIRECT, RARP | NET_MTU | DEVICE_STATE);
        let features = taken.unwrap().features;
        let options = DriverOptions { size, receive_bytes, transmit_bytes: 1 << 16, features };
        let memory = Arc::new(MemoryArena::new(DriverPair::memory_bytes(&options)).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let pair = DriverPair::start(&mut frontend, &memory, pair, options).unwrap();
        let socket = network.enter(|| UdpSocket::bind(("10.9.0.1", PORT)).unwrap()).unwrap();
        socket.set_read_timeout(Some(WITHIN)).unwrap();
        socket.set_write_timeout(Some(WITHIN)).unwrap();
        Some(Self { network, net, driver: (frontend, pair), socket, served: Some(served), _macvtap: macvtap })
    }

    /// Connects again, and starts both rings as QEMU does: at the used index, and before they are enabled.
    fn connect_again(&mut self) {
        let (served, mut frontend) = Served::start(&self.network, &self.net);
        self.served = Some(served);
        frontend.negotiate(feature::MRG_RXBUF, EVENT_IDX | INDIRECT, 0).unwrap();
        let pair = &mut self.driver.1;
        frontend.set_mem_table(Some(pair.tx().memory())).unwrap();
        pair.receive(|_| {}).unwrap();
        while pair.reclaim().unwrap() > 0 {}
        for ring in <[_; 2]>::from(pair.rings()) {
            frontend.start_only(ring, ring.last_used_idx()).unwrap();
        }
        self.driver.0 = frontend;
    }

    /// Receives datagrams and compares them with these.
    fn expect(&mut self, wanted: &[Vec<u8>]) {
        let pair = &mut self.driver.1;
        let mut found = Vec::new();
        while found.len() < wanted.len() {
            let frames = pair.receive(|frame| {
                let bytes = frame.to_vec();
                let buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
                assert_eq!(usize::from(buffers), frame.buffers(), "num_buffers");
                if let Some(payload) = payload(&bytes[HEADER_BYTES..]) {
                    found.push(payload.to_vec());
                }
            });
            if frames.unwrap() == 0 {
                pair.rx().wait(WITHIN).unwrap();
            }
        }
        for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            assert!(found == wanted, "datagram {index}: {} bytes, expected {}", found.len(), wanted.len());
        }
    }

    fn send(&self, datagrams: &[Vec<u8>]) {
        for datagram in datagrams {
            self.socket.send_to(datagram, ("10.9.0.2", PORT)).unwrap();
        }
    }

    /// Waits until the statistics satisfy a condition: they are updated after the frames were delivered.
    fn wait_for_statistics(
        &self,
        what: &str,
        wanted: impl Fn(&[QueueStatistics; 2]) -> bool,
    ) -> [QueueStatistics; 2] {
        towline_lab::wait_until(what, WITHIN, || {
            let found = self.net.statistics()[0];
            Ok(wanted(&found).then_some(found))
        })
        .unwrap_or_else(|error| panic!("{error}: {:?}", self.net.statistics()))
    }
}

/// Returns `None`, and prints the reason, if no network namespace can be created.
fn network(name: &str) -> Option<Network> {
    let skipped = |error| skip(name, &format!("no separate network: {error:#}"));
    Network::new().map_err(skipped).ok()
}

/// Payload of a datagram to our port; `None` for other frames.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let is_ours = frame.len() >= HEADERS
        && frame[12..14] == [8, 0]
        && frame[23] == 17
        && frame[36..38] == PORT.to_be_bytes();
    is_ours.then(|| &frame[HEADERS..])
}

/// A frame with a datagram to the host's port, its virtio header first.
fn frame(host_mac: [u8; 6], payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; HEADER_BYTES + HEADERS];
    let ethernet = &mut frame[HEADER_BYTES..];
    ethernet[..6].copy_from_slice(&host_mac);
    ethernet[6..14].copy_from_slice(&[2, 0, 0, 9, 0, 2, 8, 0]);
    let length = u16::try_from(28 + payload.len()).unwrap();
    ethernet[14..24].copy_from_slice(&[0x45, 0, (length >> 8) as u8, length as u8, 0, 0, 0, 0, 64, 17]);
    ethernet[26..34].copy_from_slice(&[10, 9, 0, 2, 10, 9, 0, 1]);
    let sum: u32 = ethernet[14..34].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ethernet[24..26].copy_from_slice(&sum.to_be_bytes());
    ethernet[34..38].copy_from_slice(&[0, 9, 0, 9]);
    ethernet[38..40].copy_from_slice(&(length - 20).to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Waits until all transmitted chains are used.
fn wait_until_sent(pair: &mut DriverPair) {
    while pair.tx().in_flight() > 0 {
        if pair.reclaim().unwrap() == 0 {
            pair.wait_room(WITHIN).unwrap();
        }
    }
}

fn datagrams(count: usize, longest: usize) -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(longest as u64);
    // Mostly short ones, so long ones exceed the expected length.
    let mut length = || if random.u8(..4) == 0 { random.usize(1..=longest) } else { random.usize(1..=100) };
    let lengths: Vec<usize> = (0..count).map(|_| length()).collect();
    lengths.into_iter().map(|length| (0..length).map(|_| random.u8(..)).collect()).collect()
}

#[test]
fn frames_of_every_length_fit_into_buffers_of_every_length() {
    let name = "frames_of_every_length_fit_into_buffers_of_every_length";
    let longest = 65_000;
    for (receive_bytes, size, features) in [
        (1536, 256, feature::MRG_RXBUF),
        (1536, 64, feature::MRG_RXBUF),
        (128, 1024, feature::MRG_RXBUF),
        (4096, 256, feature::MRG_RXBUF | feature::OFFLOADS),
        (68 << 10, 64, 0),
    ] {
        let Some(mut bench) = Bench::new(name, receive_bytes, size, features) else { return };
        // Less than the tap can queue.
        for _ in 0..4 {
            let datagrams = datagrams(200, longest);
            bench.send(&datagrams);
            bench.expect(&datagrams);
        }
        let [receive, _] = bench.wait_for_statistics("800 frames", |[receive, _]| receive.packets >= 800);
        assert_eq!(receive.drops, DropReason::ALL.map(|_| 0), "{receive:?}");
        assert!(receive.notifications + receive.notifications_suppressed <= receive.batches, "{receive:?}");
    }
}

#[test]
fn frames_longer_than_a_buffer_are_dropped_and_counted() {
    let name = "frames_longer_than_a_buffer_are_dropped_and_counted";
    let Some(mut bench) = Bench::new(name, 2048, 64, 0) else { return };
    let sent = [vec![1; 100], vec![2; 3000], vec![3; 1900]];
    bench.send(&sent);
    bench.expect(&[sent[0].clone(), sent[2].clone()]);
    bench.wait_for_statistics("a frame that was dropped", |[receive, _]| {
        receive.dropped(DropReason::TooLong) == 1
    });
}

#[test]
fn frames_are_transmitted_and_a_disabled_queue_discards_them() {
    let name = "frames_are_transmitted_and_a_disabled_queue_discards_them";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    // Broadcast, as the host's own address is not known here.
    let mac = [0xff; 6];
    let (mut found, sent) = (vec![0; 1 << 16], datagrams(100, 60_000));
    for (round, datagram) in sent.iter().enumerate() {
        let (frontend, pair) = &mut bench.driver;
        if round % 10 == 9 {
            frontend.enable(1, false).unwrap();
            assert!(pair.transmit(&frame(mac, b"discarded")));
            pair.flush();
            wait_until_sent(pair);
            frontend.enable(1, true).unwrap();
        }
        while pair.reclaim().unwrap() > 0 {}
        assert!(pair.transmit(&frame(mac, datagram)));
        pair.flush();
        let (length, _) = bench.socket.recv_from(&mut found).unwrap();
        assert!(
            found[..length] == datagram[..],
            "datagram {round}: {length} bytes, expected {}",
            datagram.len()
        );
    }
    let pair = &mut bench.driver.1;
    pair.transmit(&[0; HEADER_BYTES + 3]);
    pair.transmit(&[0xff; HEADER_BYTES + 60]);
    pair.flush();
    wait_until_sent(pair);
    bench.wait_for_statistics("100 frames, and two malformed ones", |[_, transmit]| {
        transmit.packets == 100 && transmit.dropped(DropReason::Malformed) == 2
    });
}

#[test]
fn chains_that_are_available_when_a_frontend_connects_are_all_transmitted() {
    let name = "chains_that_are_available_when_a_frontend_connects_are_all_transmitted";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    let (rounds, count) = (10, 50);
    let mut found = vec![0; 1 << 16];
    for round in 0..rounds {
        bench.served = None;
        let datagram = |number: u8| [vec![round, number], vec![number; 200]].concat();
        for number in 0..count {
            assert!(bench.driver.1.transmit(&frame([0xff; 6], &datagram(number))));
        }
        bench.driver.1.flush();
        bench.connect_again();
        let (frontend, pair) = &mut bench.driver;
        // Executed by the worker of both rings, which runs before each of them.
        (0..4).for_each(|_| frontend.enable(0, true).unwrap());
        assert_eq!(pair.reclaim().unwrap(), 0, "chains of a ring that was not enabled are used");
        frontend.enable(1, true).unwrap();
        for number in 0..count {
            let (length, _) = bench.socket.recv_from(&mut found).unwrap();
            assert!(found[..length] == datagram(number), "round {round}: {number} is {:?}", &found[..2]);
        }
        wait_until_sent(&mut bench.driver.1);
    }
    bench.wait_for_statistics("all frames", |[_, transmit]| {
        transmit.packets == u64::from(rounds) * u64::from(count)
    });
}

#[test]
fn frames_that_are_available_together_keep_their_order_around_dropped_ones() {
    let name = "frames_that_are_available_together_keep_their_order_around_dropped_ones";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    let mut found = vec![0; 1 << 16];
    let (rounds, count) = (20u8, 100u8);
    for round in 0..rounds {
        let pair = &mut bench.driver.1;
        let datagram = |number: u8| [vec![round, number], vec![number; 5 * usize::from(number)]].concat();
        let is_malformed = |number: u8| number % 7 == 3;
        for number in 0..count {
            let sent = match number % 14 {
                // No frame after the header, and a header that the kernel refuses.
                3 => pair.transmit(&[0; HEADER_BYTES]),
                10 => pair.transmit(&[0xff; HEADER_BYTES + 60]),
                _ => pair.transmit(&frame([0xff; 6], &datagram(number))),
            };
            assert!(sent, "{number}");
        }
        pair.flush();
        for number in (0..count).filter(|number| !is_malformed(*number)) {
            let (length, _) = bench.socket.recv_from(&mut found).unwrap();
            assert!(found[..length] == datagram(number), "round {round}: {number} is {:?}", &found[..2]);
        }
        wait_until_sent(&mut bench.driver.1);
    }
    let malformed = u64::from(rounds) * (0..count).filter(|number| number % 7 == 3).count() as u64;
    bench.wait_for_statistics("all frames", |[_, transmit]| {
        transmit.packets + malformed == u64::from(rounds) * u64::from(count)
            && transmit.dropped(DropReason::Malformed) == malformed
    });
}

#[test]
fn a_transmit_ring_that_is_never_enabled_discards_its_frames() {
    let name = "a_transmit_ring_that_is_never_enabled_discards_its_frames";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    bench.served = None;
    for _ in 0..20 {
        assert!(bench.driver.1.transmit(&frame([0xff; 6], b"discarded")));
    }
    bench.driver.1.flush();
    bench.connect_again();
    wait_until_sent(&mut bench.driver.1);
    // The ring sends as soon as it is enabled.
    let (frontend, pair) = &mut bench.driver;
    frontend.enable(1, true).unwrap();
    assert!(pair.transmit(&frame([0xff; 6], b"sent")));
    pair.flush();
    let mut found = vec![0; 100];
    let (length, _) = bench.socket.recv_from(&mut found).unwrap();
    assert_eq!(found[..length], *b"sent");
    bench.wait_for_statistics("one frame", |[_, transmit]| transmit.packets == 1);
}

#[test]
fn frames_of_every_length_pass_a_macvtap() {
    let name = "frames_of_every_length_pass_a_macvtap";
    let shape = QueueShape {
        pair: 0,
        receive_bytes: 1536,
        size: 256,
        features: feature::MRG_RXBUF | feature::OFFLOADS,
    };
    let Some(mut bench) = Bench::on(Kind::Macvtap, name, shape) else { return };
    let sent = datagrams(100, 60_000);
    // Frames queued in a macvtap are charged to the sender's socket, which may have no more room.
    for datagram in sent.chunks(1) {
        bench.send(datagram);
        bench.expect(datagram);
    }
    let mut found = vec![0; 1 << 16];
    for datagram in &sent[..20] {
        let pair = &mut bench.driver.1;
        while pair.reclaim().unwrap() > 0 {}
        assert!(pair.transmit(&frame([0xff; 6], datagram)));
        pair.flush();
        let (length, _) = bench.socket.recv_from(&mut found).unwrap();
        assert!(found[..length] == datagram[..]);
    }
}

#[test]
fn each_queue_of_a_macvtap_has_the_length_of_the_virtio_header() {
    let name = "each_queue_of_a_macvtap_has_the_length_of_the_virtio_header";
    let shape = QueueShape { pair: 1, receive_bytes: 1536, size: 64, features: feature::MRG_RXBUF };
    let Some(mut bench) = Bench::on(Kind::Macvtap, name, shape) else { return };
    let mut found = vec![0; 100];
    for payload in [&b"first"[..], b"second"] {
        assert!(bench.driver.1.transmit(&frame([0xff; 6], payload)));
        bench.driver.1.flush();
        let (length, _) = bench.socket.recv_from(&mut found).unwrap();
        assert_eq!(found[..length], *payload);
    }
    let [_, transmit] = bench.net.statistics()[1];
    assert_eq!(transmit.drops.iter().sum::<u64>(), 0, "{transmit:?}");
}

#[test]
fn a_rarp_is_sent_for_a_migrated_guest_and_the_mtu_is_raised() {
    let name = "a_rarp_is_sent_for_a_migrated_guest_and_the_mtu_is_raised";
    let Some(mut bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    for line in ["ip link add br0 type bridge", "ip link set br0 up", "ip link set tap0 master br0"] {
        bench.network.run(&line.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let frontend = &mut bench.driver.0;
    let mac = [2, 0, 0, 9, 0, 2, 0, 0];
    // A port of a bridge learns addresses only after its listening state.
    towline_lab::wait_until("the bridge to learn the address", WITHIN, || {
        frontend.request(RequestCode::SEND_RARP, &mac, &[])?;
        let mut show = std::process::Command::new("nsenter");
        show.args(&bench.network.prefix()[1..]).args(["bridge", "fdb", "show", "br", "br0"]);
        let known = show.output()?;
        Ok(String::from_utf8_lossy(&known.stdout).contains(&format!("{GUEST_MAC} dev tap0")).then_some(()))
    })
    .unwrap();
    // The card created this tap, so it may raise the MTU.
    frontend.request(RequestCode::NET_SET_MTU, &9000u64.to_le_bytes(), &[]).unwrap();
    assert!(frontend.request(RequestCode::NET_SET_MTU, &65_530u64.to_le_bytes(), &[]).is_err());
}

/// QEMU releases its log when it stops the rings, and sends the next one after it has started them.
#[test]
fn frames_that_wait_in_the_tap_are_in_the_log_that_comes_after_the_start() {
    let name = "frames_that_wait_in_the_tap_are_in_the_log_that_comes_after_the_start";
    let Some(mut bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    let sent = vec![vec![6; 2900]; 10];
    let (frontend, pair) = &mut bench.driver;
    let features = frontend.negotiated().features;
    let memory = Arc::clone(pair.rx().memory());
    let bytes = memory.regions().map(|region| region.size).sum::<u64>();
    let log = || MemoryArena::new((GUEST_BASE + bytes) / PAGE / 8).unwrap();
    let former = log();
    frontend.set_log(&former).unwrap();
    frontend.set_features(features | LOG_ALL).unwrap();
    let bases = [0, 1].map(|ring| frontend.stop(ring).unwrap());
    drop(former);
    bench.send(&sent);
    let before = memory.bytes(GUEST_BASE, bytes as usize);
    let (frontend, pair) = &mut bench.driver;
    let (rx, tx) = pair.rings();
    for (ring, base) in [(&*rx, bases[0]), (&*tx, bases[1])] {
        frontend.start_only(ring, base).unwrap();
        frontend.set_vring_addr(ring, true).unwrap();
    }
    // A card that does not wait for the log receives the frames now.
    rx.drain_call();
    let _ = towline_frontend::wait_any(&[rx.call_fd()], Duration::from_millis(100)).unwrap();
    let log = log();
    frontend.set_log(&log).unwrap();
    let rings = [rx.addresses(), tx.addresses()].map(|ring| [ring.table, ring.available, ring.used]);
    let is_of_ring = |page: &u64| rings.as_flattened().iter().any(|part| part / PAGE == *page);
    // Changed and not marked, of how many.
    let lost = |before: &[u8]| {
        let (marked, after) = (log.take_dirty_pages(), memory.bytes(GUEST_BASE, bytes as usize));
        let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
        let changed = (GUEST_BASE / PAGE..).zip(pages).filter(|(_, (before, after))| before != after);
        let changed: Vec<u64> = changed.map(|(page, _)| page).filter(|page| !is_of_ring(page)).collect();
        (changed.iter().filter(|page| !marked.contains(page)).count(), changed.len())
    };
    bench.expect(&sent);
    let (unmarked, changed) = lost(&before);
    assert!(unmarked == 0 && changed >= 7, "{unmarked} of {changed} pages are not marked");
    // The second one is read into the buffers that are left, which stay in the ring.
    let before = memory.bytes(GUEST_BASE, bytes as usize);
    let copied = bench.net.statistics()[0][0].copied;
    bench.send(&[vec![7; 60_000], vec![8; 60_000]]);
    bench.wait_for_statistics("a frame that waits for buffers", |[receive, _]| receive.copied == copied + 2);
    (0..2).for_each(|ring| assert!(bench.driver.0.stop(ring).is_ok()));
    let (unmarked, changed) = lost(&before);
    assert!(unmarked == 0 && changed >= 20, "{unmarked} of {changed} pages are not marked");
}

/// Number of mappings of this file in this process: the driver's, and the card's.
fn mappings(file: std::os::fd::BorrowedFd<'_>) -> usize {
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
}

#[test]
fn removed_memory_is_unmapped() {
    let name = "removed_memory_is_unmapped";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    let sent = datagrams(20, 5000);
    bench.send(&sent);
    bench.expect(&sent);
    let (frontend, pair) = &mut bench.driver;
    assert!(pair.transmit(&frame([0xff; 6], b"one")));
    pair.flush();
    wait_until_sent(pair);
    // A frame on a disabled queue too.
    frontend.enable(1, false).unwrap();
    assert!(pair.transmit(&frame([0xff; 6], b"discarded")));
    pair.flush();
    wait_until_sent(pair);
    let memory = Arc::clone(pair.rx().memory());
    assert_eq!(mappings(memory.fd()), 2);
    (0..2).for_each(|ring| assert!(frontend.stop(ring).is_ok()));
    frontend.set_mem_table(None).unwrap();
    assert_eq!(mappings(memory.fd()), 1, "the card keeps a mapping of removed memory");
}

/// Frames of random bytes, with random virtio headers: the card continues to serve.
#[test]
fn random_frames_are_counted_as_malformed() {
    let name = "random_frames_are_counted_as_malformed";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF | feature::OFFLOADS) else { return };
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..2000 {
        let (_, pair) = &mut bench.driver;
        let length = random.usize(1..=200) * if random.u8(..8) == 0 { 300 } else { 1 };
        let bytes: Vec<u8> = (0..length.min(1 << 16)).map(|_| random.u8(..)).collect();
        if !pair.transmit(&bytes) {
            pair.flush();
            pair.wait_room(WITHIN).unwrap();
            pair.reclaim().unwrap();
        }
    }
    bench.driver.1.flush();
    let sent = datagrams(50, 5000);
    bench.send(&sent);
    bench.expect(&sent);
    bench.wait_for_statistics("malformed frames", |[_, transmit]| {
        transmit.dropped(DropReason::Malformed) > 1000
    });
}

/// The link stays down and the counters continue on the destination; a card without `device_state` is
/// refused.
#[test]
fn the_state_of_a_card_migrates_with_its_guest() {
    let name = "the_state_of_a_card_migrates_with_its_guest";
    let Some(mut here) = Bench::new(name, 2048, 64, feature::MRG_RXBUF) else { return };
    let Some(mut there) = Bench::new(name, 2048, 64, feature::MRG_RXBUF) else { return };
    let datagrams: Vec<Vec<u8>> = (0..20).map(|index| vec![index; 100]).collect();
    here.send(&datagrams);
    here.expect(&datagrams);
    let before = here.wait_for_statistics("twenty frames", |pair| pair[0].packets >= 20);
    here.net.set_link(false);
    let (frontend, _) = &mut here.driver;
    for ring in 0..2 {
        frontend.stop(ring).unwrap();
    }
    let state = frontend.save().unwrap();
    let (frontend, _) = &mut there.driver;
    for ring in 0..2 {
        frontend.stop(ring).unwrap();
    }
    let own = there.net.statistics()[0];
    assert!(!frontend.load(&state[..state.len() - 1]).unwrap(), "a truncated state was loaded");
    assert!(there.net.is_link_up() && there.net.statistics()[0] == own);
    assert!(frontend.load(&state).unwrap());
    assert!(!there.net.is_link_up());
    let after = there.net.statistics()[0];
    assert_eq!(after[0].packets, own[0].packets + before[0].packets);
    assert_eq!(after[0].bytes, own[0].bytes + before[0].bytes);
    let (ours, theirs) = (here.net.migration_version().unwrap(), there.net.migration_version().unwrap());
    assert!(there.net.accepts(&ours).is_ok() && theirs.ends_with(" state=1"), "{ours}, {theirs}");
    let refused = there.net.accepts(ours.strip_suffix(" state=1").unwrap()).unwrap_err().to_string();
    assert!(refused.contains("only one of the two cards has --device-state on"), "{refused}");
}
