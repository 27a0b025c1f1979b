//! The mappings of a process, as the kernel lists them in `/proc/PID/maps` and `/proc/PID/smaps` (proc(5)).
//!
//! A file is named there by the numbers of its device and inode as the kernel keeps them, which on some
//! filesystems (btrfs, overlayfs) are not those of stat(2): they are comparable with each other only. Both
//! files are mapped while they are compared, so neither number can be reused for another file. On btrfs
//! several subvolumes share the device but have separate inode numbers, so the descriptors of the process are
//! compared as well (`process`).

use std::fs;
use std::io;
use std::path::Path;

use super::file_id::FileId;
use super::transfer_reason::TransferReason;

/// Unit of the sizes in `smaps`.
const KIB: u64 = 1024;
/// Fields of `smaps` that count pages which are no longer the file's.
const PRIVATE_FIELDS: [&str; 2] = ["Anonymous", "Swap"];

/// The file to read of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Detail {
    /// The mappings alone.
    Mappings,
    /// The mappings with the private copies in each. It takes time for memory that is in use.
    PrivateCopies,
}

/// Destination of writes to a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapSharing {
    /// The process's own copies of the pages.
    Private,
    /// The file.
    Shared,
}

/// One line of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MapsEntry {
    start: u64,
    end: u64,
    range: FileRange,
}

/// A range of a file that is mapped in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileRange {
    pub(super) file: FileId,
    /// Offset of the range in the file.
    pub(super) offset: u64,
    pub(super) sharing: MapSharing,
    pub(super) is_writable: bool,
    /// Name of the file when it was mapped, for messages.
    pub(super) path: String,
    /// Bytes of the mappings that are private copies; `None`: not listed.
    pub(super) private_bytes: Option<u64>,
}

impl Detail {
    /// Name of the file.
    pub(super) fn file_name(self) -> &'static str {
        match self {
            Self::Mappings => "maps",
            Self::PrivateCopies => "smaps",
        }
    }
}

/// The mappings of a process, given by its directory in `/proc`, by address.
pub(super) fn mappings(process: &Path, detail: Detail) -> io::Result<Vec<MapsEntry>> {
    // Names of files may contain any bytes.
    let bytes = fs::read(process.join(detail.file_name()))?;
    Ok(parse(&String::from_utf8_lossy(&bytes)))
}

/// The range of a file that is mapped at `length` bytes from `address` on.
pub(super) fn range_at(
    mappings: &[MapsEntry],
    address: u64,
    length: u64,
) -> Result<FileRange, TransferReason> {
    let end = address.checked_add(length).ok_or(TransferReason::NotMapped)?;
    let mut found: Option<FileRange> = None;
    let mut at = address;
    while at < end {
        let mapping = mappings.iter().find(|mapping| (mapping.start..mapping.end).contains(&at));
        let mapping = mapping.ok_or(TransferReason::NotMapped)?;
        if mapping.range.file.inode == 0 {
            return Err(TransferReason::Anonymous);
        }
        let offset = mapping.range.offset + (at - mapping.start);
        found = Some(match found {
            None => FileRange { offset, ..mapping.range.clone() },
            Some(before) => {
                before.joined(&mapping.range, offset, at - address).ok_or(TransferReason::NotContiguous)?
            }
        });
        at = mapping.end;
    }
    found.ok_or(TransferReason::NotMapped)
}

/// Returns true if `length` bytes of a file from `offset` on are mapped shared at any address.
pub(super) fn has_shared(mappings: &[MapsEntry], file: FileId, offset: u64, length: u64) -> bool {
    mappings.iter().any(|mapping| {
        let range = &mapping.range;
        range.file == file
            && range.sharing == MapSharing::Shared
            && range.offset <= offset
            && mapping.end - mapping.start >= offset - range.offset + length
    })
}

