//! The guest's memory, as the frontend shares it, and its two kinds of addresses.
//!
//! ```text
//!   guest address (descriptors, the log)  ─┐
//!   user address (the frontend's: rings)  ─┴─► region, offset ─► IoBuf / IoBufMut, never a slice
//! ```
//! A [`GuestMemory`] is immutable. A new table is a new `GuestMemory` that shares the unchanged regions. The
//! rings use it from the next batch on, and the former one is unmapped with its last reference.
//!
//! Limits: [`REGIONS_MAX`] regions, [`GUEST_BYTES_MAX`] bytes. A file that the frontend truncates after it
//! was mapped ends the session of that frontend only: an access past its end reads zeros, and the connection
//! is closed ([ADR 11](../../../docs/adr/0011-a-sigbus-ends-one-session.md)).

mod error;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use towline_channel::{IoBuf, IoBufMut};

pub use error::{GUEST_BYTES_MAX, MemoryTableError, REGIONS_MAX};

use crate::message::RegionInfo;
use crate::sys::{Area, Mapping};

/// A mapped region of guest memory.
#[derive(Debug, Clone)]
pub struct Region {
    guest: u64,
    user: u64,
    size: u64,
    mapping: Arc<Mapping>,
}

/// The guest's memory at one time.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// Ordered by guest address.
    regions: Vec<Region>,
}

/// A part of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRange {
    /// Index in [`GuestMemory::regions`].
    pub region: u16,
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl GuestRange {
    /// The range without its first `len` bytes.
    pub(crate) fn skip(&self, len: usize) -> Self {
        let skipped = u32::try_from(len).expect("a range is shorter than 4 GiB");
        Self { len: self.len - skipped, offset: self.offset + u64::from(skipped), ..*self }
    }
}

impl Region {
    /// Maps a region.
    ///
    /// # Errors
    /// [`MemoryTableError::Empty`], [`MemoryTableError::Wraps`], [`MemoryTableError::TooLarge`],
    /// [`MemoryTableError::File`], [`MemoryTableError::Map`].
    pub fn map(info: &RegionInfo, fd: OwnedFd) -> Result<Self, MemoryTableError> {
        let (guest, user, size) = (info.guest_address, info.user_address, info.size);
        if size == 0 {
            return Err(MemoryTableError::Empty { guest });
        }
        if guest.checked_add(size).is_none() || user.checked_add(size).is_none() {
            return Err(MemoryTableError::Wraps { guest, user, size });
        }
        let mapping = Mapping::guarded(fd, info.mmap_offset, size)?;
        Ok(Self { guest, user, size, mapping: Arc::new(mapping) })
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// File of the region, and its offset there, to map it in another way.
    pub fn file(&self) -> (&File, u64) {
        self.mapping.file()
    }

    /// Returns true if the region has these addresses and this size, which identify it.
    fn matches(&self, info: &RegionInfo) -> bool {
        (self.guest, self.user, self.size) == (info.guest_address, info.user_address, info.size)
    }
}

impl GuestMemory {
    /// Memory of these regions.
    ///
    /// # Errors
    /// [`MemoryTableError::TooMany`], [`MemoryTableError::TooMuch`], [`MemoryTableError::Overlap`].
    pub fn new(mut regions: Vec<Region>) -> Result<Self, MemoryTableError> {
        check_size(regions.iter().map(|region| region.size))?;
        if regions.len() > REGIONS_MAX {
            return Err(MemoryTableError::TooMany { found: regions.len() });
        }
        regions.sort_by_key(|region| region.guest);
        for pair in regions.windows(2) {
            if pair[0].guest + pair[0].size > pair[1].guest {
                return Err(MemoryTableError::Overlap { one: pair[0].guest, other: pair[1].guest });
            }
        }
        Ok(Self { regions })
    }

    /// Maps a table.
    pub(crate) fn map(table: Vec<(RegionInfo, OwnedFd)>) -> Result<Self, MemoryTableError> {
        check_size(table.iter().map(|(info, _)| info.size))?;
        let regions = table.into_iter().map(|(info, fd)| Region::map(&info, fd));
        Self::new(regions.collect::<Result<_, _>>()?)
    }

    /// Returns this memory with another region, which is mapped here.
    pub(crate) fn with_mapped(&self, info: &RegionInfo, fd: OwnedFd) -> Result<Self, MemoryTableError> {
        check_size(self.regions.iter().map(|region| region.size).chain([info.size]))?;
        Self::new(self.regions.iter().cloned().chain([Region::map(info, fd)?]).collect())
    }

