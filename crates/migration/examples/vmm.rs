//! A small VMM that moves itself into another process while its guest runs: `cargo run --example vmm`.
//!
//! ```text
//!   this process: vCPU threads count, and note each count in memory ──► SourceMemory ──► Outgoing ──┐
//!   the same program, started again: continues to count, in a memory that is right ◄── Memory ◄── Incoming
//! ```
//!
//! A real VMM has KVM's vCPUs (and may track by `tracker::KvmDirtyLog`), devices, and a destination started
//! by another process.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_channel::{Address, Cancel, Listener};
use towline_migration::memory::{BlockBacking, MemoryBlock};
use towline_migration::tracker::WriteProtect;
use towline_migration::{
    Incoming, LiveBlock, Memory, Outgoing, RamMapping, SourceMemory, incoming, outgoing,
};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state;

const BYTES: usize = 64 << 20;
const VCPUS: usize = 2;
const LANES: usize = 2;
const WITHIN: Duration = Duration::from_secs(10);

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// A guest whose vCPUs have one register, their counter.
struct Vm {
    memory: RamMapping,
    counts: [AtomicU64; VCPUS],
    is_paused: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Vm {
    fn new(memory: RamMapping) -> Arc<Self> {
        let (counts, is_paused) = (Default::default(), AtomicBool::new(false));
        Arc::new(Self { memory, counts, is_paused, threads: Mutex::default() })
    }

    fn run(self: &Arc<Self>) -> towline_migration::Result<()> {
        self.is_paused.store(false, Ordering::Relaxed);
        let vcpu = |index: usize| {
            let vm = Arc::clone(self);
            thread::spawn(move || {
                while !vm.is_paused.load(Ordering::Relaxed) {
                    let count = vm.counts[index].load(Ordering::Relaxed) + 1;
                    vm.note(index, count).store(count, Ordering::Relaxed);
                    vm.counts[index].store(count, Ordering::Relaxed);
                    thread::sleep(Duration::from_micros(50));
                }
            })
        };
        self.threads.lock().expect("no thread panics").extend((0..VCPUS).map(vcpu));
        Ok(())
    }

    fn pause(&self) -> towline_migration::Result<()> {
        self.is_paused.store(true, Ordering::Relaxed);
        for thread in self.threads.lock().expect("no thread panics").drain(..) {
            thread.join().expect("a vCPU does not panic");
        }
        Ok(())
    }

    fn counts(&self) -> [u64; VCPUS] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Returns true if memory holds every count that was not overwritten since.
    fn verdict(&self) -> &'static str {
        let is_right = |(index, last): (usize, u64)| {
            let first = last.saturating_sub((BYTES / 4096 / VCPUS) as u64 - 1).max(1);
            (first..=last).all(|count| self.note(index, count).load(Ordering::Relaxed) == count)
        };
        if (0..VCPUS).zip(self.counts()).all(is_right) { "right" } else { "wrong" }
    }

    /// Where a vCPU notes a count: in one of its pages after the other.
    fn note(&self, index: usize, count: u64) -> &AtomicU64 {
        self.memory.span().word((count as usize % (BYTES / 4096 / VCPUS) * VCPUS + index) * 4096)
    }
}

fn configuration() -> Configuration {
    Configuration { machine_type: "example-vmm-1.0".into(), ..Configuration::default() }
}

fn main() -> Result<()> {
    match std::env::args().nth(1) {
        None => source(),
        Some(address) => destination(&address.parse()?),
    }
}

fn source() -> Result<()> {
    let vm = Vm::new(RamMapping::anonymous(BYTES)?);
    vm.run()?;
    let registers = || {
        println!("source: stopped at {:?}", vm.counts());
        let bytes: Vec<u8> = vm.counts().iter().flat_map(|count| count.to_be_bytes()).collect();
        Ok(device_state::encode(&[("cpus", 1, &bytes)]))
    };
    let blocks = [LiveBlock { name: "ram", span: vm.memory.span() }];
    let guest = SourceMemory::new(configuration(), &blocks, WriteProtect::new()?)?
        .with_hooks(|| vm.pause(), || vm.run())
        .with_device_state(registers);
    let address = Address::Unix(std::env::temp_dir().join(format!("vmm-{}.sock", std::process::id())));
    let (listener, cancel) = (Listener::bind(&address)?, Cancel::new()?);
    let mut child = std::process::Command::new(std::env::current_exe()?).arg(address.to_string()).spawn()?;
    let accept = || listener.accept(Instant::now() + WITHIN, &cancel).map(Arc::from);
    let (main, lanes) = (accept()?, (0..LANES).map(|_| accept()).collect::<Result<_, _>>()?);
    let connections = outgoing::Connections { main, lanes, uuid: [0; 16], introduced: false };
    Outgoing::new(Arc::default(), Arc::default(), outgoing::Options::default()).run(&connections, &guest)?;
    println!("source: the guest has arrived");
    if child.wait()?.success() { Ok(()) } else { Err("the destination failed".into()) }
}

fn destination(address: &Address) -> Result<()> {
    let file = memfd_create("vmm", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, BYTES as u64)?;
    let backing = BlockBacking::Shared { file: file.as_fd(), offset: 0 };
    let memory = Memory::new(configuration(), &[MemoryBlock { name: "ram", length: BYTES as u64, backing }])?;
    let (deadline, cancel) = (Instant::now() + WITHIN, Cancel::new()?);
    let connect = || towline_channel::connect(address, deadline, &cancel).map(Arc::from);
    let (main, lanes) = (connect()?, (0..LANES).map(|_| connect()).collect::<Result<Vec<_>, _>>()?);
    let connections = incoming::Connections::connected(main, &lanes, WITHIN)?;
    Incoming::new(Arc::default(), Arc::default(), incoming::Options::default()).run(&connections, &memory)?;
    let state = memory.take_device_state().ok_or("a guest without registers")?;
    let vm = Vm::new(RamMapping::shared(file.as_fd(), 0, BYTES)?);
    for (count, bytes) in vm.counts.iter().zip(state.content(&state.devices()[0]).chunks_exact(8)) {
        count.store(u64::from_be_bytes(bytes.try_into()?), Ordering::Relaxed);
    }
    let arrived = vm.counts();
    println!("destination: continues from {arrived:?}, memory is {}", vm.verdict());
    vm.run()?;
    while vm.counts().iter().zip(arrived).any(|(now, then)| *now < then + 100) {
        thread::yield_now();
    }
    vm.pause()?;
    println!("destination: counted on, memory is {}", vm.verdict());
    Ok(())
}
