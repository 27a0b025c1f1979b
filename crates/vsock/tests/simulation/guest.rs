//! Model of a guest: a driver with two rings in a shared file, and connections that count every byte. It is
//! written from the specification, not from the device.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_vhost_user::log::LogSwitch;
use towline_vhost_user::message::{RegionInfo, VringAddress};
use towline_vhost_user::{GuestMemory, Region, Ring, RingSetup, features};
use towline_vsock::credit::PACKET_CHARGE;
use towline_vsock::packet::{HEADER_BYTES, Operation, PacketHeader, SeqFlags, ShutdownFlags, SocketType};

use crate::plan::{Plan, byte};

pub(crate) const CID: u64 = 7;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7f00_0000_0000;
/// Memory of each ring: its table, its available and its used ring, then a buffer for each descriptor.
const RING_BYTES: u64 = 0x8_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFERS: u64 = 0x4000;
const ENTRIES: u16 = 16;
const BUFFER_BYTES: u64 = 0x6000;
/// Long enough that some packets are sent without a copy.
const PAYLOAD_MAX: u32 = 20_000;

/// A ring as the driver sees it.
pub(crate) struct DriverQueue {
    base: u64,
    free: Vec<u16>,
    chains: Vec<Vec<u16>>,
    available: u16,
    used: u16,
}

/// The memory of a guest.
pub(crate) struct TestMemory {
    file: File,
    memory: Arc<GuestMemory>,
}

impl TestMemory {
    pub(crate) fn new() -> Self {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 2 * RING_BYTES).unwrap();
        let file = File::from(fd);
        let info =
            RegionInfo { guest_address: GUEST, size: 2 * RING_BYTES, user_address: USER, mmap_offset: 0 };
        let region = Region::map(&info, file.as_fd().try_clone_to_owned().unwrap()).unwrap();
        Self { memory: Arc::new(GuestMemory::new(vec![region]).unwrap()), file }
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    fn get<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// Returns an unused ring: 0 to receive, 1 to transmit.
    pub(crate) fn ring(&self, index: u64) -> (DriverQueue, Ring) {
        let base = index * RING_BYTES;
        self.put(base + AVAILABLE, &[0; 0x400]);
        self.put(base + USED, &[0; 0x400]);
        let address = VringAddress {
            index: 0,
            flags: 0,
            descriptors: USER + base,
            used: USER + base + USED,
            available: USER + base + AVAILABLE,
            log: 0,
        };
        let setup = RingSetup {
            size: ENTRIES.into(),
            address,
            base: 0,
            features: features::VERSION_1,
            call: None,
            switch: LogSwitch::default(),
            log: None,
        };
        let ring = Ring::new(setup, Arc::clone(&self.memory), index + 1).unwrap();
        let chains = vec![Vec::new(); usize::from(ENTRIES)];
        (DriverQueue { base, free: (0..ENTRIES).collect(), chains, available: 0, used: 0 }, ring)
    }
}

impl DriverQueue {
    fn buffer(&self, index: u16) -> u64 {
        self.base + BUFFERS + u64::from(index) * BUFFER_BYTES
    }

    /// Makes a chain of buffers available. `None` if there are too few descriptors.
    fn add(&mut self, memory: &TestMemory, lens: &[u32], write: bool) -> Option<Vec<u16>> {
        if self.free.len() < lens.len() {
            return None;
        }
        let indices = self.free.split_off(self.free.len() - lens.len());
        for (at, len) in lens.iter().enumerate() {
            let next = indices.get(at + 1).copied();
            let flags = u16::from(next.is_some()) | if write { 2 } else { 0 };
            let address = GUEST + self.buffer(indices[at]);
            let bytes = [
                &address.to_le_bytes()[..],
                &len.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.unwrap_or(0).to_le_bytes(),
            ];
            memory.put(self.base + 16 * u64::from(indices[at]), &bytes.concat());
        }
        let entry = self.base + AVAILABLE + 4 + 2 * u64::from(self.available % ENTRIES);
        memory.put(entry, &indices[0].to_le_bytes());
        self.available = self.available.wrapping_add(1);
        memory.put(self.base + AVAILABLE + 2, &self.available.to_le_bytes());
        self.chains[usize::from(indices[0])] = indices.clone();
        Some(indices)
    }

    fn pop_used(&mut self, memory: &TestMemory) -> Option<(Vec<u16>, u32)> {
        if u16::from_le_bytes(memory.get(self.base + USED + 2)) == self.used {
            return None;
        }
        let entry: [u8; 8] = memory.get(self.base + USED + 4 + 8 * u64::from(self.used % ENTRIES));
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        self.used = self.used.wrapping_add(1);
        let chain = std::mem::take(&mut self.chains[word(0) as usize]);
        assert!(!chain.is_empty(), "a chain was used that was not in flight");
        self.free.extend(&chain);
        Some((chain, word(4)))
    }
}

