//! Storing a guest: a [`Sink`] that becomes a mapped-ram file and its manifest.
//!
//! ```text
//!   pages ──► the file, at their place        each run with one call, past the page cache where it is long enough
//!         └─► BlockHasher                     on the lane's own thread, while the bytes are in its cache
//!   commit    re-read what came twice · holes where the base has it · bitmaps, block list, device state · sync
//!   publish   manifest · rename
//! ```
//!
//! No guest memory is held. Until [`Sink::publish`] renames it, the file has a temporary name; if anything fails it is
//! removed, and the source, which hears of success only afterwards, keeps its guest.
//!
//! Direct I/O is not for its own sake: a page of page cache costs more to allocate than to write on many hosts (4–30 µs in
//! a nested VM), and a stored guest would evict what the host has cached for better reasons. Where a filesystem has no
//! direct I/O, or a run is short, writes go through the page cache.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, pwritev};
use towline_migration::{Pages, Sink, Stream};
use towline_protocol::configuration::{Configuration, MAPPED_RAM};
use towline_protocol::destination::RamSection;
use towline_protocol::device_state::DeviceState;
use towline_protocol::mapped_ram;
use towline_protocol::ram::{self, PAGE_SIZE, RamFlags};
use towline_protocol::section::{SectionHeader, SectionType, put_footer};
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::atomic_file::{AtomicFile, Existing};
use crate::began::Began;
use crate::checksum::{BlockHasher, ChunkHash, OpenBudget};
use crate::increment::{Ground, Increment};
use crate::layer::INCREMENTAL;
use crate::manifest::{Contents, Manifest, Origin};
use crate::reader::write_error;
use crate::{Error, Result};

/// Runs of at least this length go past the page cache: below it, a device's latency costs more than the copy.
const DIRECT_BYTES_MIN: usize = 64 << 10;
/// What direct I/O wants memory, offset and length to be a multiple of, on every device with 4 KiB sectors or smaller.
const DIRECT_ALIGNMENT: usize = 4096;
/// Most memory of a guest that is stored. What a stream claims costs 56 KiB for each GiB (bitmap and checksums) before a
/// page has come: 0.9 GiB at most.
const RAM_BYTES_MAX: u64 = 16 << 40;
/// Threads that re-read chunks which came twice.
const REREAD_THREADS: usize = 4;

/// A guest that is being stored.
#[derive(Debug)]
pub struct ImageWriter {
    path: PathBuf,
    origin: Origin,
    /// `None` for a whole image.
    ground: Option<Ground>,
    increment: OnceLock<Increment>,
    /// `None` once it is committed.
    file: RwLock<Option<AtomicFile>>,
    direct: AtomicBool,
    began: Began,
    layout: OnceLock<Layout>,
    hashers: RwLock<Vec<BlockHasher>>,
    device_state: Mutex<Option<DeviceState>>,
    /// Complete and synced, but for its name.
    complete: Mutex<Option<(AtomicFile, Manifest)>>,
}

/// Where everything goes.
#[derive(Debug)]
struct Layout {
    /// Header, configuration, section header and total.
    head: Vec<u8>,
    blocks: Vec<RamBlock>,
    /// A bit for each page that has content.
    bitmaps: Vec<Vec<AtomicU64>>,
    /// Behind the last page.
    end: u64,
}

impl ImageWriter {
    /// Begins an image that will be `path`, under a temporary name beside it.
    ///
    /// # Errors
    /// The file cannot be made; another process is writing this image; it exists already and is not to be replaced.
    pub fn create(path: &Path, existing: Existing, origin: Origin) -> Result<Self> {
        let file = AtomicFile::open(path, existing)?;
        let direct = AtomicBool::new(file.direct().is_some());
        Ok(Self {
            path: path.into(),
            origin,
            ground: None,
            increment: OnceLock::new(),
            file: RwLock::new(Some(file)),
            direct,
            began: Began::default(),
            layout: OnceLock::new(),
            hashers: RwLock::default(),
            device_state: Mutex::default(),
            complete: Mutex::default(),
        })
    }

    /// Has it hold only what differs from the image at `base`, which must be a stored state of the same guest.
    ///
    /// # Errors
    /// The base cannot be read, has no manifest, is itself what is to be replaced, or has too many bases of its own.
    pub fn based_on(self, base: &Path) -> Result<Self> {
        Ok(Self { ground: Some(Ground::open(&self.path, base)?), ..self })
    }

