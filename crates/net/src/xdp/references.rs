//! Descriptors for the bytes of a frame in guest memory. Arithmetic only.

use std::ops::Range;

use crate::statistics::CopyReason;

const SMALL_PAGE_BYTES: u64 = 4096;

/// A part of a frame in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UmemRange {
    /// Offset in the UMEM; `None` if its region is not part of the UMEM.
    pub(super) offset: Option<u64>,
    pub(super) len: u32,
    /// Page size of its region; a page is contiguous in physical memory.
    pub(super) page: u64,
}

/// Page boundaries that a descriptor may cross. The kernel discards other descriptors as invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageCrossing {
    /// All: the kernel copies.
    Any,
    /// Within a huge page, which is contiguous for a network card without an IOMMU.
    WithinHugePages,
    /// None: an IOMMU maps each page of 4 KiB separately.
    None,
}

impl PageCrossing {
    /// Unit of memory that a descriptor in a region with such pages must not leave.
    fn unit(self, page: u64) -> Option<u64> {
        match self {
            Self::Any => Option::None,
            Self::WithinHugePages => Some(page),
            Self::None => Some(SMALL_PAGE_BYTES),
        }
    }
}

/// Limits of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DescriptorLimits {
    /// Maximum number of bytes of a descriptor.
    pub(super) bytes: u32,
    /// Page boundaries that a descriptor may cross.
    pub(super) crossing: PageCrossing,
    /// Bytes before each descriptor that must be in the same page, if it may not cross: room for metadata,
    /// used or not.
    pub(super) headroom: u64,
    /// Maximum number of descriptors of a packet.
    pub(super) descriptors: usize,
}

/// Bytes of the UMEM that a descriptor covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reference {
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl DescriptorLimits {
    /// The limits that remain for a packet with this number of other descriptors.
    pub(super) fn less(self, descriptors: usize) -> Self {
        Self { descriptors: self.descriptors.saturating_sub(descriptors), ..self }
    }
}

