//! Frames in flight: each stays here until its last descriptor is complete, in any order.
//!
//! The index of a frame is its tag, in the upper 16 bits of its descriptors' addresses. In a UMEM with
//! unaligned chunks they are an offset, so `address - tag` with the offset `tag` is `address`, and the
//! completion contains the tag. It needs no look-up, and two frames may be sent from the same address.

use super::arena::UmemChunk;

/// Maximum number of frames in flight: less than a page, so no address of [`super::arena`] is below its tag.
pub(super) const FRAMES_MAX: u16 = 2048;
const TAG_SHIFT: u32 = 48;
const ADDRESS: u64 = (1 << TAG_SHIFT) - 1;

/// A frame in flight.
#[derive(Debug)]
struct Frame<H> {
    /// Descriptors that are not complete.
    descriptors: u32,
    /// The guest's chain, if descriptors refer to it.
    head: Option<H>,
    chunks: Vec<UmemChunk>,
}

/// All frames in flight. `H` identifies a guest's chain.
#[derive(Debug)]
pub(super) struct InFlightFrames<H> {
    frames: Vec<Frame<H>>,
    free: Vec<u16>,
    /// Number of descriptors in flight.
    pub(super) descriptors: u32,
    /// Number of the guest's chains in flight.
    pub(super) heads: u32,
}

impl<H> InFlightFrames<H> {
    pub(super) fn new() -> Self {
        let frame = || Frame { descriptors: 0, head: None, chunks: Vec::new() };
        Self {
            frames: std::iter::repeat_with(frame).take(FRAMES_MAX.into()).collect(),
            free: (0..FRAMES_MAX).rev().collect(),
            descriptors: 0,
            heads: 0,
        }
    }

    /// Inserts a frame and returns its tag; `None` if [`FRAMES_MAX`] frames are in flight.
    pub(super) fn insert(&mut self, descriptors: u32, head: Option<H>, chunks: &[UmemChunk]) -> Option<u16> {
        debug_assert!(descriptors > 0, "a frame without descriptors");
        let tag = self.free.pop()?;
        self.descriptors += descriptors;
        self.heads += u32::from(head.is_some());
        let frame = &mut self.frames[usize::from(tag)];
        (frame.descriptors, frame.head) = (descriptors, head);
        frame.chunks.extend_from_slice(chunks);
        Some(tag)
    }

    /// Removes a completed descriptor. With the last one of its frame, `free` gets its chunks and `complete`
    /// its chain. Returns false if no such descriptor is in flight.
    pub(super) fn remove(
        &mut self,
        address: u64,
        free: impl FnMut(UmemChunk),
        complete: impl FnOnce(H),
    ) -> bool {
        let tag = u16::try_from(address >> TAG_SHIFT).expect("16 bits remain");
        let Some(frame) = self.frames.get_mut(usize::from(tag)).filter(|frame| frame.descriptors > 0) else {
            return false;
        };
        frame.descriptors -= 1;
        self.descriptors -= 1;
        if frame.descriptors == 0 {
            self.free.push(tag);
            frame.chunks.drain(..).for_each(free);
            if let Some(head) = frame.head.take() {
                self.heads -= 1;
                complete(head);
            }
        }
        true
    }

    /// Returns the chains that are still in flight.
    pub(super) fn into_heads(self) -> impl Iterator<Item = H> {
        self.frames.into_iter().filter_map(|frame| frame.head)
    }

    /// Returns true if another frame can be inserted.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }
}

/// An address with its frame's tag.
pub(super) fn tagged(address: u64, tag: u16) -> u64 {
    debug_assert!(
        address >= u64::from(tag) && address <= ADDRESS,
        "{address:#x} is not an address of a frame"
    );
    (address - u64::from(tag)) | u64::from(tag) << TAG_SHIFT
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Frames of several descriptors, some from the same address, are completed in any order.
    #[test]
    fn a_chain_is_completed_with_its_last_descriptor() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut frames = InFlightFrames::new();
        let (mut sent, mut left, mut next) = (Vec::new(), HashMap::new(), 0u32);
        for step in 0..20_000 {
            if step < 15_000 && random.bool() {
                let count = random.u32(1..6);
                let Some(tag) = frames.insert(count, Some(next), &[]) else { continue };
                let from = 8192 + random.u64(..4);
                sent.extend((0..count).map(|_| (tagged(from, tag), next, from)));
                left.insert(next, count);
                next += 1;
            } else if !sent.is_empty() {
                let (address, chain, from) = sent.swap_remove(random.usize(..sent.len()));
                assert_eq!((address & ADDRESS) + (address >> TAG_SHIFT), from);
                let mut completed = None;
                assert!(frames.remove(address, |_| {}, |head| completed = Some(head)));
                let count = left.get_mut(&chain).unwrap();
                *count -= 1;
                assert_eq!(completed, (*count == 0).then_some(chain));
                if *count == 0 {
                    left.remove(&chain);
                }
            }
            assert_eq!((frames.heads as usize, frames.descriptors as usize), (left.len(), sent.len()));
        }
        let mut rest: Vec<u32> = frames.into_heads().collect();
        rest.sort_unstable();
        let mut expected: Vec<u32> = left.into_keys().collect();
        expected.sort_unstable();
        assert_eq!(rest, expected);
    }

    #[test]
    fn unknown_completions_are_reported() {
        let mut frames = InFlightFrames::new();
        let tag = frames.insert(1, Some(()), &[]).unwrap();
        assert!(!frames.remove(tagged(9000, tag + 1), |_| {}, |()| panic!("the tag is not in use")));
        assert!(!frames.remove(u64::MAX, |_| {}, |()| panic!("the tag is out of range")));
        assert!(frames.remove(tagged(9000, tag), |_| {}, |()| {}));
        assert!(!frames.remove(tagged(9000, tag), |_| {}, |()| panic!("it was removed before")));
    }
}
