//! Follows the descriptors of a chain. Each descriptor is copied once and then validated, and every loop is
//! bounded.

use zerocopy::FromBytes;

use super::batch::{Batch, ChainLayout};
use super::fault::RingFault;
use super::{CHAIN_BYTES_MAX, CHAIN_DESCRIPTORS_MAX, CHAIN_SEGMENTS_MAX, DESCRIPTOR_BYTES};
use crate::memory::GuestMemory;
use crate::message::RawDescriptor;
use crate::sys::Area;

const NEXT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT as u16;
const WRITE: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT as u16;

/// Descriptor table and memory of a ring.
pub(super) struct ChainWalker<'a> {
    pub(super) memory: &'a GuestMemory,
    pub(super) table: &'a Area,
    pub(super) size: u16,
    pub(super) indirect: bool,
}

impl ChainWalker<'_> {
    /// Appends the chain of `head` to the batch, or leaves the batch unchanged.
    pub(super) fn append(&self, head: u16, batch: &mut Batch) -> Result<(), RingFault> {
        let start = batch.segments.len();
        let mut layout = ChainLayout {
            head,
            start,
            writable_start: start,
            end: start,
            readable_bytes: 0,
            writable_bytes: 0,
        };
        match self.walk_table(head, &mut layout, batch) {
            Ok(()) => {
                layout.end = batch.segments.len();
                batch.chains.push(layout);
                Ok(())
            }
            Err(fault) => {
                batch.segments.truncate(start);
                Err(fault)
            }
        }
    }

    /// Follows the chain in the ring's own table, whose last descriptor may be an indirect one.
    fn walk_table(&self, head: u16, layout: &mut ChainLayout, batch: &mut Batch) -> Result<(), RingFault> {
        let size = usize::from(self.size);
        let most = size.min(CHAIN_DESCRIPTORS_MAX);
        let mut index = head;
        for _ in 0..most {
            let descriptor = read_descriptor(self.table, index);
            if descriptor.flags.get() & INDIRECT != 0 {
                return self.walk_indirect(&descriptor, layout, batch);
            }
            self.append_buffer(&descriptor, layout, batch)?;
            match next_index(&descriptor, head, size)? {
                Some(next) => index = next,
                None => return Ok(()),
            }
        }
        Err(RingFault::TooManyDescriptors { head, most })
    }

    fn walk_indirect(
        &self,
        descriptor: &RawDescriptor,
        layout: &mut ChainLayout,
        batch: &mut Batch,
    ) -> Result<(), RingFault> {
        let head = layout.head;
        let fault = |why| RingFault::Indirect { head, why };
        if !self.indirect {
            return Err(fault("although the feature was not negotiated"));
        }
        if descriptor.flags.get() & NEXT != 0 {
            return Err(fault("with a next descriptor"));
        }
        let (guest, len) = (descriptor.address.get(), descriptor.length.get());
        let bytes = len as usize;
        if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(fault("that ends within a descriptor"));
        }
        let size = bytes / DESCRIPTOR_BYTES;
        if size > CHAIN_DESCRIPTORS_MAX {
            return Err(RingFault::TooManyDescriptors { head, most: CHAIN_DESCRIPTORS_MAX });
        }
        let table = self.memory.guest_area(guest, bytes).ok_or(RingFault::Buffer { head, guest, len })?;
        let mut index = 0;
        for _ in 0..size {
            let descriptor = read_descriptor(&table, index);
            if descriptor.flags.get() & INDIRECT != 0 {
                return Err(fault("within another one"));
            }
            self.append_buffer(&descriptor, layout, batch)?;
            match next_index(&descriptor, head, size)? {
                Some(next) => index = next,
                None => return Ok(()),
            }
        }
        Err(RingFault::TooManyDescriptors { head, most: size })
    }

    fn append_buffer(
        &self,
        descriptor: &RawDescriptor,
        layout: &mut ChainLayout,
        batch: &mut Batch,
    ) -> Result<(), RingFault> {
        let head = layout.head;
        let (guest, len) = (descriptor.address.get(), descriptor.length.get());
        if len == 0 {
            return Err(RingFault::EmptyDescriptor { head });
        }
        let bytes = u64::from(layout.readable_bytes) + u64::from(layout.writable_bytes) + u64::from(len);
        if bytes > u64::from(CHAIN_BYTES_MAX) {
            return Err(RingFault::TooManyBytes { head });
        }
        if !self.memory.append_segments(guest, len, &mut batch.segments) {
            return Err(RingFault::Buffer { head, guest, len });
        }
        let segments = batch.segments.len();
        if segments - layout.start > CHAIN_SEGMENTS_MAX {
            return Err(RingFault::TooManySegments { head });
        }
        if descriptor.flags.get() & WRITE != 0 {
            layout.writable_bytes += len;
        } else if layout.writable_bytes > 0 {
            return Err(RingFault::DescriptorOrder { head });
        } else {
            layout.readable_bytes += len;
            layout.writable_start = segments;
        }
        Ok(())
    }
}

fn read_descriptor(table: &Area, index: u16) -> RawDescriptor {
    let bytes = table.copy_16(usize::from(index) * DESCRIPTOR_BYTES);
    RawDescriptor::read_from_bytes(&bytes).expect("16 bytes are a descriptor")
}

/// Index of the next descriptor; `None` at the end of the chain.
fn next_index(descriptor: &RawDescriptor, head: u16, size: usize) -> Result<Option<u16>, RingFault> {
    if descriptor.flags.get() & NEXT == 0 {
        return Ok(None);
    }
    let found = descriptor.next.get();
    if usize::from(found) >= size {
        return Err(RingFault::Next { head, found, size });
    }
    Ok(Some(found))
}
