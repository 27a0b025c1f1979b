//! Frames that leave by AF_XDP, on a veth pair whose other end is looked at by a packet socket of another network.
//!
//! ```text
//!   a driver ── ring 1 ── Net ── AF_XDP ── out0 ═══ in0 ── packet socket, compared with the model of `segments`
//!                          └──── tap0, for what cannot go so
//! ```
//! A veth has no zero-copy, so that the kernel copies what it is shown in the guest's memory; all else is as with a card
//! that has it. `out0` makes no checksums, so that those that arrive are made here, or by the kernel in software.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod common;
#[path = "segments/model.rs"]
mod model;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use common::Served;
use model::{Ip, Packet, Transport};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with, sockopt};
use towline_frontend::net::feature;
use towline_frontend::wire::Code;
use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT};
use towline_frontend::{Buffer, Frontend, GUEST_BASE, Memory, Queue, QueueOptions};
use towline_lab::{Network, skip, wait_until};
use towline_net::{Mode, Net, Options, QueueStatistics, Taps, Xdp};

const WITHIN: Duration = Duration::from_secs(60);
const REGION: u64 = 16 << 20;
const MTU: usize = 4500;
/// Frames that are under way at once, each in a part of memory of its own.
const SLOTS: u64 = 16;
const SLOT: u64 = 512 << 10;
/// The second slot lies across the border of both regions.
const SLOTS_AT: u64 = GUEST_BASE + REGION - SLOT - (32 << 10);
const RING: u16 = 256;
const VIRTIO: usize = 12;

struct Bench {
    /// First, as it ends before what it uses.
    _served: Served,
    near: Network,
    _far: Network,
    net: Arc<Net>,
    frontend: Frontend,
    memory: Arc<Memory>,
    queues: Vec<Queue>,
    receiver: OwnedFd,
    random: fastrand::Rng,
}

