//! Body of the fuzz target `vsock_device`: two devices in virtual time, with hostile guests, clients of the
//! host and each other as peers. Rings and engines are real, sockets are models (`pipes.rs`).
//!
//! ```text
//!   steps of 8 bytes ─► driver: packets, buffers, bad heads │ host: bytes, messages, ends │ device: turns, time, restarts
//!                       after each step: memory at most as reserved, reserved at most the limit, queues bounded
//!                       at the end: the devices become idle, every chain is completed once, all memory is released
//! ```
//! Contents are not compared; `main.rs` does that.
#![allow(dead_code, unreachable_pub, reason = "the fuzz target uses it")]

use std::collections::HashMap;
use std::sync::Arc;

use towline_frontend::{MemoryArena as Shared, Queue, QueueBuffer, QueueOptions};
use towline_vhost_user::log::LogSwitch;
use towline_vhost_user::message::{RegionInfo, VringAddress};
use towline_vhost_user::{GuestMemory, Next, Region, Ring, RingSetup};
use towline_vsock::packet::{HEADER_BYTES, Operation, PacketHeader, SocketType};
use towline_vsock::{ConnectionKey, ConnectionLimits, Engine, PENDING_RESETS_MAX};

use super::pipes::{CIDS, Net, World};

const STEP: usize = 8;
/// Maximum number of steps; more make an input slow and find nothing more.
const STEPS_MAX: usize = 512;
const CONNECTIONS: usize = 24;
/// Limits of memory: enough for all windows, and so little that messages wait for it.
const MEMORY: [u64; 2] = [2 << 20, 160 << 10];
/// Packets of a flood.
const FLOOD: u32 = 100;
/// Maximum message of a host: one at a time may exceed the limit.
const MESSAGE_MAX: u64 = 70_000;
/// Maximum number of runs until a device without events is idle.
const TURNS_MAX: usize = 20_000;
/// Maximum number of calls to sockets in one run.
const CALLS_MAX: u64 = 100_000;
const GUEST_BYTES: u64 = 384 << 10;

const LENS: [u32; 8] = [0, 1, 7, 100, 4096, 8192, 20_000, 65_536];
const EACH: [usize; 8] = [1 << 20, 1, 8, 64, 500, 4096, 16, 3000];
const ALLOCS: [u32; 4] = [0, 5000, 256 << 10, u32::MAX];

/// A driver: its rings, and counters of received data.
struct Driver {
    rx: Queue,
    tx: Queue,
    payload: u64,
    buffers: u64,
    /// Received bytes by the guest's port, the peer and its port.
    received: HashMap<(u32, u64, u32), u32>,
    tokens: u64,
}

/// A guest and its device.
struct Guest {
    cid: u64,
    shared: Arc<Shared>,
    memory: Arc<GuestMemory>,
    driver: Driver,
    rx: Ring,
    tx: Ring,
    engine: Engine<World>,
    memory_max: u64,
    epoch: u64,
}

fn map(shared: &Shared) -> Arc<GuestMemory> {
    let regions = shared.regions().map(|region| {
        let info = RegionInfo {
            guest_address: region.guest_address,
            size: region.size,
            user_address: region.user_address,
            mmap_offset: region.mmap_offset,
        };
        Region::map(&info, shared.fd().try_clone_to_owned().expect("a descriptor")).expect("a valid region")
    });
    Arc::new(GuestMemory::new(regions.collect()).expect("its regions"))
}

fn rings(shared: &Arc<Shared>, memory: &Arc<GuestMemory>, size: u16, epoch: u64) -> (Driver, Ring, Ring) {
    let queue = |index| Queue::new(shared, index, QueueOptions { size, features: 1 << 32 }).expect("a queue");
    let ring = |queue: &Queue| {
        let addresses = queue.addresses();
        let address = VringAddress {
            index: 0,
            flags: 0,
            descriptors: shared.user_addr(addresses.table),
            used: shared.user_addr(addresses.used),
            available: shared.user_addr(addresses.available),
            log: 0,
        };
        let setup = RingSetup {
            size: size.into(),
            address,
            base: 0,
            features: 1 << 32,
            call: None,
            switch: LogSwitch::default(),
            log: None,
        };
        Ring::new(setup, Arc::clone(memory), epoch + u64::from(queue.index())).expect("a valid ring")
    };
    let (rx, tx) = (queue(0), queue(1));
    let (rx_ring, tx_ring) = (ring(&rx), ring(&tx));
    let payload = shared.alloc(HEADER_BYTES as u64 + 65_536, 4096);
    let buffers = shared.alloc(70_000, 4096);
    (Driver { rx, tx, payload, buffers, received: HashMap::new(), tokens: 0 }, rx_ring, tx_ring)
}

