//! Kind of memory of a range: `/proc/self/maps` (proc_pid_maps(5)).

use std::io;
use std::ops::Range;

/// Kind of a range of addresses: the last one of its mappings'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RangeKind {
    /// Private memory that belongs to no file, of small or transparent huge pages.
    Anonymous,
    /// Private memory otherwise: of a file, or hugetlb.
    Private,
    /// All or a part of it is shared.
    Shared,
}

/// The kind of each range.
pub(super) fn kinds(ranges: &[Range<usize>]) -> io::Result<Vec<RangeKind>> {
    let text = std::fs::read_to_string("/proc/self/maps")?;
    let mappings: Vec<_> = text.lines().filter_map(mapping).collect();
    Ok(ranges.iter().map(|range| kind(range, &mappings)).collect())
}

fn kind(range: &Range<usize>, mappings: &[(Range<usize>, RangeKind)]) -> RangeKind {
    let within =
        mappings.iter().filter(|(mapping, _)| mapping.start < range.end && range.start < mapping.end);
    // Registration of an unmapped range fails.
    within.map(|(_, kind)| *kind).max().unwrap_or(RangeKind::Anonymous)
}

/// `7f00-7f80 rw-p 00000000 00:00 0   name`
fn mapping(line: &str) -> Option<(Range<usize>, RangeKind)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let (access, inode) = (words.next()?, words.nth(2)?);
    let kind = match (access.as_bytes().get(3)?, inode) {
        (b's', _) => RangeKind::Shared,
        (_, "0") => RangeKind::Anonymous,
        _ => RangeKind::Private,
    };
    Some((number(start)?..number(end)?, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_the_worst_of_its_mappings() {
        let text = "1000-3000 rw-p 00000000 00:00 0 \n\
                    3000-4000 rw-p 00000000 00:0f 4711       /anon_hugepage (deleted)\n\
                    5000-6000 rw-s 00000000 00:01 2060       /memfd:guest ram (deleted)\n\
                    ffff000000-ffff001000 r-xp 00000000 00:00 0    [vdso]\n";
        let mappings: Vec<_> = text.lines().filter_map(mapping).collect();
        assert_eq!(mappings.len(), 4);
        let cases = [
            (0x1000..0x3000, RangeKind::Anonymous),
            (0x2000..0x3001, RangeKind::Private),
            (0x3000..0x5000, RangeKind::Private),
            (0x1000..0x6000, RangeKind::Shared),
            (0x6000..0x7000, RangeKind::Anonymous),
        ];
        for (range, expected) in cases {
            assert_eq!(kind(&range, &mappings), expected, "{range:x?}");
        }
    }
}