impl Bench {
    /// `None`, with the reason printed, where it cannot be had.
    fn new(name: &str, pairs: u32, change: impl FnOnce(Xdp) -> Xdp) -> Option<Self> {
        let networks = Network::new().and_then(|near| Ok((near, Network::new()?)));
        let (near, far) = match networks {
            Ok(networks) => networks,
            Err(error) => {
                skip(name, &format!("no network of its own: {error:#}"));
                return None;
            }
        };
        near.connect("out0", &far, "in0").unwrap();
        let run = |network: &Network, line: &str| network.run(&line.split(' ').collect::<Vec<_>>());
        run(&near, &format!("ip link set out0 mtu {MTU}")).unwrap();
        run(&far, &format!("ip link set in0 mtu {MTU}")).unwrap();
        if let Err(error) = run(&near, "ethtool -K out0 tx off") {
            skip(name, &format!("ethtool: {error:#}; run `cargo xtask setup`"));
            return None;
        }
        if pairs > 1
            && let Err(error) = run(&near, &format!("ethtool -L out0 tx {pairs} rx {pairs}"))
        {
            skip(name, &format!("no queues: {error:#}"));
            return None;
        }
        let xdp = near.enter(|| Xdp::new("out0", 0, None)).unwrap();
        let xdp = match xdp {
            Ok(xdp) => change(xdp),
            Err(error) => {
                skip(name, &error.to_string());
                return None;
            }
        };
        // On one processor, as a veth keeps no order over several.
        let options = Options { cpus: vec![0], ..Options::default() };
        let taps = near.enter(|| Taps::open("tap0", pairs as usize)).unwrap().unwrap();
        let net = Arc::new(Net::with_xdp(taps, Some(xdp), options));
        let (served, mut frontend) = Served::start(&near, &net);
        let features = feature::OFFLOADS | feature::MRG_RXBUF;
        let features = frontend.negotiate(features, EVENT_IDX | INDIRECT, 0).unwrap().features;
        let memory = Arc::new(Memory::in_regions(REGION, 2).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let queue =
            |index| Queue::new(&memory, 2 * index + 1, QueueOptions { size: RING, features }).unwrap();
        let queues: Vec<Queue> = (0..pairs).map(queue).collect();
        queues.iter().for_each(|queue| frontend.start(queue, 0).unwrap());
        let receiver = far.enter(|| {
            let flags = SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(eth::ALL)).unwrap();
            sockopt::set_socket_recv_buffer_size_force(&socket, 64 << 20).unwrap();
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(WITHIN)).unwrap();
            socket
        });
        let (receiver, random) = (receiver.unwrap(), fastrand::Rng::with_seed(5));
        Some(Self { near, _far: far, net, frontend, memory, queues, receiver, random, _served: served })
    }

    /// Any frame that can go without the tap; what arrives of it.
    fn packet(&mut self) -> (Vec<u8>, Vec<Vec<u8>>) {
        let random = &mut self.random;
        let v4 = Ip::V4 {
            addresses: [random.u8(..), 1, 2, 3, 4, 5, 6, 7],
            id: random.u16(..),
            options: 4 * random.usize(..=10),
            tos: 0,
        };
        let v6 = Ip::V6 { addresses: std::array::from_fn(|_| random.u8(..)) };
        let tcp = Transport::Tcp {
            sequence: random.u32(..),
            flags: random.u8(..),
            options: 4 * random.usize(..=10),
        };
        let (super_frame, ip) = (random.bool(), if random.bool() { v4 } else { v6 });
        // USO is not offered, as a guest that has it is rare.
        let transport = if super_frame || random.bool() { tcp } else { Transport::Udp };
        let longest = if super_frame { 60_000 } else { MTU - 140 };
        let length = if random.u8(..3) == 0 { random.usize(1..300) } else { random.usize(1..longest) };
        let payload = (0..length).map(|_| random.u8(..)).collect();
        let packet = Packet { vlans: random.usize(..=2), ip, transport, payload };
        let kind = random.u8(..3);
        if super_frame {
            let segment = random.u16(600..4280);
            let arrives = packet.segments(segment.into()).iter().map(seen).collect();
            return ([&packet.request(Some(segment))[..], &[0; 2], &packet.frame(true)].concat(), arrives);
        }
        match kind {
            0 => ([&[0; VIRTIO][..], &packet.frame(false)].concat(), vec![seen(&packet)]),
            _ => {
                let sent = [&packet.request(None)[..], &[0; 2], &packet.frame(true)].concat();
                (sent, vec![seen(&packet)])
            }
        }
    }

    /// Transmits it in pieces at any places of its slot.
    fn transmit(&mut self, queue: usize, slot: u64, bytes: &[u8]) {
        let mut at = SLOTS_AT + slot * SLOT;
        let (mut left, mut buffers) = (bytes, Vec::new());
        let most = if self.random.bool() { 3000 } else { 70_000 };
        while !left.is_empty() {
            at += self.random.u64(..300);
            let here =
                if buffers.len() < 25 { self.random.usize(1..=most).min(left.len()) } else { left.len() };
            self.memory.write(at, &left[..here]);
            buffers.push(Buffer { guest: at, len: u32::try_from(here).unwrap() });
            at += here as u64;
            left = &left[here..];
        }
        assert!(self.queues[queue].add(&buffers, &[], slot), "a ring has room for {SLOTS} chains");
    }

    /// Transmits so many frames on this queue, and compares what arrives.
    fn traffic(&mut self, queue: usize, frames: u64) {
        for _ in 0..frames.div_ceil(SLOTS) {
            let mut wanted = Vec::new();
            for slot in 0..SLOTS {
                let (sent, arrives) = self.packet();
                self.transmit(queue, slot, &sent);
                wanted.extend(arrives);
            }
            self.queues[queue].publish();
            for (index, wanted) in wanted.iter().enumerate() {
                let found = self.receive();
                assert!(found == *wanted, "packet {index}: {} bytes, not {}", found.len(), wanted.len());
            }
            self.all_back(queue);
        }
    }

    /// Waits for each slot to come back once.
    fn all_back(&mut self, queue: usize) {
        let queue = &mut self.queues[queue];
        let mut back = HashSet::new();
        while queue.in_flight() > 0 {
            match queue.pop_used().unwrap() {
                Some(used) => assert!(back.insert(used.token), "slot {} came back twice", used.token),
                None => queue.wait(WITHIN).unwrap(),
            }
        }
    }

    /// The next packet that is one of the model's.
    fn receive(&self) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 16];
        loop {
            let (length, _) = recv(&self.receiver, &mut bytes[..], RecvFlags::empty()).unwrap();
            if bytes[..12] == [0x11; 12] {
                bytes.truncate(length);
                return bytes;
            }
        }
    }

    fn statistics(&self, pair: usize) -> QueueStatistics {
        self.net.statistics()[pair][1]
    }

    fn is_in(&self, mode: Mode) {
        wait_until("the mode", WITHIN, || Ok((self.net.modes()[0] == mode).then_some(()))).unwrap();
    }
}

/// As a packet socket has it: without the outer VLAN tag, which the kernel tells elsewhere.
fn seen(packet: &Packet) -> Vec<u8> {
    let mut frame = packet.frame(false);
    if packet.vlans > 0 {
        frame.drain(12..16);
    }
    frame
}

#[test]
fn frames_of_every_kind_arrive_from_anywhere() {
    let name = "frames_of_every_kind_arrive_from_anywhere";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    bench.traffic(0, 400);
    assert_eq!(bench.net.modes(), [Mode::Copy]);
    let found = bench.statistics(0);
    assert!(found.referenced > 100, "{found:?}");
    assert_eq!((found.drops, found.zero_copy, found.pending), ([0; 6], 0, 0), "{found:?}");
    wait_until("400 frames", WITHIN, || Ok((bench.statistics(0).packets == 400).then_some(()))).unwrap();
    assert_eq!(bench.statistics(0).copied, 400, "the kernel copies on a veth");
}

