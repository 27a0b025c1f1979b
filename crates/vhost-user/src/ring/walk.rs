//! From a head to a chain: each descriptor is copied once and then decided upon, and every loop has an end.

use zerocopy::FromBytes;

use super::batch::{Batch, Shape};
use super::fault::RingFault;
use super::{CHAIN_BYTES_MAX, CHAIN_DESCRIPTORS_MAX, CHAIN_PIECES_MAX, DESCRIPTOR_BYTES};
use crate::memory::Memory;
use crate::message::RawDescriptor;
use crate::sys::Area;

const NEXT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT as u16;
const WRITE: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT as u16;

/// What a chain is looked up in.
pub(super) struct Walk<'a> {
    pub(super) memory: &'a Memory,
    pub(super) table: &'a Area,
    pub(super) size: u16,
    pub(super) indirect: bool,
}

impl Walk<'_> {
    /// Appends the chain of `head`, or leaves the batch as it was.
    pub(super) fn chain(&self, head: u16, batch: &mut Batch) -> Result<(), RingFault> {
        let start = batch.pieces.len();
        let mut shape =
            Shape { head, start, writable: start, end: start, readable_bytes: 0, writable_bytes: 0 };
        match self.table(head, &mut shape, batch) {
            Ok(()) => {
                shape.end = batch.pieces.len();
                batch.chains.push(shape);
                Ok(())
            }
            Err(fault) => {
                batch.pieces.truncate(start);
                Err(fault)
            }
        }
    }

    /// The chain in the ring's own table, whose last link may be an indirect one.
    fn table(&self, head: u16, shape: &mut Shape, batch: &mut Batch) -> Result<(), RingFault> {
        let size = usize::from(self.size);
        let most = size.min(CHAIN_DESCRIPTORS_MAX);
        let mut index = head;
        for _ in 0..most {
            let descriptor = read(self.table, index);
            if descriptor.flags.get() & INDIRECT != 0 {
                return self.indirect(&descriptor, shape, batch);
            }
            self.buffer(&descriptor, shape, batch)?;
            match next(&descriptor, head, size)? {
                Some(next) => index = next,
                None => return Ok(()),
            }
        }
        Err(RingFault::Long { head, most })
    }

    fn indirect(
        &self,
        descriptor: &RawDescriptor,
        shape: &mut Shape,
        batch: &mut Batch,
    ) -> Result<(), RingFault> {
        let head = shape.head;
        let fault = |why| RingFault::Indirect { head, why };
        if !self.indirect {
            return Err(fault("and the feature was not negotiated"));
        }
        if descriptor.flags.get() & NEXT != 0 {
            return Err(fault("and a link behind it"));
        }
        let (guest, len) = (descriptor.address.get(), descriptor.length.get());
        let bytes = len as usize;
        if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(fault("of no whole descriptors"));
        }
        let size = bytes / DESCRIPTOR_BYTES;
        if size > CHAIN_DESCRIPTORS_MAX {
            return Err(RingFault::Long { head, most: CHAIN_DESCRIPTORS_MAX });
        }
        let table = self.memory.guest_area(guest, bytes).ok_or(RingFault::Buffer { head, guest, len })?;
        let mut index = 0;
        for _ in 0..size {
            let descriptor = read(&table, index);
            if descriptor.flags.get() & INDIRECT != 0 {
                return Err(fault("within another"));
            }
            self.buffer(&descriptor, shape, batch)?;
            match next(&descriptor, head, size)? {
                Some(next) => index = next,
                None => return Ok(()),
            }
        }
        Err(RingFault::Long { head, most: size })
    }

    fn buffer(
        &self,
        descriptor: &RawDescriptor,
        shape: &mut Shape,
        batch: &mut Batch,
    ) -> Result<(), RingFault> {
        let head = shape.head;
        let (guest, len) = (descriptor.address.get(), descriptor.length.get());
        if len == 0 {
            return Err(RingFault::Nothing { head });
        }
        let bytes = u64::from(shape.readable_bytes) + u64::from(shape.writable_bytes) + u64::from(len);
        if bytes > u64::from(CHAIN_BYTES_MAX) {
            return Err(RingFault::Bytes { head });
        }
        if !self.memory.pieces(guest, len, &mut batch.pieces) {
            return Err(RingFault::Buffer { head, guest, len });
        }
        let pieces = batch.pieces.len();
        if pieces - shape.start > CHAIN_PIECES_MAX {
            return Err(RingFault::Pieces { head });
        }
        if descriptor.flags.get() & WRITE != 0 {
            shape.writable_bytes += len;
        } else if shape.writable_bytes > 0 {
            return Err(RingFault::Order { head });
        } else {
            shape.readable_bytes += len;
            shape.writable = pieces;
        }
        Ok(())
    }
}

fn read(table: &Area, index: u16) -> RawDescriptor {
    let bytes = table.copy_16(usize::from(index) * DESCRIPTOR_BYTES);
    RawDescriptor::read_from_bytes(&bytes).expect("it has this length")
}

fn next(descriptor: &RawDescriptor, head: u16, size: usize) -> Result<Option<u16>, RingFault> {
    if descriptor.flags.get() & NEXT == 0 {
        return Ok(None);
    }
    let found = descriptor.next.get();
    if usize::from(found) >= size {
        return Err(RingFault::Next { head, found, size });
    }
    Ok(Some(found))
}