/// Appends references to the bytes `range` of a frame that consists of these parts. Returns the reason if the
/// limits do not permit it; `out` is then incomplete.
pub(super) fn references(
    parts: &[UmemRange],
    range: Range<usize>,
    limits: &DescriptorLimits,
    out: &mut Vec<Reference>,
) -> Result<(), CopyReason> {
    let end = out.len() + limits.descriptors;
    let mut parts_used = 0;
    let (mut skip, mut left) = (range.start as u64, range.len() as u64);
    for part in parts {
        let len = u64::from(part.len);
        let skipped = skip.min(len);
        skip -= skipped;
        let mut here = (len - skipped).min(left);
        left -= here;
        if here == 0 {
            continue;
        }
        parts_used += 1;
        let start = part.offset.ok_or(CopyReason::Unregistered)?;
        let mut offset = start + skipped;
        while here > 0 {
            let mut bytes = here.min(limits.bytes.into());
            if let Some(unit) = limits.crossing.unit(part.page) {
                if offset % unit < limits.headroom {
                    return Err(CopyReason::Pages);
                }
                bytes = bytes.min(unit - offset % unit);
            }
            if out.len() == end {
                let too_many_parts = parts_used > limits.descriptors;
                return Err(if too_many_parts { CopyReason::Buffers } else { CopyReason::Pages });
            }
            let len = u32::try_from(bytes).expect("it is at most `limits.bytes`");
            out.push(Reference { offset, len });
            offset += bytes;
            here -= bytes;
        }
    }
    // A range beyond the frame: there is no memory for its end.
    if left == 0 { Ok(()) } else { Err(CopyReason::Unregistered) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part() -> impl Strategy<Value = UmemRange> {
        (0u64..20_000, 1u32..9000, prop_oneof![Just(4096u64), Just(1 << 21)])
            .prop_map(|(offset, len, page)| UmemRange { offset: Some(offset + (1 << 22)), len, page })
    }

    fn limits() -> impl Strategy<Value = DescriptorLimits> {
        let crossing = prop_oneof![
            Just(PageCrossing::Any),
            Just(PageCrossing::WithinHugePages),
            Just(PageCrossing::None)
        ];
        (1u32..=4096, crossing, prop_oneof![Just(0u64), Just(24)], 1usize..40).prop_map(
            |(bytes, crossing, headroom, descriptors)| DescriptorLimits {
                bytes,
                crossing,
                headroom,
                descriptors,
            },
        )
    }

    proptest! {
        /// Exactly the requested bytes, within all limits, or false.
        #[test]
        fn references_cover_the_bytes_within_the_limits(
            parts in prop::collection::vec(part(), 1..6),
            limits in limits(),
            range in (0usize..30_000, 1usize..30_000),
        ) {
            let total: usize = parts.iter().map(|part| part.len as usize).sum();
            let start = range.0 % total;
            let range = start..(start + range.1).min(total);
            let mut out = vec![Reference { offset: 1, len: 1 }];
            if references(&parts, range.clone(), &limits, &mut out).is_ok() {
                let out = &out[1..];
                prop_assert!(out.len() <= limits.descriptors);
                for Reference { offset, len } in out {
                    prop_assert!(*len > 0 && *len <= limits.bytes);
                    let inside = |part: &&UmemRange| {
                        let (start, end) = (part.offset.unwrap(), part.offset.unwrap() + u64::from(part.len));
                        let (first, last) = (offset - limits.headroom, offset + u64::from(*len) - 1);
                        (start..end).contains(offset) && last < end
                            && limits.crossing.unit(part.page).is_none_or(|unit| first / unit == last / unit)
                    };
                    prop_assert!(parts.iter().any(|part| inside(&part)), "{offset} {len}");
                }
                let all = |offset: u64, len: u32| offset..offset + u64::from(len);
                let found: Vec<u64> =
                    out.iter().flat_map(|reference| all(reference.offset, reference.len)).collect();
                let bytes = parts.iter().flat_map(|part| all(part.offset.unwrap(), part.len));
                let expected: Vec<u64> = bytes.skip(range.start).take(range.len()).collect();
                prop_assert_eq!(found, expected);
            } else if limits.crossing == PageCrossing::Any {
                // The number of descriptors is the only other limit.
                let needed: usize = parts.iter().map(|part| (part.len / limits.bytes) as usize + 2).sum();
                prop_assert!(needed > limits.descriptors);
            }
        }
    }

    #[test]
    fn ranges_outside_of_the_umem_are_not_referenced() {
        let limits =
            DescriptorLimits { bytes: 4096, crossing: PageCrossing::Any, headroom: 0, descriptors: 17 };
        let inside = UmemRange { offset: Some(1 << 20), len: 100, page: 4096 };
        let parts = [inside, UmemRange { offset: None, ..inside }, inside];
        let can = |range| references(&parts, range, &limits, &mut Vec::new());
        let outside = Err(CopyReason::Unregistered);
        let expected = [Ok(()), outside, Ok(()), outside];
        assert_eq!([can(0..100), can(50..101), can(200..300), can(200..301)], expected);
    }

    #[test]
    fn parts_and_page_boundaries_need_descriptors() {
        let crossing = PageCrossing::WithinHugePages;
        let limits = DescriptorLimits { bytes: 4096, crossing, headroom: 0, descriptors: 1 };
        let inside = UmemRange { offset: Some(1 << 20), len: 100, page: 4096 };
        let crossing_part = UmemRange { offset: Some((1 << 20) + 4050), ..inside };
        let reason = |parts: &[UmemRange], range, limits| references(parts, range, &limits, &mut Vec::new());
        assert_eq!(reason(&[inside, inside], 0..100, limits), Ok(()));
        assert_eq!(reason(&[inside, inside], 50..150, limits), Err(CopyReason::Buffers));
        assert_eq!(reason(&[crossing_part], 0..46, limits), Ok(()));
        assert_eq!(reason(&[crossing_part], 0..100, limits), Err(CopyReason::Pages));
        // The packet's headers have the only descriptor.
        assert_eq!(reason(&[inside], 50..100, limits.less(1)), Err(CopyReason::Buffers));
        // Within a huge page, unless an IOMMU maps its parts.
        let huge = [UmemRange { page: 1 << 21, ..crossing_part }];
        assert_eq!(reason(&huge, 0..100, limits), Ok(()));
        let scattered = DescriptorLimits { crossing: PageCrossing::None, ..limits };
        assert_eq!(reason(&huge, 0..100, scattered), Err(CopyReason::Pages));
        let headroom = DescriptorLimits { headroom: 24, ..limits };
        assert_eq!(reason(&[inside], 0..100, headroom), Err(CopyReason::Pages));
    }
}
