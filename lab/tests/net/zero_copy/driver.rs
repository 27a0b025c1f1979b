//! The driver of a card inside of a Linux guest: this test's own program, which executes commands from a
//! pipe.
//!
//! ```text
//!   test ── `echo send 100 > PIPE` ──► driver ── ring 1 ── towline net ── AF_XDP ── eth0
//!        ◄── a line of its output ────┘
//! ```
//! Commands are for the current pair; `pair N` changes it. A buffer is overwritten as soon as it is used, so
//! a device that still reads it sends other bytes.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, eth, socket_with};
use rustix::process::Signal;
use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT};
use towline_frontend::{Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions};

/// Set in the guest, to the card's socket.
pub(crate) const SOCKET: &str = "TOWLINE_TEST_DRIVER";
/// Set in the guest, to the number of queue pairs.
pub(crate) const PAIRS: &str = "TOWLINE_TEST_DRIVER_PAIRS";
/// Set in the guest, if the driver's memory should be in huge pages.
pub(crate) const HUGE_PAGES: &str = "TOWLINE_TEST_DRIVER_HUGE_PAGES";
/// Pipe with the commands.
pub(crate) const PIPE: &str = "/tmp/commands";
/// Maximum number of frames in flight.
pub(crate) const SLOTS: u64 = 900;
/// Not a divisor of a page: some frames cross pages.
const SLOT_BYTES: u64 = 2304;
const RING: u16 = 1024;
const MEMORY_BYTES: u64 = 8 << 20;
const VIRTIO: usize = 12;
/// Bytes before a frame's content: addresses, type, sequence number.
const HEADER_BYTES: usize = 18;
/// Addresses and type of all frames; the type is for experiments (IEEE 802).
pub(crate) const ETHERNET: [u8; 14] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
const WITHIN: Duration = Duration::from_secs(60);
/// Frames per notification of a flow.
const BURST: u64 = 24;
/// Rounds of a flow between two changes of a kind; coprime, so they meet in every order.
const SHAPE_ROUNDS: u64 = 41;
const ENABLE_ROUNDS: u64 = 59;
const STOP_ROUNDS: u64 = 97;

/// The frame with this sequence number, of 60 to 1514 bytes.
pub(crate) fn frame(sequence: u32) -> Vec<u8> {
    let mixed = sequence.wrapping_mul(0x9e37_79b1);
    let len = 60 + (mixed >> 8) as usize % 1455;
    let mut frame = [&ETHERNET[..], &sequence.to_be_bytes()].concat();
    frame.extend((HEADER_BYTES..len).map(|at| (mixed.wrapping_add(at as u32 * 7) >> 3) as u8));
    frame
}

/// The sequence number of a frame of the driver; `None` for other frames.
pub(crate) fn sequence(frame: &[u8]) -> Option<u32> {
    let number = frame.strip_prefix(&ETHERNET)?.first_chunk::<4>()?;
    Some(u32::from_be_bytes(*number))
}

/// Executes commands until `end`.
pub(crate) fn run(socket: &Path) {
    let mut driver = Driver::start(socket);
    loop {
        // A writer's end is the end of the file.
        let commands = BufReader::new(File::open(PIPE).unwrap());
        for line in commands.lines() {
            let line = line.unwrap();
            if line == "end" {
                return;
            }
            println!("{line}: {}", driver.execute(&line));
        }
    }
}

/// Buffers of the frames.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Without scatter-gather: the frame after its virtio header.
    Linear,
    /// The virtio header separately, or with the frame, or with a part of it.
    Mixed,
}

struct Driver {
    frontend: Frontend,
    memory: Arc<MemoryArena>,
    /// The transmit ring of each pair.
    queues: Vec<Queue>,
    /// Position of each stopped ring.
    bases: Vec<u16>,
    /// The current pair.
    pair: usize,
    slots_at: u64,
    free: Vec<u64>,
    next: u32,
    shape: Shape,
    /// Frames by their slots, and the last one that was used on each pair.
    frames: Vec<u32>,
    last_used: Vec<u32>,
    /// Number of chains that were used after a later one of their ring.
    overtaken: u64,
    /// A capture of all packets of this machine, which is not read.
    capture: Option<OwnedFd>,
}

