//! Frames in the chains of a receive ring.

use towline_channel::{IOV_MAX, IoBufMut};
use towline_vhost_user::{Batch, Chain, Ring};

use crate::tap::FrameFormat;

/// Offset of `num_buffers` in the virtio header.
const NUM_BUFFERS: usize = 10;

/// Chains of the batch into which a frame is read.
#[derive(Clone, Copy)]
pub(crate) struct Gathered {
    /// Index of the first one.
    pub(crate) first: usize,
    pub(crate) chains: usize,
    /// Sum of their writable bytes.
    pub(crate) bytes: usize,
}

/// Appends the buffers of as many chains, from `first` on, as a frame of the expected length takes.
pub(crate) fn gather_chains<'b>(
    batch: &'b Batch,
    first: usize,
    format: FrameFormat,
    expected: usize,
    bufs: &mut Vec<IoBufMut<'b>>,
) -> Gathered {
    let mut gathered = Gathered { first, chains: 0, bytes: 0 };
    let chains_max = if format.mergeable { batch.len() - first } else { 1 };
    for chain in (first..first + chains_max).map(|index| batch.chain(index)) {
        let enough = gathered.bytes >= expected && gathered.bytes > 0;
        if enough || bufs.len() + chain.writable().len() >= IOV_MAX {
            break;
        }
        bufs.extend(chain.writable());
        gathered.bytes += chain.writable_bytes() as usize;
        gathered.chains += 1;
    }
    gathered
}

/// Writes `bytes` to the chains from `first` on. Returns false, and writes nothing, if they are too short.
pub(crate) fn write_chains(batch: &Batch, first: usize, bytes: &[u8]) -> bool {
    let room: usize = batch.chains().skip(first).map(|chain| chain.writable_bytes() as usize).sum();
    if room < bytes.len() {
        return false;
    }
    let mut done = 0;
    for chain in batch.chains().skip(first) {
        if done == bytes.len() {
            break;
        }
        done += chain.write_at(0, &bytes[done..]);
    }
    true
}

/// Completes the chains from `first` on that a frame of this length fills. Returns their number.
pub(crate) fn complete(
    ring: &mut Ring,
    batch: &Batch,
    first: usize,
    length: usize,
    format: FrameFormat,
) -> usize {
    let (mut left, mut used) = (length, 0);
    while left > 0 {
        left = left.saturating_sub(batch.chain(first + used).writable_bytes() as usize);
        used += 1;
    }
    // Before any chain is completed, which marks its pages in the dirty log: a write after the mark would be
    // lost in a migration.
    if format.header_bytes > NUM_BUFFERS {
        let count = u16::try_from(used).expect("a batch has less than 65536 chains").to_le_bytes();
        batch.chain(first).write_at(NUM_BUFFERS, &count);
    }
    let mut left = length;
    for index in first..first + used {
        let chain: Chain<'_> = batch.chain(index);
        let written = left.min(chain.writable_bytes() as usize);
        left -= written;
        ring.complete(chain, u32::try_from(written).expect("a frame is shorter than 4 GiB"));
    }
    used
}

/// Marks chains that a frame was read into and that return to the ring.
pub(crate) fn mark_written(ring: &mut Ring, batch: &Batch, gathered: Gathered) {
    for chain in batch.chains().skip(gathered.first).take(gathered.chains) {
        ring.mark_written(chain, chain.writable_bytes());
    }
}

/// Clears a list of buffers and keeps its allocation, for buffers of another lifetime.
pub(crate) fn recycled<'b>(mut bufs: Vec<IoBufMut<'_>>) -> Vec<IoBufMut<'b>> {
    bufs.clear();
    bufs.into_iter().map(|_| unreachable!("the list is empty")).collect()
}
