//! Frames through the card on a real tap, with the drivers of `frontend` in place of a guest.
//!
//! ```text
//!   a socket of this host ── UDP, one frame each ── tap0 ── Net ── rings ── a driver with buffers of every size
//! ```
//! The tap is in a network of its own and has an MTU of 65521, so that a datagram of any size is one frame.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod common;

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;

use common::Served;
use towline_frontend::net::{HEADER_BYTES, Options as DriverOptions, Pair, feature};
use towline_frontend::wire::Code;
use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT};
use towline_frontend::{Frontend, Memory};
use towline_lab::{Network, skip};
use towline_net::{DropReason, Net, Options, QueueStatistics, Taps};
use towline_vhost_user::Device;

const WITHIN: Duration = Duration::from_secs(60);
const GUEST_MAC: &str = "02:00:00:09:00:02";
const PORT: u16 = 9;
/// Protocol features.
const RARP: u64 = 1 << 2;
const NET_MTU: u64 = 1 << 4;
const DEVICE_STATE: u64 = 1 << 19;
/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;

/// The host's end of the card.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Made by the card.
    Tap,
    /// On one end of a pair; the host has the other.
    Macvtap,
}

/// A network with a card in it, served on a thread.
struct Bench {
    /// First, as it ends before what it uses.
    _served: Served,
    network: Network,
    net: Arc<Net>,
    driver: (Frontend, Pair),
    socket: UdpSocket,
}

impl Bench {
    /// `None`, with the reason printed, where no network can be made.
    fn new(name: &str, receive_bytes: usize, size: u16, features: u64) -> Option<Self> {
        Self::on(Kind::Tap, name, (receive_bytes, size, features))
    }

    fn on(kind: Kind, name: &str, (receive_bytes, size, features): (usize, u16, u64)) -> Option<Self> {
        let network = match Network::new() {
            Ok(network) => network,
            Err(error) => {
                skip(name, &format!("no network of its own: {error:#}"));
                return None;
            }
        };
        let run = |line: &str| network.run(&line.split(' ').collect::<Vec<_>>());
        let (card, host) = if kind == Kind::Tap { ("tap0", "tap0") } else { ("card0", "host0") };
        if kind == Kind::Macvtap {
            run("ip link add host0 type veth peer name lower0").unwrap();
            let made = run(&format!(
                "ip link add link lower0 name card0 address {GUEST_MAC} type macvtap mode bridge"
            ));
            if let Err(error) = made {
                skip(name, &format!("no macvtap: {error:#}"));
                return None;
            }
            for interface in ["host0", "lower0", "card0"] {
                run(&format!("ip link set {interface} mtu 65521 up")).unwrap();
            }
        }
        let taps = network.enter(|| Taps::open(card, 1)).unwrap().unwrap();
        assert_eq!(taps.is_made(), kind == Kind::Tap);
        for line in [
            &format!("ip link set {host} mtu 65521"),
            &format!("ip address add 10.9.0.1/24 dev {host}"),
            &format!("ip neigh add 10.9.0.2 lladdr {GUEST_MAC} nud permanent dev {host}"),
        ] {
            run(line).unwrap();
        }
        let net = Arc::new(Net::new(taps, Options { device_state: true, ..Options::default() }));
        let (served, mut frontend) = Served::start(&network, &net);
        assert_eq!(frontend.number(Code::GET_QUEUE_NUM).unwrap(), 1, "pairs");
        let taken = frontend.negotiate(features, EVENT_IDX | INDIRECT, RARP | NET_MTU | DEVICE_STATE);
        let features = taken.unwrap().features;
        let options = DriverOptions { size, receive_bytes, transmit_bytes: 1 << 16, features };
        let memory = Arc::new(Memory::new(Pair::memory_bytes(&options)).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let pair = Pair::start(&mut frontend, &memory, 0, options).unwrap();
        let socket = network.enter(|| UdpSocket::bind(("10.9.0.1", PORT)).unwrap()).unwrap();
        socket.set_read_timeout(Some(WITHIN)).unwrap();
        // Nothing here waits for ever.
        socket.set_write_timeout(Some(WITHIN)).unwrap();
        Some(Self { network, net, driver: (frontend, pair), socket, _served: served })
    }

    /// Waits for so many datagrams and compares them with these.
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

    /// Waits for what is true of receiving and transmitting: counters follow a turn, frames are there before.
    fn counts(&self, what: &str, wanted: impl Fn(&[QueueStatistics; 2]) -> bool) -> [QueueStatistics; 2] {
        towline_lab::wait_until(what, WITHIN, || {
            let found = self.net.statistics()[0];
            Ok(wanted(&found).then_some(found))
        })
        .unwrap_or_else(|error| panic!("{error}: {:?}", self.net.statistics()))
    }
}

/// What a datagram to our port carries; nothing of any other frame.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let is_ours = frame.len() >= HEADERS
        && frame[12..14] == [8, 0]
        && frame[23] == 17
        && frame[36..38] == PORT.to_be_bytes();
    is_ours.then(|| &frame[HEADERS..])
}

