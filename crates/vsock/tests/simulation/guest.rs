//! A guest: a driver with two rings in a shared file, and connections that count every byte, written from the standard
//! and not from the device.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_vhost_user::log::LogSwitch;
use towline_vhost_user::message::{RegionInfo, VringAddress};
use towline_vhost_user::{Memory, Region, Ring, RingSetup, features};
use towline_vsock::packet::{HEADER_BYTES, Header, Kind, Operation, SeqFlags, ShutdownFlags};
use zerocopy::IntoBytes as _;

use crate::plan::{Plan, byte};

pub(crate) const CID: u64 = 7;
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7f00_0000_0000;
/// Of each ring: its table, its available and its used ring, then a buffer for each descriptor.
const RING_BYTES: u64 = 0x8_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFERS: u64 = 0x4000;
const ENTRIES: u16 = 16;
const BUFFER_BYTES: u64 = 0x6000;
/// Enough that some packets are worth being lent.
const PAYLOAD_MAX: u32 = 20_000;

/// One ring, seen from the driver.
pub(crate) struct Side {
    base: u64,
    free: Vec<u16>,
    chains: Vec<Vec<u16>>,
    available: u16,
    used: u16,
}

/// The memory of a guest.
pub(crate) struct Machine {
    file: File,
    memory: Arc<Memory>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 2 * RING_BYTES).unwrap();
        let file = File::from(fd);
        let info = RegionInfo {
            guest_address: GUEST.into(),
            size: (2 * RING_BYTES).into(),
            user_address: USER.into(),
            mmap_offset: 0.into(),
        };
        let region = Region::map(&info, file.as_fd().try_clone_to_owned().unwrap()).unwrap();
        Self { memory: Arc::new(Memory::new(vec![region]).unwrap()), file }
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    fn get<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// A ring as nobody has used it: receive 0, transmit 1.
    pub(crate) fn ring(&self, index: u64) -> (Side, Ring) {
        let base = index * RING_BYTES;
        self.put(base + AVAILABLE, &[0; 0x400]);
        self.put(base + USED, &[0; 0x400]);
        let address = VringAddress {
            index: 0.into(),
            flags: 0.into(),
            descriptors: (USER + base).into(),
            used: (USER + base + USED).into(),
            available: (USER + base + AVAILABLE).into(),
            log: 0.into(),
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
        (Side { base, free: (0..ENTRIES).collect(), chains, available: 0, used: 0 }, ring)
    }
}

impl Side {
    fn buffer(&self, index: u16) -> u64 {
        self.base + BUFFERS + u64::from(index) * BUFFER_BYTES
    }

    /// Makes a chain of buffers available. `None` if there are too few descriptors.
    fn add(&mut self, machine: &Machine, lens: &[u32], write: bool) -> Option<Vec<u16>> {
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
            machine.put(self.base + 16 * u64::from(indices[at]), &bytes.concat());
        }
        let entry = self.base + AVAILABLE + 4 + 2 * u64::from(self.available % ENTRIES);
        machine.put(entry, &indices[0].to_le_bytes());
        self.available = self.available.wrapping_add(1);
        machine.put(self.base + AVAILABLE + 2, &self.available.to_le_bytes());
        self.chains[usize::from(indices[0])] = indices.clone();
        Some(indices)
    }

    fn take(&mut self, machine: &Machine) -> Option<(Vec<u16>, u32)> {
        if u16::from_le_bytes(machine.get(self.base + USED + 2)) == self.used {
            return None;
        }
        let entry: [u8; 8] = machine.get(self.base + USED + 4 + 8 * u64::from(self.used % ENTRIES));
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        self.used = self.used.wrapping_add(1);
        let chain = std::mem::take(&mut self.chains[word(0) as usize]);
        assert!(!chain.is_empty(), "a chain that the device did not have came back");
        self.free.extend(&chain);
        Some((chain, word(4)))
    }
}