    /// How much an incremental image holds itself, once it is committed.
    pub fn increment(&self) -> Option<Increment> {
        self.increment.get().copied()
    }

    fn order(&self, what: &'static str) -> Error {
        Error::Order { path: self.path.clone(), what }
    }

    fn layout(&self) -> Result<&Layout> {
        self.layout.get().ok_or_else(|| self.order("pages came before the block list"))
    }

    fn with_file<T>(&self, work: impl FnOnce(&AtomicFile) -> io::Result<T>) -> Result<T> {
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        let file = file.as_ref().ok_or_else(|| self.order("pages came behind the stream's end"))?;
        work(file).map_err(write_error(&self.path))
    }

    fn lay_out(&self, blocks: &[RamBlock]) -> Result<Layout> {
        let configuration = self.began.configuration();
        let mut configuration = configuration.ok_or_else(|| self.order("no configuration came"))?.clone();
        configuration.capabilities.push(MAPPED_RAM.into());
        if let Some(ground) = &self.ground {
            ground.check(&self.path, blocks)?;
            configuration.capabilities.push(INCREMENTAL.into());
        }
        let section = self.began.section().ok_or_else(|| self.order("no section began"))?;
        let mut head = Vec::new();
        configuration.encode(&mut head);
        let (name, version) = (ram::SECTION_NAME.into(), ram::SECTION_VERSION);
        SectionHeader { id: section.id, name, instance: 0, version }.encode(SectionType::Start, &mut head);
        let list_offset = head.len() as u64;
        let mut blocks = blocks.to_vec();
        let end = mapped_ram::place_all(&mut blocks, list_offset);
        let total = blocks.iter().map(|block| block.length).sum();
        if total > RAM_BYTES_MAX {
            return Err(Error::TooLarge { path: self.path.clone(), found: total, limit: RAM_BYTES_MAX });
        }
        // A filesystem that cannot hold it says so before memory is taken for it.
        self.with_file(|file| file.file().set_len(end))?;
        ram::put_total(total, &mut head);
        let words = |block: &RamBlock| (0..block.pages().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let bitmaps = blocks.iter().map(words).collect();
        Ok(Layout { head, blocks, bitmaps, end })
    }

    /// Writes consecutive pages of a block, whose contents lie in `contents`.
    fn write_run(&self, block: &RamBlock, offset: u64, contents: &[&[u8]]) -> Result<()> {
        let at = block.mapped.expect("laid out").pages_offset + offset;
        self.with_file(|file| {
            if let ([bytes], true) = (contents, self.direct.load(Ordering::Relaxed))
                && bytes.len() >= DIRECT_BYTES_MIN
                && bytes.as_ptr().addr().is_multiple_of(DIRECT_ALIGNMENT)
                && let Some(direct) = file.direct()
            {
                match direct.write_all_at(bytes, at) {
                    // A filesystem or device that opens for direct I/O and then wants more alignment than ours.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                        self.direct.store(false, Ordering::Relaxed);
                    }
                    result => return result,
                }
            }
            write_all_vectored_at(file.file(), contents, at)
        })
    }

    /// Pages that had content and are zero now: their place becomes a hole, so that the file reads as the guest does.
    fn clear(&self, block: &RamBlock, offset: u64, length: u64) -> Result<()> {
        let at = block.mapped.expect("laid out").pages_offset + offset;
        self.with_file(|file| {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if fallocate(file.file(), flags, at, length).is_ok() {
                return Ok(());
            }
            file.file().write_all_at(&vec![0; length as usize], at)
        })
    }

    /// The chunks' hashes, after reading again what came twice.
    fn hashes(&self, layout: &Layout) -> Result<Vec<Vec<ChunkHash>>> {
        let hashers = std::mem::take(&mut *self.hashers.write().unwrap_or_else(PoisonError::into_inner));
        let finish = |(hasher, block): (BlockHasher, &RamBlock)| {
            let pages_offset = block.mapped.expect("laid out").pages_offset;
            hasher.finish(REREAD_THREADS, |offset, buffer| {
                self.with_file(|file| file.file().read_exact_at(buffer, pages_offset + offset))
            })
        };
        hashers.into_iter().zip(&layout.blocks).map(finish).collect()
    }