/// A connection as the guest sees it.
#[derive(Debug)]
pub(crate) struct GuestConnection {
    pub(crate) plan: Plan,
    pub(crate) open: bool,
    pub(crate) closed: bool,
    pub(crate) was_reset: bool,
    /// Bytes that the program has written.
    sent: u32,
    pub(crate) received: u32,
    pub(crate) read: u32,
    advertised: u32,
    buf_alloc: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    pub(crate) host_shut: ShutdownFlags,
    pub(crate) shut: ShutdownFlags,
    /// Lengths of received messages, and of the one in progress.
    pub(crate) messages: Vec<u32>,
    message: u32,
    /// Ends of the packets that the program has not read.
    queue: VecDeque<u32>,
    /// The message in progress began when the queue was empty.
    has_queue_alone: bool,
}

impl GuestConnection {
    fn credit(&self) -> u32 {
        self.peer_buf_alloc - self.sent.wrapping_sub(self.peer_fwd_cnt)
    }

    /// Returns true if all data of the host, and its end, was received and read.
    pub(crate) fn has_read_all(&self) -> bool {
        self.host_shut.contains(ShutdownFlags::SEND) && self.read == self.received
    }
}

/// By the guest's port and the host's.
pub(crate) type Ports = (u32, u32);

/// A guest and its programs.
pub(crate) struct Guest {
    memory: TestMemory,
    receive: DriverQueue,
    transmit: DriverQueue,
    pub(crate) connections: BTreeMap<Ports, GuestConnection>,
    /// Plans of connections that the host will open, by the guest's port.
    pub(crate) expected: BTreeMap<u32, Plan>,
    queue: VecDeque<Packet>,
    /// Packets in the transmit ring, by the first descriptor.
    in_ring: BTreeSet<u16>,
    rx_bytes: u32,
    buf_alloc: u32,
    updates_when_empty: bool,
}

/// A packet.
struct Packet {
    header: PacketHeader,
    payload: Vec<u8>,
}

impl Guest {
    pub(crate) fn new(memory: TestMemory, rng: &mut fastrand::Rng) -> (Self, Ring, Ring) {
        let (receive, rx) = memory.ring(0);
        let (transmit, tx) = memory.ring(1);
        let rx_bytes = [60, 300, 1500, 4096][rng.usize(..4)];
        let buf_alloc = [1, 100, 5000, 40_000][rng.usize(..4)].max(rng.u32(1..3000));
        let guest = Self {
            memory,
            receive,
            transmit,
            connections: BTreeMap::new(),
            expected: BTreeMap::new(),
            queue: VecDeque::new(),
            in_ring: BTreeSet::new(),
            rx_bytes,
            buf_alloc,
            updates_when_empty: rng.bool(),
        };
        (guest, rx, tx)
    }

    pub(crate) fn into_memory(self) -> TestMemory {
        self.memory
    }

    /// Returns the maximum length of a message to this guest.
    pub(crate) fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    fn new_connection(&self, plan: Plan) -> GuestConnection {
        GuestConnection {
            plan,
            open: false,
            closed: false,
            was_reset: false,
            sent: 0,
            received: 0,
            read: 0,
            advertised: 0,
            buf_alloc: self.buf_alloc,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
            host_shut: ShutdownFlags::empty(),
            shut: ShutdownFlags::empty(),
            messages: Vec::new(),
            message: 0,
            queue: VecDeque::new(),
            has_queue_alone: false,
        }
    }

    pub(crate) fn connect(&mut self, ports: Ports, plan: Plan) {
        let connection = self.new_connection(plan);
        self.connections.insert(ports, connection);
        self.send(ports, Operation::Request, 0, &[]);
    }

    fn send(&mut self, ports: Ports, operation: Operation, flags: u32, payload: &[u8]) {
        let connection = self.connections.get_mut(&ports).unwrap();
        connection.advertised = connection.read;
        let header = PacketHeader {
            source_cid: CID,
            destination_cid: 2,
            source_port: ports.0,
            destination_port: ports.1,
            len: u32::try_from(payload.len()).unwrap(),
            kind: connection.plan.kind.number(),
            operation: operation.number(),
            flags,
            buf_alloc: connection.buf_alloc,
            fwd_cnt: connection.read,
        };
        self.queue.push_back(Packet { header, payload: payload.to_vec() });
    }