/// A connection, seen from the guest.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) plan: Plan,
    pub(crate) open: bool,
    pub(crate) gone: bool,
    pub(crate) was_reset: bool,
    /// What the program has written, and read.
    sent: u32,
    pub(crate) received: u32,
    pub(crate) read: u32,
    told: u32,
    alloc: u32,
    peer_alloc: u32,
    peer_taken: u32,
    pub(crate) host_shut: ShutdownFlags,
    pub(crate) shut: ShutdownFlags,
    /// Lengths of messages that came, and of the one that is coming.
    pub(crate) messages: Vec<u32>,
    message: u32,
}

impl Line {
    fn room(&self) -> u32 {
        self.peer_alloc - self.sent.wrapping_sub(self.peer_taken)
    }

    /// All that the host had for it has come, and was read.
    pub(crate) fn has_read_all(&self) -> bool {
        self.host_shut.contains(ShutdownFlags::SEND) && self.read == self.received
    }
}

/// By the guest's port and the host's.
pub(crate) type Name = (u32, u32);

/// A guest and its programs.
pub(crate) struct Guest {
    machine: Machine,
    receive: Side,
    transmit: Side,
    pub(crate) lines: BTreeMap<Name, Line>,
    /// Plans of connections that the host will ask for, by the guest's port.
    pub(crate) expected: BTreeMap<u32, Plan>,
    queue: VecDeque<Packet>,
    /// What is in the transmit ring, by the first descriptor.
    in_ring: BTreeMap<u16, (Name, Range<u32>)>,
    rx_bytes: u32,
    alloc: u32,
}

/// A packet, and which of its connection's bytes it has.
struct Packet {
    header: Header,
    payload: Vec<u8>,
    bytes: (Name, Range<u32>),
}

impl Guest {
    pub(crate) fn new(machine: Machine, rng: &mut fastrand::Rng) -> (Self, Ring, Ring) {
        let (receive, rx) = machine.ring(0);
        let (transmit, tx) = machine.ring(1);
        let rx_bytes = [60, 300, 1500, 4096][rng.usize(..4)];
        let alloc = [1, 100, 5000, 40_000][rng.usize(..4)].max(rng.u32(1..3000));
        let guest = Self {
            machine,
            receive,
            transmit,
            lines: BTreeMap::new(),
            expected: BTreeMap::new(),
            queue: VecDeque::new(),
            in_ring: BTreeMap::new(),
            rx_bytes,
            alloc,
        };
        (guest, rx, tx)
    }

    pub(crate) fn into_machine(self) -> Machine {
        self.machine
    }

    /// The most that a message to this guest may have.
    pub(crate) fn alloc(&self) -> u32 {
        self.alloc
    }

    fn line(&self, plan: Plan) -> Line {
        Line {
            plan,
            open: false,
            gone: false,
            was_reset: false,
            sent: 0,
            received: 0,
            read: 0,
            told: 0,
            alloc: self.alloc,
            peer_alloc: 0,
            peer_taken: 0,
            host_shut: ShutdownFlags::empty(),
            shut: ShutdownFlags::empty(),
            messages: Vec::new(),
            message: 0,
        }
    }

    pub(crate) fn connect(&mut self, name: Name, plan: Plan) {
        let line = self.line(plan);
        self.lines.insert(name, line);
        self.say(name, Operation::Request, 0, &[]);
    }

    fn say(&mut self, name: Name, operation: Operation, flags: u32, payload: &[u8]) {
        let line = self.lines.get_mut(&name).unwrap();
        line.told = line.read;
        let header = Header {
            source_cid: CID.into(),
            destination_cid: 2.into(),
            source_port: name.0.into(),
            destination_port: name.1.into(),
            len: u32::try_from(payload.len()).unwrap().into(),
            kind: line.plan.kind.number().into(),
            operation: operation.number().into(),
            flags: flags.into(),
            buf_alloc: line.alloc.into(),
            fwd_cnt: line.read.into(),
        };
        let start = line.sent - u32::try_from(payload.len()).unwrap();
        self.queue.push_back(Packet { header, payload: payload.to_vec(), bytes: (name, start..line.sent) });
    }

