//! Guests that are migrated, and threads that write to them during that time.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use fastrand::Rng;
use towline_migration::Memory;
use towline_migration::memory::{BlockBacking, MemoryBlock};
use towline_protocol::configuration::Configuration;
use towline_protocol::section::{SectionHeader, SectionType, put_footer};
use towline_protocol::{BlockIndex, PageRef, device_state::DeviceState};

pub(crate) const PAGE: usize = 4096;
/// Barriers as FLUSH records and zero pages on lanes; barriers at each section; FLUSH records and zero pages
/// on main.
pub(crate) const MACHINES: [&str; 3] = ["pc-q35-10.0", "pc-q35-7.2", "pc-q35-8.2"];

pub(crate) fn configuration(machine_type: &str) -> Configuration {
    Configuration { machine_type: machine_type.into(), ..Configuration::default() }
}

/// The tail of a stream: device sections, EOF and the description.
pub(crate) fn device_state(seed: u64) -> Vec<u8> {
    let mut rng = Rng::with_seed(seed);
    let mut bytes = Vec::new();
    let mut devices = Vec::new();
    for number in 0..rng.u32(1..4) {
        let name = format!("0000:00:{number:02x}.0/device");
        let header = SectionHeader { id: 10 + number, name: name.clone(), instance: number, version: 2 };
        header.encode(SectionType::Full, &mut bytes);
        bytes.extend((0..rng.usize(0..5000)).map(|_| rng.u8(..)));
        put_footer(&mut bytes, header.id);
        devices.push(format!(r#"{{"name":"{name}","instance_id":{number}}}"#));
    }
    let description = format!(r#"{{"page_size":4096,"devices":[{}]}}"#, devices.join(","));
    bytes.extend([SectionType::Eof as u8, SectionType::VmDescription as u8]);
    bytes.extend((description.len() as u32).to_be_bytes());
    bytes.extend(description.bytes());
    DeviceState::parse(&bytes).expect("the tail is a valid one");
    bytes
}

pub(crate) fn blocks<'a>(pages: &'a [(&'a str, u64)]) -> Vec<MemoryBlock<'a>> {
    let block =
        |&(name, pages)| MemoryBlock { name, length: pages * PAGE as u64, backing: BlockBacking::Anonymous };
    pages.iter().map(block).collect()
}

pub(crate) fn empty(machine_type: &str, pages: &[(&str, u64)]) -> Arc<Memory> {
    Arc::new(Memory::new(configuration(machine_type), &blocks(pages)).unwrap())
}

pub(crate) fn at(block: usize, offset: u64) -> PageRef {
    PageRef { block: BlockIndex(block as u32), offset }
}

/// Fills memory with zero pages, pages with one byte, and random ones; also over what is there.
pub(crate) fn fill(memory: &Memory, rng: &mut Rng) {
    let mut page = [0; PAGE];
    for (index, block) in memory.blocks().iter().enumerate() {
        for offset in (0..block.length).step_by(PAGE) {
            page.fill(0);
            match rng.u8(0..4) {
                0 => continue,
                1 => {}
                2 => page[rng.usize(0..PAGE)] = 1,
                _ => page.fill_with(|| rng.u8(..)),
            }
            memory.write(at(index, offset), &page);
        }
    }
}

/// Compares two memories byte by byte.
pub(crate) fn difference(one: &Memory, other: &Memory) -> Option<String> {
    if one.blocks() != other.blocks() {
        return Some(format!("{:?} and {:?}", one.blocks(), other.blocks()));
    }
    let (mut a, mut b) = (vec![0; 16 * PAGE], vec![0; 16 * PAGE]);
    for (index, block) in one.blocks().iter().enumerate() {
        for offset in (0..block.length).step_by(a.len()) {
            let length = a.len().min((block.length - offset) as usize);
            one.read(at(index, offset), &mut a[..length]);
            other.read(at(index, offset), &mut b[..length]);
            if let Some(first) = (0..length).find(|&i| a[i] != b[i]) {
                return Some(format!("byte {:#x} of block {:?}", offset + first as u64, block.name));
            }
        }
    }
    None
}

/// Number of times that a guest was stopped and started, and the thread that writes in it while it runs.
#[derive(Default)]
pub(crate) struct Writer {
    pub(crate) stops: AtomicU32,
    pub(crate) starts: AtomicU32,
    is_over: AtomicBool,
    thread: Mutex<Option<JoinHandle<u64>>>,
    /// Number of writes that it made.
    pub(crate) writes: AtomicU32,
}

impl Writer {
    /// A guest that counts its stops and starts.
    pub(crate) fn guest(machine_type: &str, pages: &[(&str, u64)], seed: u64) -> (Arc<Memory>, Arc<Self>) {
        let writer = Arc::<Self>::default();
        let (stopper, starter) = (Arc::clone(&writer), Arc::clone(&writer));
        let stop = move || {
            stopper.stops.fetch_add(1, Ordering::Relaxed);
            stopper.end();
            Ok(())
        };
        let start = move || {
            starter.starts.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let memory =
            Memory::new(configuration(machine_type), &blocks(pages)).unwrap().with_hooks(stop, start);
        fill(&memory, &mut Rng::with_seed(seed));
        memory.set_device_state(device_state(seed));
        (Arc::new(memory), writer)
    }

    /// Lets it write until it is stopped.
    pub(crate) fn run(&self, memory: &Arc<Memory>, seed: u64, writer: &Arc<Self>) {
        let (memory, writer) = (Arc::clone(memory), Arc::clone(writer));
        let work = move || {
            let mut rng = Rng::with_seed(seed);
            let mut writes = 0;
            while !writer.is_over.load(Ordering::Relaxed) {
                let block = rng.usize(0..memory.blocks().len());
                let length = memory.blocks()[block].length;
                let bytes: Vec<u8> = if rng.bool() {
                    vec![0; rng.usize(1..2 * PAGE)]
                } else {
                    (0..rng.usize(1..300)).map(|_| rng.u8(..)).collect()
                };
                let bytes = &bytes[..bytes.len().min(length as usize)];
                memory.write(at(block, rng.u64(0..=length - bytes.len() as u64)), bytes);
                writes += 1;
                thread::yield_now();
            }
            writes
        };
        *self.thread.lock().unwrap() = Some(thread::spawn(work));
    }

    /// Ends the writing; after it returns nothing writes to the memory.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().unwrap().take() {
            self.writes.store(thread.join().unwrap() as u32, Ordering::Relaxed);
        }
    }

    pub(crate) fn counts(&self) -> (u32, u32) {
        (self.stops.load(Ordering::Relaxed), self.starts.load(Ordering::Relaxed))
    }
}
