//! From a frame's pieces in guest memory to descriptors that the kernel takes. Only arithmetic.

use std::ops::Range;

/// A part of a frame, as it lies in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where in the UMEM; `None` if it is not there.
    pub(super) at: Option<u64>,
    pub(super) len: u32,
    /// What is one piece of physical memory begins and ends at multiples of this.
    pub(super) page: u64,
}

/// What a device takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// The most bytes of one descriptor.
    pub(super) bytes: u32,
    /// Whether a descriptor may cross pages.
    pub(super) crosses: bool,
    /// Bytes before each descriptor that must be of its page where it may not cross: room for metadata, used or not.
    pub(super) before: u64,
    /// The most descriptors of one packet.
    pub(super) descriptors: usize,
}

/// A descriptor: where, and how many bytes.
pub(super) type Reference = (u64, u32);

/// Appends descriptors of these bytes of the frame, at most `most`. False if they cannot be had; what was appended then is
/// of no use.
pub(super) fn references(
    pieces: &[Piece],
    range: Range<usize>,
    (limits, most): (&Limits, usize),
    out: &mut Vec<Reference>,
) -> bool {
    let end = out.len() + most;
    let (mut skip, mut left) = (range.start as u64, range.len() as u64);
    for piece in pieces {
        let len = u64::from(piece.len);
        let skipped = skip.min(len);
        skip -= skipped;
        let mut here = (len - skipped).min(left);
        left -= here;
        if here == 0 {
            continue;
        }
        let Some(start) = piece.at else { return false };
        let mut at = start + skipped;
        while here > 0 {
            let mut bytes = here.min(limits.bytes.into());
            if !limits.crosses {
                if at % piece.page < limits.before {
                    return false;
                }
                bytes = bytes.min(piece.page - at % piece.page);
            }
            if out.len() == end {
                return false;
            }
            out.push((at, u32::try_from(bytes).expect("it is at most `limits.bytes`")));
            at += bytes;
            here -= bytes;
        }
    }
    left == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece() -> impl Strategy<Value = Piece> {
        (0u64..20_000, 1u32..9000, prop_oneof![Just(4096u64), Just(1 << 21)])
            .prop_map(|(at, len, page)| Piece { at: Some(at + (1 << 22)), len, page })
    }

    fn limits() -> impl Strategy<Value = Limits> {
        (1u32..=4096, any::<bool>(), prop_oneof![Just(0u64), Just(24)], 1usize..40)
            .prop_map(|(bytes, crosses, before, descriptors)| Limits { bytes, crosses, before, descriptors })
    }

    proptest! {
        /// Byte for byte what was asked for, within all limits, or nothing.
        #[test]
        fn references_are_the_bytes(
            pieces in prop::collection::vec(piece(), 1..6),
            limits in limits(),
            range in (0usize..30_000, 1usize..30_000),
        ) {
            let total: usize = pieces.iter().map(|piece| piece.len as usize).sum();
            let start = range.0 % total;
            let range = start..(start + range.1).min(total);
            let mut out = vec![(1, 1)];
            if references(&pieces, range.clone(), (&limits, limits.descriptors), &mut out) {
                let out = &out[1..];
                prop_assert!(out.len() <= limits.descriptors);
                for (at, len) in out {
                    prop_assert!(*len > 0 && *len <= limits.bytes);
                    let inside = |piece: &&Piece| {
                        let (start, end) = (piece.at.unwrap(), piece.at.unwrap() + u64::from(piece.len));
                        (start..end).contains(at) && at + u64::from(*len) <= end
                            && (limits.crosses || (at - limits.before) / piece.page == (at + u64::from(*len) - 1) / piece.page)
                    };
                    prop_assert!(pieces.iter().any(|piece| inside(&piece)), "{at} {len}");
                }
                let all = |(at, len): (u64, u64)| at..at + len;
                let found: Vec<u64> = out.iter().flat_map(|(at, len)| all((*at, u64::from(*len)))).collect();
                let bytes = pieces.iter().flat_map(|piece| all((piece.at.unwrap(), piece.len.into())));
                let wanted: Vec<u64> = bytes.skip(range.start).take(range.len()).collect();
                prop_assert_eq!(found, wanted);
            } else if limits.crosses {
                // Only for want of descriptors.
                let needed: usize = pieces.iter().map(|piece| (piece.len / limits.bytes) as usize + 2).sum();
                prop_assert!(needed > limits.descriptors);
            }
        }
    }

    #[test]
    fn what_is_not_there_is_not_referred_to() {
        let limits = Limits { bytes: 4096, crosses: true, before: 0, descriptors: 17 };
        let there = Piece { at: Some(1 << 20), len: 100, page: 4096 };
        let pieces = [there, Piece { at: None, ..there }, there];
        let can = |range| references(&pieces, range, (&limits, limits.descriptors), &mut Vec::new());
        assert_eq!([can(0..100), can(50..101), can(200..300), can(200..301)], [true, false, true, false]);
    }
}
