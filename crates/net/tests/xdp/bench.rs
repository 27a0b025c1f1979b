//! A card with AF_XDP on a veth pair, a driver, and a receiver at the other end.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with, sockopt};
use towline_frontend::net::feature;
use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT};
use towline_frontend::{Error, Frontend, GUEST_BASE, MemoryArena, Queue, QueueBuffer, QueueOptions};
use towline_lab::{Network, skip, wait_until};
use towline_net::{Net, Options, QueueStatistics, Taps, TransmitMode, Xdp};

use crate::common::Served;
use crate::model::{Checksum, Ip, Packet, Transport};

pub(crate) const WITHIN: Duration = Duration::from_secs(60);
const REGION: u64 = 16 << 20;
const MTU: usize = 4500;
/// Maximum number of frames in flight, each in its own part of memory.
pub(crate) const SLOTS: u64 = 16;
const SLOT: u64 = 512 << 10;
/// Start of the slots. The second one crosses the boundary of the two regions.
const SLOTS_AT: u64 = GUEST_BASE + REGION - SLOT - (32 << 10);
const RING: u16 = 256;
pub(crate) const VIRTIO: usize = 12;

pub(crate) struct Bench {
    // First, because it must be dropped first.
    pub(crate) served: Served,
    pub(crate) near: Network,
    _far: Network,
    pub(crate) net: Arc<Net>,
    pub(crate) frontend: Frontend,
    pub(crate) memory: Arc<MemoryArena>,
    pub(crate) queues: Vec<Queue>,
    pub(crate) receiver: OwnedFd,
    pub(crate) random: fastrand::Rng,
}

impl Bench {
    /// Returns `None`, and prints the reason, if this machine cannot run the test.
    pub(crate) fn new(name: &str, pairs: u32, change: impl FnOnce(Xdp) -> Xdp) -> Option<Self> {
        Self::on("out0", name, pairs, change)
    }