    /// Returns this memory without a region.
    ///
    /// # Errors
    /// [`MemoryTableError::Absent`].
    pub fn without(&self, info: &RegionInfo) -> Result<Self, MemoryTableError> {
        let (guest, size) = (info.guest_address, info.size);
        let index = self.regions.iter().position(|region| region.matches(info));
        let index = index.ok_or(MemoryTableError::Absent { guest, size })?;
        let mut regions = self.regions.clone();
        regions.remove(index);
        Ok(Self { regions })
    }

    /// The regions, ordered by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns true if it has this region.
    pub(crate) fn has(&self, info: &RegionInfo) -> bool {
        self.regions.iter().any(|region| region.matches(info))
    }

    /// Total size in bytes.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|region| region.size).sum()
    }

    /// Address in this process of a guest address.
    pub(crate) fn backend_address(&self, guest: u64) -> Option<u64> {
        let region = &self.regions[self.region_at(guest)?];
        Some(region.mapping.span().0.addr() as u64 + (guest - region.guest))
    }

    /// Returns true if a region was replaced by zeros after a fault.
    pub(crate) fn is_lost(&self) -> bool {
        self.mappings().any(Mapping::is_lost)
    }

    /// The mappings of the regions.
    pub(crate) fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        self.regions.iter().map(|region| &*region.mapping)
    }

    /// `len` bytes at a user address, in one region.
    pub(crate) fn user_area(&self, user: u64, len: usize, align: usize) -> Option<Area> {
        let region = self.regions.iter().find(|region| user.wrapping_sub(region.user) < region.size)?;
        Area::new(&region.mapping, user - region.user, len, align)
    }

    /// `len` bytes at a guest address, in one region.
    pub(crate) fn guest_area(&self, guest: u64, len: usize) -> Option<Area> {
        let region = &self.regions[self.region_at(guest)?];
        Area::new(&region.mapping, guest - region.guest, len, 1)
    }

    /// Appends the segments of `len` bytes at a guest address, several if they cross adjacent regions.
    /// Returns false if a byte is outside all regions.
    pub(crate) fn append_segments(&self, guest: u64, len: u32, segments: &mut Vec<GuestRange>) -> bool {
        let (mut guest, mut left) = (guest, u64::from(len));
        while left > 0 {
            let Some(index) = self.region_at(guest) else { return false };
            let region = &self.regions[index];
            let offset = guest - region.guest;
            let here = left.min(region.size - offset);
            let index = u16::try_from(index).expect("at most REGIONS_MAX");
            let len = u32::try_from(here).expect("at most `len`");
            segments.push(GuestRange { region: index, len, offset });
            left -= here;
            match guest.checked_add(here) {
                Some(next) => guest = next,
                None => return left == 0,
            }
        }
        true
    }

    pub(crate) fn guest_address(&self, segment: &GuestRange) -> u64 {
        self.regions[usize::from(segment.region)].guest + segment.offset
    }

    pub(crate) fn io_buf(&self, segment: &GuestRange) -> IoBuf<'_> {
        let (mapping, offset) = self.locate(segment);
        mapping.io_buf(offset, segment.len as usize)
    }

    pub(crate) fn io_buf_mut(&self, segment: &GuestRange) -> IoBufMut<'_> {
        let (mapping, offset) = self.locate(segment);
        mapping.io_buf_mut(offset, segment.len as usize)
    }

    fn locate(&self, segment: &GuestRange) -> (&Mapping, usize) {
        let offset = usize::try_from(segment.offset).expect("a mapping is shorter than isize::MAX");
        (&self.regions[usize::from(segment.region)].mapping, offset)
    }

    fn region_at(&self, guest: u64) -> Option<usize> {
        let behind = self.regions.partition_point(|region| region.guest <= guest);
        let index = behind.checked_sub(1)?;
        (guest - self.regions[index].guest < self.regions[index].size).then_some(index)
    }
}

