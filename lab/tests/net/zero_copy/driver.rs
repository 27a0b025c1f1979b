//! The driver of a card inside of a Linux guest: this test's own program, which executes commands from a pipe.
//!
//! ```text
//!   test ── `echo send 100 > PIPE` ──► driver ── ring 1 ── towline net ── AF_XDP ── eth0
//!        ◄── a line of its output ────┘
//! ```
//! A buffer is overwritten as soon as it is used, so that a device that still reads it sends other bytes.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT};
use towline_frontend::{Buffer, Frontend, Memory, Queue, QueueOptions};

/// Set in the guest, to the card's socket.
pub(crate) const SOCKET: &str = "TOWLINE_TEST_DRIVER";
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

struct Driver {
    frontend: Frontend,
    memory: Arc<Memory>,
    queue: Queue,
    slots_at: u64,
    free: Vec<u64>,
    next: u32,
    base: u16,
}

impl Driver {
    fn start(socket: &Path) -> Self {
        let mut frontend = Frontend::connect(socket, WITHIN).unwrap();
        let features = frontend.negotiate(0, EVENT_IDX | INDIRECT, 0).unwrap().features;
        let memory = Arc::new(Memory::new(MEMORY_BYTES).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let queue = Queue::new(&memory, 1, QueueOptions { size: RING, features }).unwrap();
        frontend.start(&queue, 0).unwrap();
        let slots_at = memory.alloc(SLOTS * SLOT_BYTES, 4096);
        Self { frontend, memory, queue, slots_at, free: (0..SLOTS).collect(), next: 0, base: 0 }
    }

    /// Executes a command. Returns the number of chains in flight.
    fn execute(&mut self, line: &str) -> u64 {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("queue", count) => self.queue(count.parse().unwrap()),
            ("send", count) => {
                for _ in 0..count.parse::<u32>().unwrap() {
                    if self.free.is_empty() {
                        self.finish();
                    }
                    self.queue(1);
                }
                self.finish();
            }
            ("look", _) => self.reclaim(),
            ("finish", _) => self.finish(),
            ("stop", _) => {
                self.base = self.frontend.stop(1).unwrap();
                self.reclaim();
            }
            ("start", _) => {
                self.frontend.start(&self.queue, self.base).unwrap();
                self.queue.force_kick();
            }
            _ => panic!("unknown command `{line}`"),
        }
        self.queue.in_flight().into()
    }

    /// Makes frames available.
    fn queue(&mut self, count: u64) {
        for _ in 0..count {
            let slot = self.free.pop().expect("the test queues at most `SLOTS` frames");
            let bytes = [&[0; VIRTIO][..], &frame(self.next)].concat();
            let at = self.slots_at + slot * SLOT_BYTES;
            self.memory.write(at, &bytes);
            let len = u32::try_from(bytes.len()).unwrap();
            // The header of its own, or with the frame, or with a part of it.
            let first = [12, len, 40][self.next as usize % 3];
            let parts = [(at, first), (at + u64::from(first), len - first)];
            let buffers: Vec<Buffer> = parts
                .into_iter()
                .filter(|(_, len)| *len > 0)
                .map(|(guest, len)| Buffer { guest, len })
                .collect();
            assert!(self.queue.add(&buffers, &[], slot), "the ring has room for {SLOTS} chains");
            self.next += 1;
        }
        self.queue.publish();
    }

    /// Reuses the buffers of used chains.
    fn reclaim(&mut self) {
        while let Some(used) = self.queue.pop_used().unwrap() {
            let at = self.slots_at + used.token * SLOT_BYTES;
            self.memory.write(at, &[0xee; SLOT_BYTES as usize]);
            self.free.push(used.token);
        }
    }

    fn finish(&mut self) {
        self.reclaim();
        while self.queue.in_flight() > 0 {
            self.queue.wait(WITHIN).unwrap();
            self.reclaim();
        }
    }
}
