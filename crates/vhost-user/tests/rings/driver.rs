//! A driver for tests: the other side of a ring, in a file that both share.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_vhost_user::log::LogSwitch;
use towline_vhost_user::message::{RegionInfo, VringAddress};
use towline_vhost_user::{GuestMemory, Region, Ring, RingFault, RingSetup, features};

/// Guest address and user address of the memory.
pub(crate) const GUEST: u64 = 0x10_0000;
pub(crate) const USER: u64 = 0x7f00_0000_0000;
pub(crate) const MEMORY_BYTES: u64 = 0x8_0000;
pub(crate) const TABLE: u64 = 0;
pub(crate) const AVAILABLE: u64 = 0x4000;
pub(crate) const USED: u64 = 0x8000;
/// Offset of the indirect tables, one for each head.
const TABLES: u64 = 0x1_0000;
const TABLE_BYTES: u64 = 0x400;
/// Offset of the buffers, one for each descriptor.
const BUFFERS: u64 = 0x4_0000;
pub(crate) const BUFFER_BYTES: u64 = 0x400;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// A descriptor (`struct virtq_desc`).
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    pub(crate) fn new(address: u64, len: u32, flags: u16, next: u16) -> Self {
        Self { address, len, flags, next }
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        let Self { address, len, flags, next } = self;
        [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    }
}

/// The driver's state and its memory.
pub(crate) struct Driver {
    pub(crate) file: File,
    pub(crate) size: u16,
    /// Descriptors that are not in a chain.
    free: Vec<u16>,
    /// By head: the descriptors of its chain.
    chains: Vec<Vec<u16>>,
    pub(crate) available: u16,
    pub(crate) used: u16,
    /// Number of heads that were returned without being in flight.
    pub(crate) unexpected_heads: usize,
}

impl Driver {
    pub(crate) fn new(size: u16) -> Self {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, MEMORY_BYTES).unwrap();
        let free = (0..size).rev().collect();
        let chains = vec![Vec::new(); usize::from(size)];
        Self { file: fd.into(), size, free, chains, available: 0, used: 0, unexpected_heads: 0 }
    }

    pub(crate) fn memory(&self) -> Arc<GuestMemory> {
        let fd: OwnedFd = self.file.as_fd().try_clone_to_owned().unwrap();
        let info =
            RegionInfo { guest_address: GUEST, size: MEMORY_BYTES, user_address: USER, mmap_offset: 0 };
        Arc::new(GuestMemory::new(vec![Region::map(&info, fd).unwrap()]).unwrap())
    }

    pub(crate) fn setup(&self, features: u64) -> RingSetup {
        let address = VringAddress {
            index: 0,
            flags: 0,
            descriptors: USER + TABLE,
            used: USER + USED,
            available: USER + AVAILABLE,
            log: GUEST + USED,
        };
        let size = self.size.into();
        RingSetup { size, address, base: 0, features, call: None, switch: LogSwitch::default(), log: None }
    }

    pub(crate) fn ring(&self, features: u64) -> Result<Ring, RingFault> {
        Ring::new(self.setup(features), self.memory(), 1)
    }

    pub(crate) fn put(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    pub(crate) fn get<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    pub(crate) fn word(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.get(offset))
    }

    /// Writes a descriptor of a table.
    pub(crate) fn write_descriptor(&self, table: u64, index: u16, descriptor: Descriptor) {
        self.put(table + 16 * u64::from(index), &descriptor.bytes());
    }

    /// Makes a head available.
    pub(crate) fn make_available(&mut self, head: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.available % self.size), &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.put(AVAILABLE + 2, &self.available.to_le_bytes());
    }

    /// Offset of a descriptor's buffer.
    pub(crate) fn buffer(index: u16) -> u64 {
        BUFFERS + u64::from(index) * BUFFER_BYTES
    }

    /// Makes a chain of buffers available, each with its length and true if it is writable. `None` if there
    /// are not enough free descriptors.
    pub(crate) fn add(&mut self, buffers: &[(u32, bool)], indirect: bool) -> Option<u16> {
        let head = self.write_chain(buffers, indirect)?;
        self.make_available(head);
        Some(head)
    }

    /// As [`Self::add`], of a chain that is not available yet.
    pub(crate) fn write_chain(&mut self, buffers: &[(u32, bool)], indirect: bool) -> Option<u16> {
        let wanted = if indirect { 1 } else { buffers.len() };
        if self.free.len() < wanted {
            return None;
        }
        let indices = self.free.split_off(self.free.len() - wanted);
        let head = indices[0];
        let last = buffers.len() - 1;
        for (at, (len, writable)) in buffers.iter().enumerate() {
            let (here, link) = if indirect {
                (u16::try_from(at).unwrap(), u16::try_from(at + 1).unwrap())
            } else {
                (indices[at], indices.get(at + 1).copied().unwrap_or(0))
            };
            // An indirect table, which may have more descriptors than the ring, has parts of one buffer.
            let buffer = if indirect { Self::buffer(head) + 64 * at as u64 } else { Self::buffer(here) };
            let flags = if *writable { WRITE } else { 0 } | if at < last { NEXT } else { 0 };
            let table = if indirect { TABLES + u64::from(head) * TABLE_BYTES } else { TABLE };
            self.write_descriptor(table, here, Descriptor::new(GUEST + buffer, *len, flags, link));
        }
        if indirect {
            let bytes = 16 * u32::try_from(buffers.len()).unwrap();
            let table = GUEST + TABLES + u64::from(head) * TABLE_BYTES;
            self.write_descriptor(TABLE, head, Descriptor::new(table, bytes, INDIRECT, 0));
        }
        self.chains[usize::from(head)] = indices;
        Some(head)
    }

    /// Pops a used entry: head and length.
    pub(crate) fn pop_used(&mut self) -> Option<(u16, u32)> {
        if self.word(USED + 2) == self.used {
            return None;
        }
        let entry: [u8; 8] = self.get(USED + 4 + 8 * u64::from(self.used % self.size));
        let (head, len) = entry.split_at(4);
        let head = u16::try_from(u32::from_le_bytes(head.try_into().unwrap())).unwrap();
        self.used = self.used.wrapping_add(1);
        self.unexpected_heads += usize::from(self.chains[usize::from(head)].is_empty());
        self.free.append(&mut self.chains[usize::from(head)]);
        Some((head, u32::from_le_bytes(len.try_into().unwrap())))
    }

    /// Number of heads that the device has.
    pub(crate) fn heads_in_flight(&self) -> usize {
        self.chains.iter().filter(|chain| !chain.is_empty()).count()
    }

    /// Requests a notification from this used entry on (`used_event`).
    pub(crate) fn set_used_event(&self, from: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.size), &from.to_le_bytes());
    }

    /// Returns true if the device wants a kick after the available index moved from `old`.
    pub(crate) fn must_kick(&self, old: u16, features: u64) -> bool {
        if features & features::EVENT_IDX == 0 {
            return self.word(USED) & 1 == 0;
        }
        let event = self.word(USED + 4 + 8 * u64::from(self.size));
        self.available.wrapping_sub(event).wrapping_sub(1) < self.available.wrapping_sub(old)
    }
}