impl Guest {
    fn new(cid: u64, (size, memory_max): (u16, u64), net: &Net) -> Self {
        let shared = Arc::new(Shared::new(GUEST_BYTES).expect("a memfd"));
        let memory = map(&shared);
        let (driver, rx, tx) = rings(&shared, &memory, size, 2);
        let limits =
            ConnectionLimits { connections: CONNECTIONS, memory: memory_max, ..ConnectionLimits::default() };
        let engine = Engine::new(cid, limits, 0, World::new(cid, net));
        Self { cid, shared, memory, driver, rx, tx, engine, memory_max, epoch: 2 }
    }

    /// Posts one packet.
    fn packet(&mut self, step: &[u8]) {
        let [_, what, ports, shape, lens, flags, credit, host_port] = *step else { return };
        let cids = [2, CIDS[0], CIDS[1], 99];
        let (port, peer) = (u32::from(ports & 3), cids[usize::from(ports >> 2 & 3)]);
        // A port that the guest connects to, or an ephemeral port of the host.
        let peer_port = match ports >> 4 & 7 {
            port @ 0..=3 => u32::from(port),
            _ => (1 << 30) + u32::from(host_port & 31),
        };
        let operations = [5, 5, 5, 5, 1, 1, 2, 4, 6, 7, 3, 0, 5, 1, 5, 9];
        let len = LENS[usize::from(lens & 7)];
        let operation = operations[usize::from(what & 15)];
        let payload = if operation == 5 { len } else { 0 };
        let kind = if what >> 4 & 1 == 0 { SocketType::Stream } else { SocketType::Seqpacket };
        let taken = self.driver.received.get(&(port, peer, peer_port)).copied().unwrap_or(0);
        let header = PacketHeader {
            source_cid: if what == 0xff { 77 } else { self.cid },
            destination_cid: peer,
            source_port: port,
            destination_port: peer_port,
            len: payload + u32::from(credit == 0xff),
            kind: kind.number(),
            operation,
            flags: u32::from(flags & 3),
            buf_alloc: ALLOCS[usize::from(credit >> 2 & 3)],
            fwd_cnt: match credit & 3 {
                0 => 0,
                1 => u32::from(credit),
                _ => taken,
            },
        };
        self.shared.write(self.driver.payload, &header.to_bytes());
        let each = EACH[usize::from(shape & 7)];
        let head = QueueBuffer { guest: self.driver.payload, len: HEADER_BYTES as u32 };
        let mut parts = parts(head, payload as usize, each, self.driver.tx.free_descriptors());
        if what == 0xfe {
            // Shorter than a header.
            parts.iter_mut().for_each(|part| part.len = part.len.min(u32::from(lens >> 3) + 1));
            parts.truncate(1);
        }
        self.driver.tokens += 1;
        if !parts.is_empty() && self.driver.tx.add(&parts, &[], self.driver.tokens) {
            self.driver.tx.publish();
        }
    }

    /// Posts a message in two packets, the second of which has only its end.
    fn message(&mut self, step: &[u8]) {
        let packet = |len, flags| [step[0], 0x10, step[2], step[3], len, flags, step[6], step[7]];
        self.packet(&packet(step[4] | 1, 0));
        self.packet(&packet(0, 1 | step[5] & 2));
    }

    /// Posts packets of unknown connections, each of which is answered with a reset.
    fn flood(&mut self, step: &[u8]) {
        for port in 0..FLOOD {
            self.packet(&[0, step[2] & 1, 0x40 | 8 | port as u8 & 3, 0, 1, 0, step[6], port as u8]);
        }
    }

    /// Posts buffers to receive into.
    fn post(&mut self, step: &[u8]) {
        let sizes = [44, 45, 60, 300, 4096, 66_000, 10, 1500];
        let bytes = sizes[usize::from(step[1] & 7)];
        for _ in 0..step[2] % 64 {
            let each = EACH[usize::from(step[3] & 7)];
            let head = QueueBuffer { guest: self.driver.buffers, len: 10 };
            let parts = parts(head, bytes - 10, each, self.driver.rx.free_descriptors());
            self.driver.tokens += 1;
            if parts.is_empty() || !self.driver.rx.add(&[], &parts, self.driver.tokens) {
                break;
            }
        }
        self.driver.rx.publish();
    }