    /// The program writes up to `most` bytes, within its credit, and shuts down its sending side at the end.
    pub(crate) fn write(&mut self, ports: Ports, most: u32) {
        let connection = self.connections.get_mut(&ports).unwrap();
        if !connection.open || connection.closed || connection.shut.contains(ShutdownFlags::SEND) {
            return;
        }
        if connection.sent == connection.plan.guest_bytes() {
            connection.shut |= ShutdownFlags::SEND;
            let flags = connection.shut.bits();
            self.send(ports, Operation::Shutdown, flags, &[]);
            return;
        }
        let (left, ends) = connection.plan.guest_message_at(connection.sent);
        let len = most.min(connection.credit()).min(left).min(PAYLOAD_MAX);
        if len == 0 || connection.host_shut.contains(ShutdownFlags::RECEIVE) {
            return;
        }
        let payload: Vec<u8> = (0..len).map(|at| byte(connection.plan.seed, connection.sent + at)).collect();
        connection.sent += len;
        let ends = if ends && len == left { SeqFlags::EOM } else { SeqFlags::empty() };
        self.send(ports, Operation::ReadWrite, ends.bits(), &payload);
    }

    /// The program reads up to `most` bytes; the guest sends credit updates about as rarely as Linux, some
    /// also when all is read, as Linux does since 6.8.
    pub(crate) fn read(&mut self, ports: Ports, most: u32) {
        let connection = self.connections.get_mut(&ports).unwrap();
        connection.read += most.min(connection.received - connection.read);
        let unadvertised = connection.read - connection.advertised;
        let has_emptied =
            self.updates_when_empty && unadvertised > 0 && connection.read == connection.received;
        let due = unadvertised >= (connection.buf_alloc / 2).max(1) || has_emptied;
        if connection.open && !connection.closed && due {
            self.send(ports, Operation::CreditUpdate, 0, &[]);
        }
        self.close_if_done(ports);
    }

    fn close_if_done(&mut self, ports: Ports) {
        let connection = self.connections.get_mut(&ports).unwrap();
        if connection.closed || !connection.open {
            return;
        }
        let sent_all = connection.shut.contains(ShutdownFlags::SEND);
        if connection.host_shut.is_all() && connection.read == connection.received {
            connection.closed = true;
            connection.was_reset |= !sent_all;
            self.send(ports, Operation::Reset, 0, &[]);
        } else if sent_all && connection.has_read_all() && !connection.shut.is_all() {
            connection.shut = ShutdownFlags::all();
            self.send(ports, Operation::Shutdown, ShutdownFlags::all().bits(), &[]);
        }
    }

    /// The program aborts with unread data.
    pub(crate) fn abort(&mut self, ports: Ports) {
        let connection = self.connections.get_mut(&ports).unwrap();
        if !connection.closed {
            (connection.closed, connection.was_reset) = (true, true);
            self.send(ports, Operation::Reset, 0, &[]);
        }
    }

    /// The driver reclaims used packets, each of which was in the ring, and overwrites them at once.
    pub(crate) fn reclaim(&mut self) {
        while let Some((chain, _)) = self.transmit.pop_used(&self.memory) {
            for index in &chain {
                self.memory.put(self.transmit.buffer(*index), &[0xee; 64]);
            }
            assert!(self.in_ring.remove(&chain[0]), "{chain:?} was used, and not in the ring");
        }
    }

    /// Returns true if no packet is in flight.
    pub(crate) fn has_reclaimed_all(&self) -> bool {
        self.in_ring.is_empty()
    }