impl Driver {
    fn start(socket: &Path) -> Self {
        let pairs: u32 = std::env::var(PAIRS).unwrap().parse().unwrap();
        let huge = std::env::var_os(HUGE_PAGES).is_some();
        let memory =
            if huge { MemoryArena::in_huge_pages(MEMORY_BYTES) } else { MemoryArena::new(MEMORY_BYTES) };
        let memory = Arc::new(memory.unwrap());
        let (mut frontend, features) = connect(socket, &memory);
        let new = |pair| Queue::new(&memory, 2 * pair + 1, QueueOptions { size: RING, features }).unwrap();
        let queues: Vec<Queue> = (0..pairs).map(new).collect();
        queues.iter().for_each(|queue| frontend.start(queue, 0).unwrap());
        let slots_at = memory.alloc(SLOTS * SLOT_BYTES, 4096);
        Self {
            frontend,
            memory,
            bases: vec![0; queues.len()],
            last_used: vec![0; queues.len()],
            queues,
            pair: 0,
            slots_at,
            free: (0..SLOTS).collect(),
            next: 0,
            shape: Shape::Mixed,
            frames: vec![0; usize::try_from(SLOTS).unwrap()],
            overtaken: 0,
            capture: None,
        }
    }

    fn queue(&mut self) -> &mut Queue {
        &mut self.queues[self.pair]
    }