/// Returns true if a part of `length` bytes of a file from `offset` on is mapped shared.
pub(super) fn overlaps_shared(mappings: &[MapsEntry], file: FileId, offset: u64, length: u64) -> bool {
    mappings.iter().any(|mapping| {
        let range = &mapping.range;
        let is_before = range.offset + (mapping.end - mapping.start) <= offset;
        let is_behind = offset + length <= range.offset;
        range.file == file && range.sharing == MapSharing::Shared && !is_before && !is_behind
    })
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilePart {
    pub(super) file: FileId,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// Parts of files that are mapped shared at `length` bytes from `address` on, with anything in between.
pub(super) fn shared_parts(
    mappings: &[MapsEntry],
    address: u64,
    length: u64,
) -> impl Iterator<Item = FilePart> {
    let behind = address.saturating_add(length);
    mappings.iter().filter(|mapping| mapping.range.sharing == MapSharing::Shared).filter_map(move |mapping| {
        let (start, end) = (mapping.start.max(address), mapping.end.min(behind));
        let offset = mapping.range.offset.saturating_add(start - mapping.start);
        (start < end).then(|| FilePart { file: mapping.range.file, offset, length: end - start })
    })
}

/// Bytes of all private mappings of a file with this inode that are private copies; `None`: not listed for
/// each.
pub(super) fn private_bytes(mappings: &[MapsEntry], inode: u64) -> Option<u64> {
    let ranges = mappings.iter().map(|mapping| &mapping.range);
    let private = ranges.filter(|range| range.file.inode == inode && range.sharing == MapSharing::Private);
    private.map(|range| range.private_bytes).sum()
}

impl FileRange {
    /// Returns this range joined with its next part, which begins at `offset` of its file and `distance`
    /// after the beginning of this one.
    fn joined(self, next: &Self, offset: u64, distance: u64) -> Option<Self> {
        let continues =
            next.file == self.file && next.sharing == self.sharing && offset == self.offset + distance;
        let private = self.private_bytes.zip(next.private_bytes).map(|(one, other)| one + other);
        let is_writable = self.is_writable && next.is_writable;
        continues.then_some(Self { private_bytes: private, is_writable, ..self })
    }
}

/// Reads either list. Lines that are neither a mapping nor a counted field are skipped.
fn parse(text: &str) -> Vec<MapsEntry> {
    let mut mappings: Vec<MapsEntry> = Vec::new();
    for line in text.lines() {
        if let Some(mapping) = parse_mapping(line) {
            mappings.push(mapping);
        } else if let (Some(last), Some(bytes)) = (mappings.last_mut(), parse_private(line)) {
            last.range.private_bytes = Some(last.range.private_bytes.unwrap_or_default() + bytes);
        }
    }
    mappings
}

/// `7f2a00000000-7f2a20000000 rw-p 00100000 fe:00 4711      /images/guest.img`
fn parse_mapping(line: &str) -> Option<MapsEntry> {
    let (addresses, rest) = line.split_once(' ')?;
    let (permissions, rest) = rest.split_once(' ')?;
    let (offset, rest) = rest.split_once(' ')?;
    let (device, rest) = rest.split_once(' ')?;
    let (inode, path) = rest.split_once(' ').unwrap_or((rest, ""));
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let (start, end) = addresses.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let sharing = match permissions.as_bytes().get(3)? {
        b's' => MapSharing::Shared,
        b'p' => MapSharing::Private,
        _ => return None,
    };
    let range = FileRange {
        file: FileId { major: number(major)?, minor: number(minor)?, inode: inode.parse().ok()? },
        offset: hex(offset)?,
        sharing,
        is_writable: permissions.as_bytes().get(1) == Some(&b'w'),
        path: path.trim().to_owned(),
        private_bytes: None,
    };
    Some(MapsEntry { start: hex(start)?, end: hex(end)?, range })
        .filter(|mapping| mapping.start < mapping.end)
}

/// `Anonymous:          128 kB`
fn parse_private(line: &str) -> Option<u64> {
    let (name, rest) = line.split_once(':')?;
    if !PRIVATE_FIELDS.contains(&name) {
        return None;
    }
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(KIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
55d0c0000000-55d0c0001000 r-xp 00000000 fe:00 77                         /usr/bin/qemu-system-x86_64
Size:                  4 kB
Anonymous:             0 kB
7f2a00000000-7f2a00200000 rw-p 00100000 fe:00 4711                       /images/a guest.img
Size:               2048 kB
Anonymous:            12 kB
Swap:                  4 kB
VmFlags: rd wr mr mw me
7f2a00200000-7f2a00400000 rw-p 00300000 fe:00 4711                       /images/a guest.img
Anonymous:             0 kB
7f2a00400000-7f2a00500000 rw-p 00000000 00:00 0 
7f2a00600000-7f2a00700000 rw-s 00000000 00:01 9                          /memfd:memory-backend-memfd (deleted)
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
";

    fn range(address: u64, length: u64) -> Result<FileRange, TransferReason> {
        range_at(&parse(TEXT), address, length)
    }

    #[test]
    fn adjoining_mappings_of_a_file_are_one_range() {
        let found = range(0x7f2a_0000_0000, 4 << 20).unwrap();
        let expected = FileRange {
            file: FileId { major: 0xfe, minor: 0, inode: 4711 },
            offset: 1 << 20,
            sharing: MapSharing::Private,
            is_writable: true,
            path: "/images/a guest.img".into(),
            private_bytes: Some(16 << 10),
        };
        assert_eq!(found, expected);
        assert_eq!(found.file.to_string(), "fe:0 inode 4711");
        assert_eq!(range(0x7f2a_0010_0000, 2 << 20).unwrap().offset, 2 << 20, "from within a mapping");
        let memfd = range(0x7f2a_0060_0000, 1 << 20).unwrap();
        assert_eq!((memfd.sharing, memfd.private_bytes), (MapSharing::Shared, None));
        assert_eq!(memfd.path, "/memfd:memory-backend-memfd (deleted)");
    }

    #[test]
    fn private_copies_are_counted_for_all_mappings_of_a_file() {
        assert_eq!(private_bytes(&parse(TEXT), 4711), Some(16 << 10));
        assert_eq!(private_bytes(&parse(TEXT), 9), Some(0), "a shared mapping has none");
        let unlisted = "1000-2000 rw-p 00000000 fe:00 5 /a\n";
        assert_eq!(private_bytes(&parse(unlisted), 5), None);
    }

    #[test]
    fn shared_parts_are_found_beside_holes() {
        let parts = |address, length| shared_parts(&parse(TEXT), address, length).collect::<Vec<_>>();
        let file = FileId { major: 0, minor: 1, inode: 9 };
        let whole = FilePart { file, offset: 0, length: 1 << 20 };
        assert_eq!(parts(0x7f2a_0000_0000, 1 << 30), [whole]);
        let part = FilePart { file, offset: 8192, length: 4096 };
        assert_eq!(parts(0x7f2a_0060_2000, 4096), [part]);
        assert_eq!(parts(0x7f2a_0000_0000, 4 << 20), [], "private");
        assert_eq!(parts(u64::MAX, 2), []);
    }

    #[test]
    fn other_memory_is_not_a_range() {
        assert_eq!(range(0x7f2a_0000_0000, 5 << 20), Err(TransferReason::Anonymous));
        assert_eq!(range(0x7f2a_0040_0000, 1 << 20), Err(TransferReason::Anonymous));
        assert_eq!(range(0x7f2a_0060_0000, 2 << 20), Err(TransferReason::NotMapped));
        assert_eq!(range(0x7f2a_0050_0000, 1 << 20), Err(TransferReason::NotMapped));
        assert_eq!(range(0x7f2a_0000_0000, 0), Err(TransferReason::NotMapped));
        assert_eq!(range(u64::MAX, 2), Err(TransferReason::NotMapped));
        assert_eq!(range(0, u64::MAX), Err(TransferReason::NotMapped));
    }

    #[test]
    fn parts_out_of_order_are_not_a_range() {
        let swapped = "1000-2000 rw-p 00001000 fe:00 5 /a\n2000-3000 rw-p 00000000 fe:00 5 /a\n";
        assert_eq!(range_at(&parse(swapped), 0x1000, 0x2000), Err(TransferReason::NotContiguous));
        let mixed = "1000-2000 rw-p 00000000 fe:00 5 /a\n2000-3000 rw-s 00001000 fe:00 5 /a\n";
        assert_eq!(range_at(&parse(mixed), 0x1000, 0x2000), Err(TransferReason::NotContiguous));
        let other = "1000-2000 rw-p 00000000 fe:00 5 /a\n2000-3000 rw-p 00001000 fe:00 6 /a\n";
        assert_eq!(range_at(&parse(other), 0x1000, 0x2000), Err(TransferReason::NotContiguous));
    }

    #[test]
    fn shared_memory_is_found_wherever_it_is() {
        let (mappings, file) = (parse(TEXT), FileId { major: 0, minor: 1, inode: 9 });
        assert!(has_shared(&mappings, file, 0, 1 << 20));
        assert!(has_shared(&mappings, file, 4096, (1 << 20) - 4096));
        assert!(!has_shared(&mappings, file, 4096, 1 << 20), "longer than the mapping");
        assert!(overlaps_shared(&mappings, file, 4096, 1 << 20));
        assert!(!overlaps_shared(&mappings, file, 1 << 20, 4096), "behind it");
        let private = FileId { major: 0xfe, minor: 0, inode: 4711 };
        assert!(!overlaps_shared(&mappings, private, 1 << 20, 4096));
        assert!(!has_shared(&mappings, private, 1 << 20, 4096));
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "([0-9a-f]{0,17}-[0-9a-f]{0,17} [rwxps-]{0,5} [0-9a-f]{0,9} [0-9a-f:]{0,5} ?[0-9]{0,3}\n?|.*\n){0,4}",
                          address: u64, length: u64) {
            let _ = range_at(&parse(&text), address, length);
        }
    }
}