    /// The program writes up to `most` bytes, as credit allows; at its end it shuts down.
    pub(crate) fn write(&mut self, name: Name, most: u32) {
        let line = self.lines.get_mut(&name).unwrap();
        if !line.open || line.gone || line.shut.contains(ShutdownFlags::SEND) {
            return;
        }
        if line.sent == line.plan.guest_bytes() {
            line.shut |= ShutdownFlags::SEND;
            let flags = line.shut.bits();
            self.say(name, Operation::Shutdown, flags, &[]);
            return;
        }
        let (left, ends) = line.plan.guest_message_at(line.sent);
        let len = most.min(line.room()).min(left).min(PAYLOAD_MAX);
        if len == 0 || line.host_shut.contains(ShutdownFlags::RECEIVE) {
            return;
        }
        let payload: Vec<u8> = (0..len).map(|at| byte(line.plan.seed, line.sent + at)).collect();
        line.sent += len;
        let ends = if ends && len == left { SeqFlags::EOM } else { SeqFlags::empty() };
        self.say(name, Operation::ReadWrite, ends.bits(), &payload);
    }

    /// The program reads up to `most` bytes; the host hears of it as seldom as Linux would say it, or a bit oftener.
    pub(crate) fn read(&mut self, name: Name, most: u32) {
        let line = self.lines.get_mut(&name).unwrap();
        line.read += most.min(line.received - line.read);
        let due = line.read - line.told >= (line.alloc / 2).max(1);
        if line.open && !line.gone && due {
            self.say(name, Operation::CreditUpdate, 0, &[]);
        }
        self.end_if_over(name);
    }

    fn end_if_over(&mut self, name: Name) {
        let line = self.lines.get_mut(&name).unwrap();
        if line.gone || !line.open {
            return;
        }
        let sent_all = line.shut.contains(ShutdownFlags::SEND);
        if line.host_shut.is_all() && line.read == line.received {
            line.gone = true;
            line.was_reset |= !sent_all;
            self.say(name, Operation::Reset, 0, &[]);
        } else if sent_all && line.has_read_all() && !line.shut.is_all() {
            line.shut = ShutdownFlags::all();
            self.say(name, Operation::Shutdown, ShutdownFlags::all().bits(), &[]);
        }
    }

    /// The program dies: with what it has not read.
    pub(crate) fn abort(&mut self, name: Name) {
        let line = self.lines.get_mut(&name).unwrap();
        if !line.gone {
            (line.gone, line.was_reset) = (true, true);
            self.say(name, Operation::Reset, 0, &[]);
        }
    }

    /// The driver takes back what was sent: which bytes of which connections. It may write there again at once.
    pub(crate) fn take_back(&mut self) -> Vec<(Name, Range<u32>)> {
        let mut back = Vec::new();
        while let Some((chain, _)) = self.transmit.take(&self.machine) {
            for index in &chain {
                self.machine.put(self.transmit.buffer(*index), &[0xee; 64]);
            }
            back.push(self.in_ring.remove(&chain[0]).unwrap());
        }
        back
    }

    /// Whether nothing of the driver's is with the device.
    pub(crate) fn has_all_back(&self) -> bool {
        self.in_ring.is_empty()
    }