    /// Chunks that the base has become holes. A filesystem without holes keeps them: nobody reads them.
    fn drop_unchanged(&self, layout: &Layout, hashes: &[Vec<ChunkHash>]) -> Result<()> {
        let Some(ground) = &self.ground else { return Ok(()) };
        let mut total = Increment { stored: 0, in_base: 0 };
        for (index, (block, hashes)) in layout.blocks.iter().zip(hashes).enumerate() {
            let pages_offset = block.mapped.expect("laid out").pages_offset;
            let (runs, increment) = ground.unchanged(index, block.length, hashes);
            total.stored += increment.stored;
            total.in_base += increment.in_base;
            for run in runs {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let (at, length) = (pages_offset + run.start, run.end - run.start);
                self.with_file(|file| match fallocate(file.file(), flags, at, length) {
                    Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
                    result => Ok(result?),
                })?;
            }
        }
        self.increment.get_or_init(|| total);
        Ok(())
    }

    /// Everything but pages: head, list, bitmaps, the sections that hold nothing, device state.
    fn write_frame(&self, layout: &Layout, device_state: &DeviceState) -> Result<()> {
        self.with_file(|file| {
            let file = file.file();
            file.write_all_at(&layout.head, 0)?;
            for (block, bitmap) in layout.blocks.iter().zip(&layout.bitmaps) {
                let mapped = block.mapped.expect("laid out");
                let mut entry = Vec::new();
                ram::put_block(block, &mut entry);
                mapped.encode(&mut entry);
                let words = bitmap.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
                let start = mapped.bitmap_offset - entry.len() as u64;
                entry.extend(words);
                file.write_all_at(&entry, start)?;
            }
            let id = self.began.section().map_or(0, |section| section.id);
            let mut tail = Vec::new();
            ram::put_flag(RamFlags::EOS, &mut tail);
            put_footer(&mut tail, id);
            tail.push(SectionType::End as u8);
            tail.extend_from_slice(&id.to_be_bytes());
            ram::put_flag(RamFlags::EOS, &mut tail);
            put_footer(&mut tail, id);
            tail.extend_from_slice(device_state.bytes());
            file.write_all_at(&tail, layout.end)?;
            file.set_len(layout.end + tail.len() as u64)
        })
    }

    fn manifest(
        &self,
        layout: &Layout,
        hashes: Vec<Vec<ChunkHash>>,
        device_state: &DeviceState,
    ) -> Result<Manifest> {
        let plain = |bitmap: &Vec<AtomicU64>| {
            bitmap.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
        };
        let first = layout.blocks.first().and_then(|block| block.mapped);
        let mut head = vec![0; first.map_or(0, |mapped| mapped.bitmap_offset as usize)];
        let image_bytes = self.with_file(|file| {
            file.file().read_exact_at(&mut head, 0)?;
            Ok(file.file().metadata()?.len())
        })?;
        let was_running = device_state.run_state().map(|state| state == "running");
        Ok(Manifest::new(Contents {
            origin: &Origin { was_running, ..self.origin.clone() },
            machine_type: &self
                .began
                .configuration()
                .map(|found| found.machine_type.clone())
                .unwrap_or_default(),
            blocks: &layout.blocks,
            plain_pages: layout.bitmaps.iter().map(plain).collect(),
            hashes,
            device_state,
            image_bytes,
            head: &head,
            base: self.ground.as_ref().map(|ground| ground.reference().clone()),
        }))
    }

    fn store(&self) -> Result<()> {
        let layout = self.layout()?;
        let device_state = self.device_state.lock().unwrap_or_else(PoisonError::into_inner).take();
        let device_state = device_state.ok_or_else(|| self.order("no device state came"))?;
        let hashes = self.hashes(layout)?;
        self.drop_unchanged(layout, &hashes)?;
        self.write_frame(layout, &device_state)?;
        let manifest = self.manifest(layout, hashes, &device_state)?;
        let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
        let file = file.ok_or_else(|| self.order("the image is complete already"))?;
        file.file().sync_all().map_err(write_error(&self.path))?;
        *self.complete.lock().unwrap_or_else(PoisonError::into_inner) = Some((file, manifest));
        Ok(())
    }

    fn name(&self) -> Result<()> {
        let complete = self.complete.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (file, manifest) = complete.ok_or_else(|| self.order("the image is not complete"))?;
        // The manifest first: an image without one is a crash's worst remainder if the image's own rename comes last, and
        // a manifest that is not its image's is told by its identity.
        manifest.store(&self.path)?;
        Ok(file.commit()?)
    }
}