/// A frame to the host's port, its virtio header first.
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

/// Waits until nothing is being transmitted any more.
fn all_back(pair: &mut Pair) {
    while pair.tx().in_flight() > 0 {
        if pair.reclaim().unwrap() == 0 {
            pair.wait_room(WITHIN).unwrap();
        }
    }
}

fn datagrams(count: usize, longest: usize) -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(longest as u64);
    // Mostly short ones, so that long ones come as a surprise.
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
        // Less at a time than the tap can hold.
        for _ in 0..4 {
            let datagrams = datagrams(200, longest);
            bench.send(&datagrams);
            bench.expect(&datagrams);
        }
        let [receive, _] = bench.counts("800 frames", |[receive, _]| receive.packets >= 800);
        assert_eq!(receive.drops, DropReason::ALL.map(|_| 0), "{receive:?}");
        assert!(receive.notifications + receive.notifications_suppressed <= receive.batches, "{receive:?}");
    }
}

#[test]
fn what_fits_into_no_buffer_is_dropped_and_counted() {
    let name = "what_fits_into_no_buffer_is_dropped_and_counted";
    let Some(mut bench) = Bench::new(name, 2048, 64, 0) else { return };
    let sent = [vec![1; 100], vec![2; 3000], vec![3; 1900]];
    bench.send(&sent);
    bench.expect(&[sent[0].clone(), sent[2].clone()]);
    bench.counts("a frame that was dropped", |[receive, _]| receive.dropped(DropReason::TooLong) == 1);
}