    /// Processes the used rings. The driver fails at a chain that was not in flight.
    fn reap(&mut self) {
        while let Some(used) = self.driver.rx.pop_used().expect("a valid used ring") {
            if used.len == 0 {
                continue;
            }
            assert!(used.len as usize >= HEADER_BYTES, "{} bytes are shorter than a header", used.len);
            // All buffers share their memory, so the header is that of the last packet.
            let bytes = self.shared.bytes(self.driver.buffers, HEADER_BYTES);
            let header = PacketHeader::parse(bytes[..].try_into().expect("its length"));
            let operation = Operation::from_number(header.operation).expect("a valid operation");
            assert_eq!({ header.destination_cid }, self.cid);
            if operation == Operation::ReadWrite {
                let peer = header.source_cid;
                let name = (header.destination_port, peer, header.source_port);
                let received = self.driver.received.entry(name).or_default();
                *received = received.wrapping_add(header.len);
            }
        }
        while self.driver.tx.pop_used().expect("a valid used ring").is_some() {}
    }

    /// Processes the events of its sockets. Returns true if there was one.
    fn events(&mut self, net: &Net) -> bool {
        let mut any = false;
        for (id, end) in net.connected(self.cid) {
            any = true;
            self.engine.connected(id, end);
        }
        for (port, kind, cid, end) in net.incoming(self.cid) {
            any = true;
            if let Err(end) = self.engine.open(port, kind, cid, end) {
                end.close();
            }
        }
        for (id, readiness, has_space) in net.events(self.cid) {
            any = true;
            if let Some(readiness) = readiness {
                self.engine.readable(id, readiness);
            }
            if has_space {
                self.engine.writable(id);
            }
        }
        any
    }

    /// Runs the device once, like its worker. Returns true if there is more to do at once.
    fn turn(&mut self, net: &Net) -> bool {
        let before = net.calls();
        let mut again = self.events(net);
        again |= self.engine.process_tx(&mut self.tx) == Next::Again;
        let full = !self.engine.table().accepts_packets();
        again |= self.engine.process_rx(&mut self.rx) == Next::Again;
        again |= full && self.engine.table().accepts_packets();
        self.rx.publish();
        self.tx.publish();
        assert_eq!(self.rx.in_flight(), 0, "receive buffers stay in flight");
        let calls = net.calls() - before;
        assert!(calls < CALLS_MAX, "{calls} calls in one run");
        again |= self.rx.enable_notification_and_recheck();
        again |= self.tx.enable_notification_and_recheck();
        again
    }

    /// Replaces the driver by a new one.
    fn restart(&mut self, size: u16) {
        self.engine.complete_retained(Some(&mut self.tx));
        self.engine.drop_connections_of_former_driver();
        self.epoch += 2;
        self.shared = Arc::new(Shared::new(GUEST_BYTES).expect("a memfd"));
        self.memory = map(&self.shared);
        (self.driver, self.rx, self.tx) = rings(&self.shared, &self.memory, size, self.epoch);
    }

    fn check(&self) {
        let statistics = self.engine.statistics();
        let (footprint, reserved) = (self.engine.footprint(), statistics.memory_reserved);
        assert!(footprint <= reserved, "it takes {footprint} bytes, {reserved} are reserved");
        assert!(reserved <= self.memory_max + MESSAGE_MAX, "{reserved} bytes are reserved");
        assert!(self.engine.buffered_bytes() as u64 <= reserved);
        assert!(statistics.connections <= CONNECTIONS as u64);
        let backlog = self.engine.queued_entries();
        assert!(backlog <= 4 * (64 + 4 * CONNECTIONS), "{backlog} entries are queued");
        assert!(self.engine.table().control_queue_len() <= PENDING_RESETS_MAX + 4 * CONNECTIONS + 2);
        let most = usize::from(self.tx.size() / 4) * 1024;
        assert!(self.engine.segments() <= most, "{} segments are described", self.engine.segments());
    }
}

/// Returns a chain of a head and `bytes` after it, in segments of `each` bytes; the head is in the first one.
/// Empty if there are not enough descriptors.
fn parts(head: QueueBuffer, bytes: usize, each: usize, room: usize) -> Vec<QueueBuffer> {
    let each = each.max(bytes.div_ceil(1024));
    if bytes.div_ceil(each).max(1) > room {
        return Vec::new();
    }
    let len = |len: usize| u32::try_from(len).expect("a short buffer");
    let first = QueueBuffer { len: head.len + len(each.min(bytes)), ..head };
    let start = head.guest + u64::from(head.len);
    let rest = (0..bytes).step_by(each).skip(1);
    let rest = rest.map(|at| QueueBuffer { guest: start + at as u64, len: len(each.min(bytes - at)) });
    std::iter::once(first).chain(rest).collect()
}