/// Compares the sum of the sizes with [`GUEST_BYTES_MAX`], before anything is mapped.
fn check_size(sizes: impl Iterator<Item = u64>) -> Result<(), MemoryTableError> {
    let found = sizes.fold(0, u64::saturating_add);
    if found > GUEST_BYTES_MAX { Err(MemoryTableError::TooMuch { found }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use towline_channel::{gather, scatter};

    use super::*;

    fn info(guest: u64, user: u64, size: u64, mmap_offset: u64) -> RegionInfo {
        RegionInfo { guest_address: guest, size, user_address: user, mmap_offset }
    }

    fn file(size: u64) -> OwnedFd {
        let fd = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, size).unwrap();
        fd
    }

    fn region(guest: u64, user: u64, size: u64) -> Region {
        Region::map(&info(guest, user, size, 0), file(size)).unwrap()
    }

    #[test]
    fn a_buffer_across_regions_has_several_segments() {
        let memory =
            GuestMemory::new(vec![region(0x3000, 0, 0x1000), region(0x1000, 0x9000, 0x2000)]).unwrap();
        let mut segments = Vec::new();
        assert!(memory.append_segments(0x2ffe, 4, &mut segments));
        let found: Vec<_> =
            segments.iter().map(|segment| (memory.guest_address(segment), segment.len)).collect();
        assert_eq!(found, [(0x2ffe, 2), (0x3000, 2)]);
        let mut bufs: Vec<_> = segments.iter().map(|segment| memory.io_buf_mut(segment)).collect();
        assert_eq!(scatter(b"abcd", &mut bufs), 4);
        let bufs: Vec<_> = segments.iter().map(|segment| memory.io_buf(segment)).collect();
        let mut bytes = [0; 4];
        assert_eq!(gather(&bufs, &mut bytes), 4);
        assert_eq!(&bytes, b"abcd");
    }

    #[test]
    fn addresses_outside_the_regions_are_not_found() {
        let memory = GuestMemory::new(vec![region(0x1000, 0x9000, 0x1000)]).unwrap();
        for (guest, len) in
            [(0xfff, 1), (0x1fff, 2), (0x2000, 1), (u64::MAX, 1), (u64::MAX - 1, 4), (0x1000, u32::MAX)]
        {
            assert!(!memory.append_segments(guest, len, &mut Vec::new()), "{guest:#x} {len}");
        }
        assert!(memory.user_area(0x9ff0, 16, 16).is_some());
        assert!(memory.user_area(0x9ff8, 16, 8).is_none());
        assert!(memory.user_area(0x9001, 2, 2).is_none());
        assert!(memory.user_area(0x8fff, 1, 1).is_none());
        assert!(memory.guest_area(0x1ff8, 16).is_none());
    }

    #[test]
    fn invalid_regions_are_refused() {
        let refused = |info: &RegionInfo, has: u64| Region::map(info, file(has)).unwrap_err().to_string();
        assert_eq!(refused(&info(0x1000, 0, 0, 0), 4096), "the region at guest address 0x1000 has length 0");
        assert_eq!(
            refused(&info(0, 0, 0x2000, 0x1000), 0x2000),
            "a region ends at 0x3000 in its file, which has 0x2000 bytes"
        );
        assert!(refused(&info(u64::MAX, 0, 4096, 0), 4096).contains("ends beyond 2^64"));
        assert!(refused(&info(0, 0, 4096, u64::MAX), 4096).contains("larger than any address space"));
        let overlap = GuestMemory::new(vec![region(0, 0, 0x2000), region(0x1000, 0, 0x1000)]).unwrap_err();
        assert_eq!(overlap.to_string(), "the regions at guest addresses 0x0 and 0x1000 overlap");
    }

    #[test]
    fn a_guest_has_at_most_its_share_of_the_address_space() {
        // A sparse file; nothing of it is mapped but the region itself.
        let end = 1 << 45;
        let sparse = file(end);
        let last = Region::map(&info(0, 0, 0x2000, end - 0x2000), sparse.try_clone().unwrap()).unwrap();
        assert_eq!(last.file().1, end - 0x2000);
        assert_eq!(last.mapping.mapped_bytes(), 0x10000);
        let more = |size| {
            GuestMemory::map(vec![(info(0, 0, size, 0), sparse.try_clone().unwrap())])
                .map(|memory| memory.size())
        };
        assert_eq!(more(GUEST_BYTES_MAX).unwrap(), GUEST_BYTES_MAX);
        let refused = more(GUEST_BYTES_MAX + 4096).unwrap_err().to_string();
        assert_eq!(
            refused,
            "the guest's memory has 0x100000001000 bytes, at most 0x100000000000 are supported"
        );
        let memory = GuestMemory::new(vec![last]).unwrap();
        let added = memory.with_mapped(&info(1 << 45, 1 << 45, GUEST_BYTES_MAX, 0), sparse).unwrap_err();
        assert!(
            matches!(added, MemoryTableError::TooMuch { found } if found == GUEST_BYTES_MAX + 0x2000),
            "{added}"
        );
    }

    #[test]
    fn regions_are_added_and_removed() {
        let memory = GuestMemory::new(vec![region(0, 0x10000, 0x1000)]).unwrap();
        let more = memory.with_mapped(&info(0x4000, 0x20000, 0x1000, 0), file(0x1000)).unwrap();
        assert_eq!(more.size(), 0x2000);
        let less = more.without(&info(0, 0x10000, 0x1000, 0)).unwrap();
        assert_eq!((less.size(), less.guest_area(0x4000, 8).is_some()), (0x1000, true));
        let absent = less.without(&info(0, 0x10000, 0x1000, 0)).unwrap_err();
        assert_eq!(absent.to_string(), "no region of 0x1000 bytes at guest address 0x0 to remove");
    }
}