    /// The driver puts packets into its ring, in one piece or several.
    pub(crate) fn transmit(&mut self, rng: &mut fastrand::Rng) {
        while let Some(Packet { header, payload, bytes: of }) = self.queue.front() {
            let of = of.clone();
            let bytes = [header.as_bytes(), payload].concat();
            let parts = rng.usize(1..=3).min(self.transmit.free.len());
            let step = bytes.len().div_ceil(parts.max(1)).max(1);
            let pieces: Vec<&[u8]> = bytes.chunks(step).collect();
            let lens: Vec<u32> = pieces.iter().map(|piece| piece.len() as u32).collect();
            if parts == 0 || pieces.iter().any(|piece| piece.len() as u64 > BUFFER_BYTES) {
                return;
            }
            let buffers: Vec<u64> = {
                let Some(indices) = self.transmit.add_later(&lens) else { return };
                indices.iter().map(|index| self.transmit.buffer(*index)).collect()
            };
            for (piece, at) in pieces.iter().zip(buffers) {
                self.machine.put(at, piece);
            }
            let chain = self.transmit.add(&self.machine, &lens, false).unwrap();
            self.in_ring.insert(chain[0], of);
            self.queue.pop_front();
        }
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The driver posts buffers.
    pub(crate) fn post(&mut self, most: usize) {
        for _ in 0..most {
            if self.receive.add(&self.machine, &[self.rx_bytes], true).is_none() {
                return;
            }
        }
    }

    /// The driver looks at what was received.
    pub(crate) fn receive(&mut self) {
        while let Some((chain, len)) = self.receive.take(&self.machine) {
            assert!(len as usize >= HEADER_BYTES, "a buffer of {len} bytes came back: no header");
            let mut bytes = vec![0; len as usize];
            self.machine.file.read_exact_at(&mut bytes, self.receive.buffer(chain[0])).unwrap();
            let (header, payload) = bytes.split_first_chunk().unwrap();
            let header = Header::parse(header);
            assert_eq!((header.source_cid.get(), header.destination_cid.get()), (2, CID));
            assert_eq!(header.len.get() as usize, payload.len());
            self.packet(&header, payload);
        }
    }

    fn packet(&mut self, header: &Header, payload: &[u8]) {
        let name = (header.destination_port.get(), header.source_port.get());
        let operation = Operation::from_number(header.operation.get()).expect("an operation of the standard");
        if operation == Operation::Request {
            let plan = self.expected.remove(&name.0).expect("somebody listens there");
            assert_eq!(plan.kind.number(), header.kind.get());
            let mut line = self.line(plan);
            line.open = true;
            line.peer_alloc = header.buf_alloc.get();
            assert!(self.lines.insert(name, line).is_none(), "a port was used again at once");
            self.say(name, Operation::Response, 0, &[]);
            return;
        }
        let Some(line) = self.lines.get_mut(&name).filter(|line| !line.gone) else {
            // As any guest: what is not known is reset.
            assert!(self.lines.contains_key(&name), "a packet of no connection that ever was");
            return;
        };
        assert_eq!(line.plan.kind.number(), header.kind.get());
        let taken = header.fwd_cnt.get();
        if operation != Operation::Reset {
            assert!(
                taken.wrapping_sub(line.peer_taken) <= line.sent - line.peer_taken,
                "{taken} bytes were not sent"
            );
            assert!(header.buf_alloc.get() >= line.peer_alloc, "its window became smaller");
            (line.peer_taken, line.peer_alloc) = (taken, header.buf_alloc.get());
        }
        match operation {
            Operation::Response => line.open = true,
            Operation::ReadWrite => line.payload(header, payload),
            Operation::Shutdown => {
                line.host_shut |=
                    ShutdownFlags::from_bits(header.flags.get()).expect("flags of the standard");
                self.end_if_over(name);
            }
            Operation::Reset => {
                // The end of one that was closed both ways; else something was lost.
                line.was_reset |= !(line.shut.is_all() && line.has_read_all());
                line.gone = true;
            }
            Operation::CreditRequest => self.say(name, Operation::CreditUpdate, 0, &[]),
            Operation::CreditUpdate | Operation::Request => {}
        }
    }
}

impl Line {
    fn payload(&mut self, header: &Header, payload: &[u8]) {
        assert!(self.open && !self.host_shut.contains(ShutdownFlags::SEND), "bytes behind the end");
        let room = self.alloc - (self.received - self.told);
        assert!(payload.len() as u32 <= room, "{} bytes and room for {room}", payload.len());
        for (at, found) in (self.received..).zip(payload) {
            assert_eq!(*found, byte(!self.plan.seed, at), "byte {at} to the guest");
        }
        self.received += payload.len() as u32;
        self.message += payload.len() as u32;
        if self.plan.kind == Kind::Seqpacket && header.flags.get() & SeqFlags::EOM.bits() != 0 {
            self.messages.push(std::mem::take(&mut self.message));
        }
    }
}

impl Side {
    /// The descriptors that [`Side::add`] would take.
    fn add_later(&self, lens: &[u32]) -> Option<Vec<u16>> {
        let start = self.free.len().checked_sub(lens.len())?;
        Some(self.free[start..].to_vec())
    }
}