/// Runs an input: byte 0 selects the size of the rings and the memory, then each step is 8 bytes.
pub fn device(data: &[u8]) {
    let Some((mode, steps)) = data.split_first() else { return };
    let size = [64, 2048, 16, 256][usize::from(mode & 3)];
    let net = Net::new(u64::from(*mode));
    let memory = MEMORY[usize::from(mode >> 2 & 1)];
    let mut guests = CIDS.map(|cid| Guest::new(cid, (size, memory), &net));
    let mut now_ms = 0;
    for step in steps.chunks_exact(STEP).take(STEPS_MAX) {
        let which = usize::from(step[0] >> 7);
        let (what, amount) = (step[0] & 31, u32::from_le_bytes([step[4], step[5], step[6], 0]));
        let guest = &mut guests[which];
        match what {
            0..=9 => guest.packet(step),
            10..=12 => guest.post(step),
            13 | 14 => net.write(step[1], step[2], amount),
            15 | 16 => net.read(step[1], amount),
            17 => net.end(step[1], step[2]),
            18 => {
                let kind = if step[1] & 1 == 0 { SocketType::Stream } else { SocketType::Seqpacket };
                let end = net.client(kind);
                if let Err(end) = guest.engine.open(u32::from(step[2] & 3), kind, 2, end) {
                    end.close();
                }
            }
            19 => {
                now_ms += u64::from(amount % 12_000);
                guest.engine.tick(now_ms);
            }
            21 if step[1] & 7 == 0 => guest.restart(size),
            22 if step[1] & 7 == 0 => {
                let key = ConnectionKey { guest_port: u32::from(step[2]), peer_cid: 2, peer_port: 9 };
                guest.engine.reset_all_connections(amount, &[(key, SocketType::Stream)]);
            }
            23 if step[1] & 31 == 0 => {
                // An invalid head: the device abandons the ring.
                guest.driver.tx.make_available(size);
                guest.driver.tx.publish();
            }
            24 => {
                guest.engine.complete_retained(Some(&mut guest.tx));
                guest.engine.drop_idle_batches();
            }
            25 => net.urgent(step[1]),
            26 if step[1] & 3 == 0 => net.fail(step[2]),
            27 => guest.message(step),
            28 if step[1] & 7 == 0 => guest.flood(step),
            _ => {
                guest.turn(&net);
                guest.reap();
            }
        }
        guest.check();
    }
    become_idle(&mut guests, &net);
}

/// Without further events the devices become idle, and when their rings stop all chains are completed.
fn become_idle(guests: &mut [Guest; 2], net: &Net) {
    let mut turns = 0;
    loop {
        let mut again = false;
        for guest in guests.iter_mut() {
            again |= guest.turn(net);
            guest.reap();
            guest.check();
        }
        if !again {
            break;
        }
        turns += 1;
        assert!(turns < TURNS_MAX, "a device does not become idle");
    }
    for guest in guests.iter_mut() {
        guest.engine.complete_retained(Some(&mut guest.tx));
        guest.tx.publish();
        assert_eq!(guest.engine.segments(), 0);
        assert_eq!(guest.tx.in_flight(), 0, "chains stay in flight");
        guest.reap();
        guest.engine.drop_all_connections();
        assert_eq!(guest.engine.statistics().memory_reserved, 0, "memory is not released");
        assert_eq!(
            (guest.engine.footprint(), guest.engine.queued_entries(), guest.engine.buffered_bytes()),
            (0, 0, 0)
        );
    }
}

#[test]
fn hostile_guests_and_peers_stay_within_the_limits() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seeds = match number("TOWLINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TOWLINE_SEEDS").unwrap_or(1200),
    };
    for seed in seeds {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut data = vec![0; 1 + STEP * rng.usize(1..200)];
        rng.fill(&mut data);
        // Few connections, so packets belong to some.
        let ports = rng.u8(..);
        for step in data[1..].chunks_exact_mut(STEP) {
            if rng.u8(..4) > 0 {
                (step[2], step[6], step[7]) = (ports ^ (step[2] & 0x40), step[6] | 2, step[7] & 3);
            }
        }
        let failed = std::panic::catch_unwind(|| device(&data));
        if let Err(panic) = failed {
            eprintln!("TOWLINE_SEED={seed} fails");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Inputs of former failures, and one of each kind of step.
#[test]
fn recorded_inputs_stay_within_the_limits() {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/vsock_device");
    let mut count = 0;
    for seed in std::fs::read_dir(directory).expect("the seeds") {
        device(&std::fs::read(seed.expect("a seed").path()).expect("its bytes"));
        count += 1;
    }
    assert!(count >= 3, "{count} seeds");
}