impl Sink for ImageWriter {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        self.began.set_configuration(configuration);
        Ok(())
    }

    fn section_start(&self, section: RamSection) -> towline_migration::Result<()> {
        self.began.add_section(section);
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        let layout = self.lay_out(blocks).map_err(towline_migration::Error::guest)?;
        let budget = OpenBudget::default();
        *self.hashers.write().unwrap_or_else(PoisonError::into_inner) =
            blocks.iter().map(|block| BlockHasher::with_budget(block.length, budget.clone())).collect();
        self.layout.get_or_init(|| layout);
        Ok(())
    }

    fn pages(&self, _stream: Stream, pages: &Pages<'_>) -> towline_migration::Result<()> {
        self.store_pages(pages).map_err(towline_migration::Error::guest)
    }

    fn zero(&self, _stream: Stream, block: BlockIndex, offsets: &[u64]) -> towline_migration::Result<()> {
        self.store_zero(block, offsets).map_err(towline_migration::Error::guest)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> towline_migration::Result<()> {
        let mut read = || {
            let pages_offset =
                self.layout()?.blocks[page.block.index()].mapped.expect("laid out").pages_offset;
            self.with_file(|file| file.file().read_exact_at(content, pages_offset + page.offset))
        };
        read().map_err(towline_migration::Error::guest)
    }

    fn device_state(&self, state: DeviceState) -> towline_migration::Result<()> {
        *self.device_state.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        Ok(())
    }

    fn commit(&self) -> towline_migration::Result<()> {
        self.store().map_err(towline_migration::Error::guest)
    }

    fn publish(&self) -> towline_migration::Result<()> {
        self.name().map_err(towline_migration::Error::guest)
    }
}

impl ImageWriter {
    fn store_pages(&self, pages: &Pages<'_>) -> Result<()> {
        let layout = self.layout()?;
        let block = &layout.blocks[pages.block.index()];
        let hashers = self.hashers.read().unwrap_or_else(PoisonError::into_inner);
        let mut contents = Slices::new(pages.contents);
        for run in pages.offsets.chunk_by(|first, second| first + PAGE_SIZE == *second) {
            let slices = contents.take(run.len() * PAGE_SIZE as usize);
            self.write_run(block, run[0], &slices)?;
            let mut offset = run[0];
            for slice in slices {
                hashers[pages.block.index()].data(offset, slice);
                offset += slice.len() as u64;
            }
            let bitmap = &layout.bitmaps[pages.block.index()];
            for page in run[0] / PAGE_SIZE..run[0] / PAGE_SIZE + run.len() as u64 {
                bitmap[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn store_zero(&self, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        let layout = self.layout()?;
        let bitmap = &layout.bitmaps[block.index()];
        let hashers = self.hashers.read().unwrap_or_else(PoisonError::into_inner);
        for run in offsets.chunk_by(|first, second| first + PAGE_SIZE == *second) {
            hashers[block.index()].zero(run[0], run.len() as u64 * PAGE_SIZE);
            for &offset in run {
                let page = offset / PAGE_SIZE;
                let bit = 1 << (page % 64);
                if bitmap[(page / 64) as usize].fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
                    self.clear(&layout.blocks[block.index()], offset, PAGE_SIZE)?;
                }
            }
        }
        Ok(())
    }
}

/// Takes bytes off the front of a list of slices.
pub(crate) struct Slices<'a> {
    left: &'a [&'a [u8]],
    /// Bytes taken of the first.
    taken: usize,
}

impl<'a> Slices<'a> {
    pub(crate) fn new(slices: &'a [&'a [u8]]) -> Self {
        Self { left: slices, taken: 0 }
    }

    pub(crate) fn take(&mut self, length: usize) -> Vec<&'a [u8]> {
        let mut slices = Vec::new();
        let mut wanted = length;
        while let (Some(first), 1..) = (self.left.first(), wanted) {
            let rest = &first[self.taken..];
            let part = &rest[..rest.len().min(wanted)];
            slices.push(part);
            wanted -= part.len();
            self.taken += part.len();
            if self.taken == first.len() {
                (self.left, self.taken) = (&self.left[1..], 0);
            }
        }
        slices
    }
}

fn write_all_vectored_at(file: &File, contents: &[&[u8]], offset: u64) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = contents.iter().map(|slice| IoSlice::new(slice)).collect();
    let (mut left, mut offset) = (&mut slices[..], offset);
    while !left.is_empty() {
        let written = match pwritev(file, left, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        IoSlice::advance_slices(&mut left, written);
        offset += written as u64;
    }
    Ok(())
}
