//! What the device has of us: frames, each until the last of its descriptors is back, in any order.
//!
//! A frame has a number, its tag, which travels in the upper 16 bits of its descriptors' addresses: of an unaligned UMEM they
//! are an offset, so `address - tag` with offset `tag` is `address`, and the completion says whose it was. No look-up, and two
//! frames may be sent from the same place.

use super::arena::Chunk;

/// The most frames that are under way: less than a page, so that no address of [`super::arena`] is below its tag.
pub(super) const FRAMES_MAX: u16 = 2048;
const TAG_SHIFT: u32 = 48;
const ADDRESS: u64 = (1 << TAG_SHIFT) - 1;

/// A frame that is under way.
#[derive(Debug)]
struct Frame<H> {
    /// Descriptors that are not back.
    left: u32,
    /// What is the guest's, if anything is.
    head: Option<H>,
    chunks: Vec<Chunk>,
}

/// All of them. `H` is what stands for a guest's chain.
#[derive(Debug)]
pub(super) struct Ledger<H> {
    frames: Vec<Frame<H>>,
    free: Vec<u16>,
    descriptors: u32,
    heads: u32,
}

impl<H> Ledger<H> {
    pub(super) fn new() -> Self {
        let frame = || Frame { left: 0, head: None, chunks: Vec::new() };
        Self {
            frames: std::iter::repeat_with(frame).take(FRAMES_MAX.into()).collect(),
            free: (0..FRAMES_MAX).rev().collect(),
            descriptors: 0,
            heads: 0,
        }
    }

    /// Enters a frame of so many descriptors; its tag. `None` if there are too many.
    pub(super) fn enter(&mut self, descriptors: u32, head: Option<H>, chunks: &[Chunk]) -> Option<u16> {
        debug_assert!(descriptors > 0, "a frame of nothing");
        let tag = self.free.pop()?;
        self.descriptors += descriptors;
        self.heads += u32::from(head.is_some());
        let frame = &mut self.frames[usize::from(tag)];
        (frame.left, frame.head) = (descriptors, head);
        frame.chunks.extend_from_slice(chunks);
        Some(tag)
    }

    /// A descriptor is back. True if it was one of ours; what its frame had is given away with its last.
    pub(super) fn back(&mut self, address: u64, chunk: impl FnMut(Chunk), head: impl FnOnce(H)) -> bool {
        let tag = u16::try_from(address >> TAG_SHIFT).expect("16 bits are left");
        let Some(frame) = self.frames.get_mut(usize::from(tag)).filter(|frame| frame.left > 0) else {
            return false;
        };
        frame.left -= 1;
        self.descriptors -= 1;
        if frame.left == 0 {
            self.free.push(tag);
            frame.chunks.drain(..).for_each(chunk);
            if let Some(mine) = frame.head.take() {
                self.heads -= 1;
                head(mine);
            }
        }
        true
    }

    /// Gives up all: the device has nothing of them any more.
    pub(super) fn abandon(self) -> impl Iterator<Item = H> {
        self.frames.into_iter().filter_map(|frame| frame.head)
    }

    /// Whether another frame can be entered.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Descriptors that are not back.
    pub(super) fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// Chains of the guest's that are not back.
    pub(super) fn heads(&self) -> u32 {
        self.heads
    }
}

/// An address with its frame's tag.
pub(super) fn tagged(address: u64, tag: u16) -> u64 {
    debug_assert!(address >= u64::from(tag) && address <= ADDRESS, "{address:#x} is no place of a frame");
    (address - u64::from(tag)) | u64::from(tag) << TAG_SHIFT
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Frames of several descriptors, some from the same place, come back in any order.
    #[test]
    fn each_comes_back_with_its_own_last_descriptor() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut ledger = Ledger::new();
        let (mut away, mut left, mut next) = (Vec::new(), HashMap::new(), 0u32);
        for step in 0..20_000 {
            if step < 15_000 && random.bool() {
                let count = random.u32(1..6);
                let Some(tag) = ledger.enter(count, Some(next), &[]) else { continue };
                let place = 8192 + random.u64(..4);
                away.extend((0..count).map(|_| (tagged(place, tag), next, place)));
                left.insert(next, count);
                next += 1;
            } else if !away.is_empty() {
                let (address, mine, place) = away.swap_remove(random.usize(..away.len()));
                assert_eq!((address & ADDRESS) + (address >> TAG_SHIFT), place);
                let mut back = None;
                assert!(ledger.back(address, |_| {}, |head| back = Some(head)));
                let count = left.get_mut(&mine).unwrap();
                *count -= 1;
                assert_eq!(back, (*count == 0).then_some(mine));
                if *count == 0 {
                    left.remove(&mine);
                }
            }
            assert_eq!((ledger.heads() as usize, ledger.descriptors() as usize), (left.len(), away.len()));
        }
        let mut rest: Vec<u32> = ledger.abandon().collect();
        rest.sort_unstable();
        let mut wanted: Vec<u32> = left.into_keys().collect();
        wanted.sort_unstable();
        assert_eq!(rest, wanted);
    }

    #[test]
    fn what_was_never_sent_does_not_come_back() {
        let mut ledger = Ledger::new();
        let tag = ledger.enter(1, Some(()), &[]).unwrap();
        assert!(!ledger.back(tagged(9000, tag + 1), |_| {}, |()| panic!("another's")));
        assert!(!ledger.back(u64::MAX, |_| {}, |()| panic!("nobody's")));
        assert!(ledger.back(tagged(9000, tag), |_| {}, |()| {}));
        assert!(!ledger.back(tagged(9000, tag), |_| {}, |()| panic!("twice")));
    }
}