    /// By the interface `out0`, or by `mac0`, a macvlan on it, whose packets pass the queueing discipline of
    /// `out0`.
    pub(crate) fn on(
        interface: &str,
        name: &str,
        pairs: u32,
        change: impl FnOnce(Xdp) -> Xdp,
    ) -> Option<Self> {
        let networks = Network::new().and_then(|near| Ok((near, Network::new()?)));
        let (near, far) = match networks {
            Ok(networks) => networks,
            Err(error) => {
                skip(name, &format!("no separate network: {error:#}"));
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
        if interface == "mac0" {
            run(&near, "ip link add link out0 name mac0 type macvlan mode vepa").unwrap();
            run(&near, "ip link set mac0 up").unwrap();
        }
        let xdp = near.enter(|| Xdp::new(interface, 0, None)).unwrap();
        let xdp = match xdp {
            // A veth has no zero-copy.
            Ok(xdp) => change(xdp.with_copy_mode()),
            Err(error) => {
                skip(name, &error.to_string());
                return None;
            }
        };
        // On one processor, as a veth does not keep the order over several.
        let options = Options { cpus: vec![0], ..Options::default() };
        let taps = near.enter(|| Taps::open("tap0", pairs as usize)).unwrap().unwrap();
        let net = Arc::new(Net::with_xdp(taps, Some(xdp), options));
        let (served, mut frontend) = Served::start(&near, &net);
        let features = negotiate(&mut frontend).unwrap();
        let memory = Arc::new(MemoryArena::with_regions(REGION, 2).unwrap());
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
        Some(Self { served, near, _far: far, net, frontend, memory, queues, receiver, random })
    }

    /// Waits until each pair sends by AF_XDP. While one registers the memory, the frames of the others go by
    /// the tap, and each tries again with its next kick.
    pub(crate) fn wait_for_sockets(&mut self) {
        wait_until("bound sockets", WITHIN, || {
            self.queues.iter_mut().for_each(Queue::force_kick);
            let modes = self.net.transmit_modes();
            Ok(modes.iter().all(|mode| *mode == TransmitMode::Copy).then_some(()))
        })
        .unwrap();
    }

    /// A random frame that AF_XDP supports, and the packets that arrive.
    pub(crate) fn packet(&mut self) -> (Vec<u8>, Vec<Vec<u8>>) {
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
        // Without UDP segmentation, which is not negotiated.
        let transport = if super_frame || random.bool() { tcp } else { Transport::Udp };
        let longest = if super_frame { 60_000 } else { MTU - 140 };
        let length = if random.u8(..3) == 0 { random.usize(1..300) } else { random.usize(1..longest) };
        let payload = (0..length).map(|_| random.u8(..)).collect();
        let packet = Packet { vlans: random.usize(..=2), ip, transport, payload };
        let kind = random.u8(..3);
        if super_frame {
            let segment = random.u16(600..4280);
            let arrives = packet.segments(segment.into()).iter().map(received).collect();
            return (
                [&packet.request(Some(segment))[..], &[0; 2], &packet.frame(Checksum::Partial)].concat(),
                arrives,
            );
        }
        match kind {
            0 => ([&[0; VIRTIO][..], &packet.frame(Checksum::Complete)].concat(), vec![received(&packet)]),
            _ => {
                let sent = [&packet.request(None)[..], &[0; 2], &packet.frame(Checksum::Partial)].concat();
                (sent, vec![received(&packet)])
            }
        }
    }

    /// Transmits a frame in buffers at random offsets of its slot.
    pub(crate) fn transmit(&mut self, queue: usize, slot: u64, bytes: &[u8]) {
        let mut at = SLOTS_AT + slot * SLOT;
        let (mut left, mut buffers) = (bytes, Vec::new());
        let most = if self.random.bool() { 3000 } else { 70_000 };
        while !left.is_empty() {
            at += self.random.u64(..300);
            let here =
                if buffers.len() < 25 { self.random.usize(1..=most).min(left.len()) } else { left.len() };
            self.memory.write(at, &left[..here]);
            buffers.push(QueueBuffer { guest: at, len: u32::try_from(here).unwrap() });
            at += here as u64;
            left = &left[here..];
        }
        assert!(self.queues[queue].add(&buffers, &[], slot), "a ring has room for {SLOTS} chains");
    }

    /// Transmits frames on this queue, and compares the packets that arrive.
    pub(crate) fn traffic(&mut self, queue: usize, frames: u64) {
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
            self.wait_until_sent(queue);
        }
    }

    /// Waits until all chains are used, each once.
    pub(crate) fn wait_until_sent(&mut self, queue: usize) {
        let queue = &mut self.queues[queue];
        let mut used_slots = HashSet::new();
        while queue.in_flight() > 0 {
            match queue.pop_used().unwrap() {
                Some(used) => assert!(used_slots.insert(used.token), "slot {} was used twice", used.token),
                None => queue.wait(WITHIN).unwrap(),
            }
        }
    }

    /// The next packet of the model; others are ignored.
    pub(crate) fn receive(&self) -> Vec<u8> {
        let mut bytes = vec![0; 1 << 16];
        loop {
            let (length, _) = recv(&self.receiver, &mut bytes[..], RecvFlags::empty()).unwrap();
            if bytes[..12] == [0x11; 12] {
                bytes.truncate(length);
                return bytes;
            }
        }
    }

    pub(crate) fn statistics(&self, pair: usize) -> QueueStatistics {
        self.net.statistics()[pair][1]
    }

    pub(crate) fn wait_for_mode(&self, mode: TransmitMode) {
        wait_until("the mode", WITHIN, || Ok((self.net.transmit_modes()[0] == mode).then_some(()))).unwrap();
    }
}

/// Negotiates the features of the driver.
pub(crate) fn negotiate(frontend: &mut Frontend) -> Result<u64, Error> {
    let features = feature::OFFLOADS | feature::MRG_RXBUF;
    Ok(frontend.negotiate(features, EVENT_IDX | INDIRECT, 0)?.features)
}

/// The packet as a packet socket receives it: without the outer VLAN tag, which is in the auxiliary data.
fn received(packet: &Packet) -> Vec<u8> {
    let mut frame = packet.frame(Checksum::Complete);
    if packet.vlans > 0 {
        frame.drain(12..16);
    }
    frame
}