    /// The driver makes packets available, each in one segment or several.
    pub(crate) fn transmit(&mut self, rng: &mut fastrand::Rng) {
        while let Some(Packet { header, payload }) = self.queue.front() {
            let bytes = [&header.to_bytes()[..], payload].concat();
            let parts = rng.usize(1..=3).min(self.transmit.free.len());
            let step = bytes.len().div_ceil(parts.max(1)).max(1);
            let segments: Vec<&[u8]> = bytes.chunks(step).collect();
            let lens: Vec<u32> = segments.iter().map(|segment| segment.len() as u32).collect();
            if parts == 0 || segments.iter().any(|segment| segment.len() as u64 > BUFFER_BYTES) {
                return;
            }
            let buffers: Vec<u64> = {
                let Some(indices) = self.transmit.next_descriptors(&lens) else { return };
                indices.iter().map(|index| self.transmit.buffer(*index)).collect()
            };
            for (segment, at) in segments.iter().zip(buffers) {
                self.memory.put(at, segment);
            }
            let chain = self.transmit.add(&self.memory, &lens, false).unwrap();
            self.in_ring.insert(chain[0]);
            self.queue.pop_front();
        }
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The driver posts buffers.
    pub(crate) fn post(&mut self, most: usize) {
        for _ in 0..most {
            if self.receive.add(&self.memory, &[self.rx_bytes], true).is_none() {
                return;
            }
        }
    }

    /// The driver processes received packets.
    pub(crate) fn receive(&mut self) {
        while let Some((chain, len)) = self.receive.pop_used(&self.memory) {
            assert!(len as usize >= HEADER_BYTES, "a buffer of {len} bytes was used: shorter than a header");
            let mut bytes = vec![0; len as usize];
            self.memory.file.read_exact_at(&mut bytes, self.receive.buffer(chain[0])).unwrap();
            let (header, payload) = bytes.split_first_chunk().unwrap();
            let header = PacketHeader::parse(header);
            assert_eq!((header.source_cid, header.destination_cid), (2, CID));
            assert_eq!(header.len as usize, payload.len());
            self.packet(&header, payload);
        }
    }

    fn packet(&mut self, header: &PacketHeader, payload: &[u8]) {
        let ports = (header.destination_port, header.source_port);
        let operation = Operation::from_number(header.operation).expect("a valid operation");
        if operation == Operation::Request {
            let plan = self.expected.remove(&ports.0).expect("a program listens on the port");
            assert_eq!(plan.kind.number(), { header.kind });
            let mut connection = self.new_connection(plan);
            connection.open = true;
            connection.peer_buf_alloc = header.buf_alloc;
            assert!(self.connections.insert(ports, connection).is_none(), "a port was reused at once");
            self.send(ports, Operation::Response, 0, &[]);
            return;
        }
        let Some(connection) = self.connections.get_mut(&ports).filter(|connection| !connection.closed)
        else {
            assert!(self.connections.contains_key(&ports), "a packet of a connection that never existed");
            return;
        };
        assert_eq!(connection.plan.kind.number(), { header.kind });
        let fwd_cnt = header.fwd_cnt;
        if operation != Operation::Reset {
            assert!(
                fwd_cnt.wrapping_sub(connection.peer_fwd_cnt) <= connection.sent - connection.peer_fwd_cnt,
                "{fwd_cnt} bytes were not sent"
            );
            assert!(header.buf_alloc >= connection.peer_buf_alloc, "the window has shrunk");
            (connection.peer_fwd_cnt, connection.peer_buf_alloc) = (fwd_cnt, header.buf_alloc);
        }
        match operation {
            Operation::Response => connection.open = true,
            Operation::ReadWrite => connection.payload(header, payload),
            Operation::Shutdown => {
                connection.host_shut |= ShutdownFlags::from_bits(header.flags).expect("valid flags");
                self.close_if_done(ports);
            }
            Operation::Reset => {
                // Unless both directions had ended, data was lost.
                connection.was_reset |= !(connection.shut.is_all() && connection.has_read_all());
                connection.closed = true;
            }
            Operation::CreditRequest => self.send(ports, Operation::CreditUpdate, 0, &[]),
            Operation::CreditUpdate | Operation::Request => {}
        }
    }
}

impl GuestConnection {
    fn payload(&mut self, header: &PacketHeader, payload: &[u8]) {
        assert!(
            self.open && !self.host_shut.contains(ShutdownFlags::SEND),
            "data after the end of the stream"
        );
        let credit = self.buf_alloc - (self.received - self.advertised);
        assert!(payload.len() as u32 <= credit, "{} bytes with credit for {credit}", payload.len());
        for (at, found) in (self.received..).zip(payload) {
            assert_eq!(*found, byte(!self.plan.seed, at), "byte {at} to the guest");
        }
        // Linux charges each packet, and resets the connection if there are too many. A single packet or
        // message, which may be divided into more packets than that, has to come nevertheless.
        while self.queue.front().is_some_and(|end| *end <= self.read) {
            self.queue.pop_front();
        }
        if self.message == 0 || self.plan.kind == SocketType::Stream {
            self.has_queue_alone = self.queue.is_empty();
        }
        let charge = (self.queue.len() as u32 + 1) * PACKET_CHARGE;
        assert!(self.has_queue_alone || charge <= self.buf_alloc, "{} unread packets", self.queue.len());
        self.received += payload.len() as u32;
        self.queue.push_back(self.received);
        self.message += payload.len() as u32;
        if self.plan.kind == SocketType::Seqpacket && header.flags & SeqFlags::EOM.bits() != 0 {
            self.messages.push(std::mem::take(&mut self.message));
        }
    }
}

impl DriverQueue {
    /// Returns the descriptors that [`DriverQueue::add`] will use.
    fn next_descriptors(&self, lens: &[u32]) -> Option<Vec<u16>> {
        let start = self.free.len().checked_sub(lens.len())?;
        Some(self.free[start..].to_vec())
    }
}