    /// Executes a command. Returns the number of chains in flight, or what is documented at the command.
    fn execute(&mut self, line: &str) -> u64 {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("pair", pair) => self.pair = pair.parse().unwrap(),
            ("queue", count) => self.add(count.parse().unwrap()),
            ("send", count) => {
                for _ in 0..count.parse::<u32>().unwrap() {
                    if self.free.is_empty() {
                        self.finish();
                    }
                    self.add(1);
                }
                self.finish();
            }
            ("look", _) => self.reclaim(),
            ("finish", _) => self.finish(),
            ("stop", _) => self.stop(),
            ("start", _) => self.start_again(),
            ("capture", _) => {
                let flags = SocketFlags::CLOEXEC;
                let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(eth::ALL));
                self.capture = Some(socket.unwrap());
            }
            // The number of frames.
            ("flow", milliseconds) => {
                return self.flow(Duration::from_millis(milliseconds.parse().unwrap()));
            }
            ("overtaken", _) => return self.overtaken,
            ("kill", arguments) => self.kill_card(arguments),
            ("connect", _) => self.connect_again(),
            _ => panic!("unknown command `{line}`"),
        }
        self.queue().in_flight().into()
    }

    fn stop(&mut self) {
        self.bases[self.pair] = self.frontend.stop(self.queues[self.pair].index()).unwrap();
        self.reclaim();
    }

    fn start_again(&mut self) {
        self.frontend.start(&self.queues[self.pair], self.bases[self.pair]).unwrap();
        self.queue().force_kick();
    }

    /// Sends by all pairs in turn. During that time frames have several buffers or one, the last pair is
    /// disabled and enabled, as Linux does when its number of queues changes, and rings stop with frames in
    /// flight. Returns the number of frames.
    fn flow(&mut self, length: Duration) -> u64 {
        let (first, begun) = (self.next, Instant::now());
        let last = self.queues.len() - 1;
        let mut enabled = true;
        for round in 1u64.. {
            if begun.elapsed() >= length {
                break;
            }
            self.pair = if enabled { usize::try_from(round).unwrap() % self.queues.len() } else { 0 };
            if self.free.is_empty() {
                self.queue().wait(WITHIN).unwrap();
            }
            self.reclaim_all();
            self.add(BURST.min(self.free.len() as u64));
            if round.is_multiple_of(SHAPE_ROUNDS) {
                self.shape = if self.shape == Shape::Linear { Shape::Mixed } else { Shape::Linear };
            }
            if round.is_multiple_of(ENABLE_ROUNDS) && last > 0 {
                self.pair = last;
                self.finish();
                enabled = !enabled;
                self.frontend.enable(self.queues[last].index(), enabled).unwrap();
            }
            if round.is_multiple_of(STOP_ROUNDS) {
                self.pair = 0;
                self.stop();
                self.start_again();
            }
        }
        self.frontend.enable(self.queues[last].index(), true).unwrap();
        self.finish_all();
        (self.next - first).into()
    }

    fn finish_all(&mut self) {
        for pair in 0..self.queues.len() {
            self.pair = pair;
            self.finish();
        }
    }

    fn reclaim_all(&mut self) {
        let current = self.pair;
        for pair in 0..self.queues.len() {
            self.pair = pair;
            self.reclaim();
        }
        self.pair = current;
    }

    /// `COUNT USED PID`: queues frames, and kills the card once it has used some of them.
    fn kill_card(&mut self, arguments: &str) {
        let arguments: Vec<u64> = arguments.split(' ').map(|word| word.parse().unwrap()).collect();
        let [count, used, pid] = arguments[..] else { panic!("`kill COUNT USED PID`") };
        self.add(count);
        while u64::from(self.queue().in_flight()) > count - used {
            self.queue().wait(WITHIN).unwrap();
            self.reclaim();
        }
        towline_lab::signal(pid.try_into().unwrap(), Signal::KILL);
    }

    /// Connects to the next process, as QEMU does: with the used index as the base.
    fn connect_again(&mut self) {
        self.frontend = connect(Path::new(&std::env::var(SOCKET).unwrap()), &self.memory).0;
        self.reclaim();
        for queue in &mut self.queues {
            self.frontend.start(queue, queue.last_used_idx()).unwrap();
            queue.force_kick();
        }
    }

    /// Makes frames available.
    fn add(&mut self, count: u64) {
        for _ in 0..count {
            let slot = self.free.pop().expect("the test queues at most `SLOTS` frames");
            let bytes = [&[0; VIRTIO][..], &frame(self.next)].concat();
            let at = self.slots_at + slot * SLOT_BYTES;
            self.memory.write(at, &bytes);
            let len = u32::try_from(bytes.len()).unwrap();
            let first = match self.shape {
                Shape::Linear => len,
                Shape::Mixed => [12, len, 40][self.next as usize % 3],
            };
            self.frames[usize::try_from(slot).unwrap()] = self.next;
            let parts = [(at, first), (at + u64::from(first), len - first)];
            let buffers: Vec<QueueBuffer> = parts
                .into_iter()
                .filter(|(_, len)| *len > 0)
                .map(|(guest, len)| QueueBuffer { guest, len })
                .collect();
            assert!(self.queue().add(&buffers, &[], slot), "the ring has room for {SLOTS} chains");
            self.next += 1;
        }
        self.queue().publish();
    }

    /// Reuses the buffers of used chains.
    fn reclaim(&mut self) {
        while let Some(used) = self.queue().pop_used().unwrap() {
            let at = self.slots_at + used.token * SLOT_BYTES;
            self.memory.write(at, &[0xee; SLOT_BYTES as usize]);
            let frame = self.frames[usize::try_from(used.token).unwrap()];
            let last = &mut self.last_used[self.pair];
            self.overtaken += u64::from(frame < *last);
            *last = frame.max(*last);
            self.free.push(used.token);
        }
    }

    fn finish(&mut self) {
        self.reclaim();
        while self.queue().in_flight() > 0 {
            self.queue().wait(WITHIN).unwrap();
            self.reclaim();
        }
    }
}

/// Connects to a card and passes it the memory. Returns the negotiated features, too.
fn connect(socket: &Path, memory: &MemoryArena) -> (Frontend, u64) {
    let mut frontend = Frontend::connect(socket, WITHIN).unwrap();
    let features = frontend.negotiate(0, EVENT_IDX | INDIRECT, 0).unwrap().features;
    frontend.set_mem_table(Some(memory)).unwrap();
    (frontend, features)
}