#[test]
fn what_is_transmitted_arrives_and_a_disabled_queue_discards() {
    let name = "what_is_transmitted_arrives_and_a_disabled_queue_discards";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    // Everybody's, as the host's own is nobody's business here.
    let mac = [0xff; 6];
    let (mut found, sent) = (vec![0; 1 << 16], datagrams(100, 60_000));
    for (round, datagram) in sent.iter().enumerate() {
        let (frontend, pair) = &mut bench.driver;
        if round % 10 == 9 {
            frontend.enable(1, false).unwrap();
            assert!(pair.transmit(&frame(mac, b"to nobody")));
            pair.flush();
            all_back(pair);
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
    all_back(pair);
    bench.counts("100 frames, and two that are none", |[_, transmit]| {
        transmit.packets == 100 && transmit.dropped(DropReason::Malformed) == 2
    });
}

#[test]
fn a_macvtap_is_as_good() {
    let name = "a_macvtap_is_as_good";
    let shape = (1536, 256, feature::MRG_RXBUF | feature::OFFLOADS);
    let Some(mut bench) = Bench::on(Kind::Macvtap, name, shape) else { return };
    let sent = datagrams(100, 60_000);
    // What waits in a macvtap is still its sender's, who may have to wait for more room.
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
fn the_network_hears_where_a_guest_is_now() {
    let name = "the_network_hears_where_a_guest_is_now";
    let Some(mut bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    for line in ["ip link add br0 type bridge", "ip link set br0 up", "ip link set tap0 master br0"] {
        bench.network.run(&line.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let frontend = &mut bench.driver.0;
    let mac = [2, 0, 0, 9, 0, 2, 0, 0];
    // A port of a bridge learns only after a while, in which it listens for others.
    towline_lab::wait_until("a bridge that has learnt", WITHIN, || {
        frontend.request(Code::SEND_RARP, &mac, &[])?;
        let mut show = std::process::Command::new("nsenter");
        show.args(&bench.network.prefix()[1..]).args(["bridge", "fdb", "show", "br", "br0"]);
        let known = show.output()?;
        Ok(String::from_utf8_lossy(&known.stdout).contains(&format!("{GUEST_MAC} dev tap0")).then_some(()))
    })
    .unwrap();
    // This one was made by the card, which raises its MTU as it is told.
    frontend.request(Code::NET_SET_MTU, &9000u64.to_le_bytes(), &[]).unwrap();
    assert!(frontend.request(Code::NET_SET_MTU, &65_530u64.to_le_bytes(), &[]).is_err());
}

#[test]
fn a_card_says_whose_guests_it_takes() {
    let name = "a_card_says_whose_guests_it_takes";
    let Some(bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    let version = bench.network.enter(|| bench.net.migration_version()).unwrap().unwrap();
    let accepts = |source: &str| bench.network.enter(|| bench.net.accepts(source)).unwrap();
    assert!(
        version.starts_with("towline-net-1 features=0x") && version.ends_with(" pairs=1 mtu=65521 state=1"),
        "{version}"
    );
    accepts(&version).unwrap();
    // More pairs are QEMU's matter.
    accepts(&version.replace("pairs=1", "pairs=4")).unwrap();
    let reason = accepts(&version.replace("mtu=65521", "mtu=65522")).unwrap_err().to_string();
    assert!(reason.starts_with("the MTU is 65522 at the source and only 65521 here"), "{reason}");
    let reason = accepts(&version.replace("features=0x", "features=0x8")).unwrap_err().to_string();
    assert!(reason.contains("are not to be had"), "{reason}");
    let reason = accepts("towline-vsock-1").unwrap_err().to_string();
    assert!(reason.starts_with("the source is no towline-net-1"), "{reason}");
}

/// Mappings of this file in this process: the driver's own, and the card's.
fn mappings(file: std::os::fd::BorrowedFd<'_>) -> usize {
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
}

#[test]
fn memory_that_is_taken_away_is_unmapped() {
    let name = "memory_that_is_taken_away_is_unmapped";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    let sent = datagrams(20, 5000);
    bench.send(&sent);
    bench.expect(&sent);
    let (frontend, pair) = &mut bench.driver;
    assert!(pair.transmit(&frame([0xff; 6], b"one")));
    pair.flush();
    all_back(pair);
    // One that is discarded as well.
    frontend.enable(1, false).unwrap();
    assert!(pair.transmit(&frame([0xff; 6], b"to nobody")));
    pair.flush();
    all_back(pair);
    let memory = Arc::clone(pair.rx().memory());
    assert_eq!(mappings(memory.fd()), 2);
    (0..2).for_each(|ring| assert!(frontend.stop(ring).is_ok()));
    frontend.set_mem_table(None).unwrap();
    assert_eq!(mappings(memory.fd()), 1, "the card keeps memory that is the guest's no more");
}

/// What no driver does: chains of the wrong kind, empty frames, headers of nonsense. The card lives, and serves on.
#[test]
fn nonsense_harms_nobody_else() {
    let name = "nonsense_harms_nobody_else";
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
    bench.counts("frames of nonsense", |[_, transmit]| transmit.dropped(DropReason::Malformed) > 1000);
}

/// Its link stays down and its counters go on, on another host; a card that does not want that says so beforehand.
#[test]
fn a_cards_state_travels_with_its_guest() {
    let name = "a_cards_state_travels_with_its_guest";
    let Some(mut here) = Bench::new(name, 2048, 64, feature::MRG_RXBUF) else { return };
    let Some(mut there) = Bench::new(name, 2048, 64, feature::MRG_RXBUF) else { return };
    let datagrams: Vec<Vec<u8>> = (0..20).map(|index| vec![index; 100]).collect();
    here.send(&datagrams);
    here.expect(&datagrams);
    let before = here.counts("twenty frames", |pair| pair[0].packets >= 20);
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
    assert!(!frontend.load(&state[..state.len() - 1]).unwrap(), "half a state is taken");
    assert!(there.net.is_linked() && there.net.statistics()[0] == own);
    assert!(frontend.load(&state).unwrap());
    assert!(!there.net.is_linked());
    let after = there.net.statistics()[0];
    assert_eq!(after[0].packets, own[0].packets + before[0].packets);
    assert_eq!(after[0].bytes, own[0].bytes + before[0].bytes);
    let (ours, theirs) = (here.net.migration_version().unwrap(), there.net.migration_version().unwrap());
    assert!(there.net.accepts(&ours).is_ok() && theirs.ends_with(" state=1"), "{ours}, {theirs}");
    let refused = there.net.accepts(ours.strip_suffix(" state=1").unwrap()).unwrap_err().to_string();
    assert!(refused.contains("one of the two cards has --device-state on"), "{refused}");
}
