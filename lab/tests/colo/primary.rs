//! A QEMU that is protected: first copy, comparison of memory, end.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_channel::{Address, Cancel, Channel, Listener};
use towline_lab::{LinuxGuest, MemoryBackend, Qemu, Version};
use towline_migration::incoming::{Incoming, Options, gather};
use towline_migration::{Memory, Session, Statistics};
use towline_protocol::colo::FirstCopy;
use towline_protocol::device_state::DeviceState;

use crate::busy::Busy;

pub(crate) const WITHIN: Duration = Duration::from_secs(120);
const MEMORY_MIB: u64 = 256;
pub(crate) const MIB: u64 = 1 << 20;
/// Bytes that the guest writes round and round, and per second.
const WRITTEN: u64 = 16 * MIB;
const RATE: u64 = 24 * MIB;
const PAGE: usize = 4096;

/// A primary whose first copy is in `memory`.
pub(crate) struct Primary {
    pub(crate) qemu: Qemu,
    pub(crate) guest: Option<LinuxGuest>,
    pub(crate) channel: Arc<dyn Channel>,
    pub(crate) memory: Memory,
    /// The file of `memory`.
    copy: File,
    /// Device state of the first copy.
    pub(crate) first_state: DeviceState,
    /// The guest's memory.
    file: File,
    protections: u64,
}

impl Primary {
    /// Boots a Linux that writes, and copies it.
    pub(crate) fn protected() -> (Self, FirstCopy) {
        Self::protected_with(None)
    }

    /// With a card and a disk.
    pub(crate) fn protected_with(mut busy: Option<&mut Busy>) -> (Self, FirstCopy) {
        let backend = MemoryBackend::Memfd { prealloc: false };
        let mut builder =
            Qemu::builder(Version::Newest).linux().memory_mib(MEMORY_MIB).memory_backend(backend);
        if let Some(busy) = &busy {
            builder = busy.added_to(builder);
        }
        let (qemu, mut guest) = builder.boot(WITHIN).unwrap();
        if let Some(busy) = &mut busy {
            busy.begin(&mut guest);
        }
        guest.dirty(RATE, WRITTEN).unwrap();
        guest.wait_ticking(WITHIN).unwrap();
        let capabilities = ["x-colo", "return-path"].map(|name| json!({ "capability": name, "state": true }));
        qemu.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
        let parameters = json!({ "x-checkpoint-delay": 20, "max-bandwidth": 0 });
        qemu.qmp().execute("migrate-set-parameters", parameters).unwrap();
        let file = memory_file(&qemu);
        let (copied, first) = copy(&qemu, 0);
        let Copied { channel, memory, copy, state: first_state } = copied;
        let guest = Some(guest);
        (Self { qemu, guest, channel, memory, copy, first_state, file, protections: 1 }, first)
    }

    /// Copies it again, after its secondary was lost.
    pub(crate) fn protect(&mut self) -> FirstCopy {
        let (copied, first) = copy(&self.qemu, self.protections);
        Copied { channel: self.channel, memory: self.memory, copy: self.copy, state: self.first_state } =
            copied;
        self.protections += 1;
        first
    }

    /// Number of pages of the guest's RAM that differ from the copy.
    pub(crate) fn different_pages(&self) -> u64 {
        let blocks = self.memory.blocks().iter();
        let start: u64 = blocks.take_while(|block| block.name != "pc.ram").map(|block| block.length).sum();
        let (mut here, mut there) = (vec![0; MIB as usize], vec![0; MIB as usize]);
        let mut different = 0;
        for offset in (0..MEMORY_MIB).map(|mib| mib * MIB) {
            self.copy.read_exact_at(&mut here, start + offset).unwrap();
            self.file.read_exact_at(&mut there, offset).unwrap();
            if here != there {
                let pages = here.chunks(PAGE).zip(there.chunks(PAGE));
                different += pages.filter(|(here, there)| here != there).count() as u64;
            }
        }
        different
    }

    pub(crate) fn is_running(&self) -> bool {
        self.qemu.qmp().status().unwrap() == "running"
    }

    pub(crate) fn lost_heartbeat(&self) {
        self.qemu.qmp().execute("x-colo-lost-heartbeat", Value::Null).unwrap();
    }

    /// Ends the protection in order.
    pub(crate) fn end(&self) {
        self.lost_heartbeat();
        self.qemu.qmp().wait_migration("completed", WITHIN).unwrap();
    }

    /// The guest runs, and all that it wrote is as written.
    pub(crate) fn prove_alive(&mut self) {
        self.qemu.qmp().wait_status("running", WITHIN).unwrap();
        let guest = self.guest.as_mut().unwrap();
        guest.wait_ticking(WITHIN).unwrap();
        assert!(guest.check().unwrap() > 0);
    }
}

/// Result of a first copy.
struct Copied {
    channel: Arc<dyn Channel>,
    memory: Memory,
    copy: File,
    state: DeviceState,
}

/// Receives the first copy, and waits until QEMU awaits its secondary.
fn copy(qemu: &Qemu, number: u64) -> (Copied, FirstCopy) {
    let socket = qemu.directory().join(format!("colo-{number}"));
    let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
    qemu.qmp().execute("stop", Value::Null).unwrap();
    qemu.qmp().execute("migrate", json!({ "uri": format!("unix:{}", socket.display()) })).unwrap();
    let cancel = Cancel::new().unwrap();
    let connections = gather(listener, 0, Instant::now() + WITHIN, WITHIN, &cancel).unwrap();
    let length = qemu.ram_blocks().unwrap().iter().map(|block| block.used_length).sum();
    let copy = File::from(rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    copy.set_len(length).unwrap();
    let memory = Memory::adopting_into(copy.try_clone().unwrap().into(), length);
    let session = Arc::new(Session::default());
    let incoming = Incoming::new(session, Arc::new(Statistics::default()), Options::default());
    let first = incoming.run_first_copy(&connections, &memory).unwrap();
    qemu.qmp().wait_migration("colo", WITHIN).unwrap();
    let (channel, state) = (connections.main_channel(), memory.take_device_state().unwrap());
    (Copied { channel, memory, copy, state }, first)
}

/// The memfd of QEMU's memory backend.
fn memory_file(qemu: &Qemu) -> File {
    let descriptors = Path::new("/proc").join(qemu.pid().to_string()).join("fd");
    let is_memory = |path: &std::path::PathBuf| {
        std::fs::read_link(path)
            .is_ok_and(|target| target.to_string_lossy().contains("memfd:memory-backend-memfd"))
    };
    let found = std::fs::read_dir(descriptors).unwrap().map(|entry| entry.unwrap().path()).find(is_memory);
    File::open(found.unwrap()).unwrap()
}

/// Has the guest power off.
pub(crate) fn power_off(mut guest: LinuxGuest) {
    // It ends before it replies, or after.
    let _ = guest.shell("poweroff -f", Duration::from_secs(5));
}