#[test]
fn checksums_are_made_here_as_well() {
    let name = "checksums_are_made_here_as_well";
    let Some(mut bench) = Bench::new(name, 1, Xdp::with_software_checksums) else { return };
    bench.traffic(0, 400);
    assert!(bench.statistics(0).referenced > 100, "{:?}", bench.statistics(0));
}

#[test]
fn pairs_share_what_is_pinned() {
    let name = "pairs_share_what_is_pinned";
    let Some(mut bench) = Bench::new(name, 2, |xdp| xdp) else { return };
    for _ in 0..4 {
        bench.traffic(0, 32);
        bench.traffic(1, 32);
    }
    assert_eq!(bench.net.modes(), [Mode::Copy; 2]);
}

#[test]
fn memory_changes_and_rings_stop_under_way() {
    let name = "memory_changes_and_rings_stop_under_way";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    for round in 0..6 {
        bench.traffic(0, 32);
        // What is under way when it is said is sent, and comes back.
        let (sent, arrives) = bench.packet();
        bench.transmit(0, 0, &sent);
        bench.queues[0].publish();
        if round % 2 == 0 {
            let memory = Arc::clone(&bench.memory);
            bench.frontend.set_mem_table(Some(&memory)).unwrap();
        } else {
            let base = bench.frontend.stop(1).unwrap();
            bench.frontend.start(&bench.queues[0], base).unwrap();
            bench.queues[0].force_kick();
        }
        for wanted in arrives {
            assert!(bench.receive() == wanted);
        }
        bench.all_back(0);
        bench.is_in(Mode::Copy);
    }
}

#[test]
fn without_the_interface_frames_go_by_the_tap() {
    let name = "without_the_interface_frames_go_by_the_tap";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    bench.traffic(0, 32);
    bench.near.run(&["ip", "link", "set", "out0", "down"]).unwrap();
    let frame = [&[0; VIRTIO][..], &[0x11; 600]].concat();
    bench.transmit(0, 0, &frame);
    bench.queues[0].publish();
    bench.all_back(0);
    bench.is_in(Mode::Tap);
    bench.near.run(&["ip", "link", "set", "out0", "up"]).unwrap();
    // It is tried again when there is something to send, and a link that is up does not carry yet.
    let mut bytes = vec![0; 1 << 16];
    wait_until("a frame by the interface again", WITHIN, || {
        bench.transmit(0, 0, &frame);
        bench.queues[0].publish();
        bench.all_back(0);
        let mut came = || match recv(&bench.receiver, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) => Some(bytes[..length] == frame[VIRTIO..]),
            Err(_) => None,
        };
        Ok(std::iter::from_fn(&mut came).any(|is_it| is_it).then_some(()))
    })
    .unwrap();
    bench.is_in(Mode::Copy);
}

/// What the card does not do itself, and what nobody does, goes to the tap, which judges it.
#[test]
fn nonsense_is_left_to_the_tap() {
    let name = "nonsense_is_left_to_the_tap";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    for _ in 0..100 {
        for slot in 0..SLOTS {
            let (mut bytes, _) = bench.packet();
            for _ in 0..bench.random.usize(1..4) {
                let at = bench.random.usize(..bytes.len().min(60));
                bytes[at] = bench.random.u8(..);
            }
            bytes.truncate(bench.random.usize(1..bytes.len() * 2).min(bytes.len()));
            bench.transmit(0, slot, &bytes);
        }
        bench.queues[0].publish();
        bench.all_back(0);
    }
    assert_eq!(bench.net.modes(), [Mode::Copy]);
    let known = |found: &QueueStatistics| found.packets + found.drops.iter().sum::<u64>() == 100 * SLOTS;
    wait_until("all to be counted", WITHIN, || Ok(known(&bench.statistics(0)).then_some(()))).unwrap();
}

#[test]
fn a_guest_whose_memory_comes_later_is_refused() {
    const PAGEFAULT: u64 = 1 << 8;
    let name = "a_guest_whose_memory_comes_later_is_refused";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    assert_eq!(bench.frontend.number(Code::GET_PROTOCOL_FEATURES).unwrap() & PAGEFAULT, 0);
    let missing = bench.near.enter(|| Xdp::new("out7", 0, None)).unwrap().unwrap_err();
    assert_eq!(missing.to_string(), "there is no interface out7 in this network to transmit by");
    let file = tempfile().into();
    let wrong = bench.near.enter(|| Xdp::new("out0", 0, Some(vec![file]))).unwrap().unwrap_err();
    assert_eq!(wrong.to_string(), "descriptor 1 is no AF_XDP socket");
}

fn tempfile() -> std::fs::File {
    std::fs::File::open("/dev/null").unwrap()
}
