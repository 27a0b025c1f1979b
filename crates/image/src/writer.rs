//! Storing a guest: a [`Sink`] that becomes a mapped-ram file and its manifest.
//!
//! ```text
//!   pages ──► the file                        each run with one call, past the page cache if it is long enough
//!         └─► BlockHasher                     on the lane's own thread, while the bytes are in its cache
//!   commit    bitmaps, block list, device state · sync
//!   publish   re-read pages that were sent again · punch holes for chunks of the base · seal · sync
//!             stage the manifest · rename the image · rename the manifest ([`crate::sidecar`])
//! ```
//!
//! After the commit the guest is durable, and may run on at its source while the image is published, which
//! takes longer the more pages were sent again. Data in the page cache is synced while it arrives
//! ([`crate::write_back`]), so the commit's sync is short.
//!
//! No guest memory is buffered. Until [`Sink::publish`] renames it, the file has a temporary name; after a
//! failure it is removed, and the source, which only learns of success after that, keeps its guest.
//!
//! Direct I/O is used because a page of page cache costs more to allocate than to write on many hosts (4–30
//! µs in a nested VM), and because a stored guest would evict more useful pages. Filesystems without direct
//! I/O and short runs are written through the page cache.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use towline_channel::lock::lock;
use towline_migration::{ChannelId, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::atomic_file::{AtomicFile, Existing};
use crate::base_image::{BaseImage, Increment};
use crate::bitmap::Bitmap;
use crate::checksum::{BlockHasher, ChunkHash, OPEN_BYTES_MAX, OpenBudget};
use crate::frame::{ImageFrame, ImageKind};
use crate::layer::Layer;
use crate::manifest::{Digest, Manifest, ManifestContents, Origin, sidecar_path};
use crate::page_runs::page_runs;
use crate::reader::write_error;
use crate::regular_file::FileId;
use crate::sidecar::{self, ManifestName, StagedManifest};
use crate::write_back::WriteBack;
use crate::{Error, Result, seal};

mod partial;

/// Minimum length of runs that are written past the page cache: below it, a device's latency costs more than
/// the copy.
const DIRECT_BYTES_MIN: usize = 64 << 10;
/// Alignment of memory, offset and length for direct I/O; valid for every device with sectors of up to 4 KiB.
const DIRECT_ALIGNMENT: usize = 4096;
/// Maximum memory of a stored guest. A stream's announced length costs 56 KiB per GiB (bitmap and checksums)
/// before any page arrives: 0.9 GiB at most.
const RAM_BYTES_MAX: u64 = 16 << 40;
/// Threads that re-read chunks whose pages were sent again.
const REREAD_THREADS: usize = 4;

/// A guest that is being stored.
#[derive(Debug)]
pub struct ImageWriter {
    path: PathBuf,
    origin: Origin,
    /// `None` for a whole image.
    base: Option<BaseImage>,
    /// It becomes a whole image by what the base has.
    takes_base: bool,
    increment: OnceLock<Increment>,
    /// Ranges of each block that arrive; unset: all of the guest.
    arriving: OnceLock<Vec<Vec<Range<u64>>>>,
    /// `None` once it is published.
    file: RwLock<Option<AtomicFile>>,
    /// Long runs are written past the page cache, where the filesystem supports that.
    direct: AtomicBool,
    /// Of the stream.
    configuration: OnceLock<Configuration>,
    /// Id of the stream's first `ram` section.
    section_id: OnceLock<u32>,
    device_state: Mutex<Option<DeviceState>>,
    layout: OnceLock<ImageLayout>,
    /// The manifest under the final name when writing began.
    previous_manifest: Option<FileId>,
    write_back: WriteBack,
    /// Device state of a committed image that is not published yet.
    complete: Mutex<Option<DeviceState>>,
    published: AtomicBool,
    notices: Mutex<Vec<String>>,
}

/// Layout of the image file.
#[derive(Debug)]
struct ImageLayout {
    frame: ImageFrame,
    /// A bit for each page that has content.
    bitmaps: Vec<Bitmap>,
    hashers: Vec<BlockHasher>,
}

/// A complete and synced image without its final name.
#[derive(Debug)]
struct FinishedImage<'a> {
    file: AtomicFile,
    /// Text of the manifest.
    manifest: Vec<u8>,
    /// The base that the image needs, or whose chunks it took.
    base: Option<&'a BaseImage>,
}

impl ImageWriter {
    /// Creates an image that will be `path`, under a temporary name beside it.
    ///
    /// # Errors
    /// The file cannot be created; another process is writing this image; it exists and must not be replaced,
    /// or is the base of an increment that is being stored; its name, or its manifest's, is reserved or
    /// belongs to a file of another kind.
    pub fn create(path: &Path, existing: Existing, origin: Origin) -> Result<Self> {
        sidecar::check_name(path)?;
        let file = AtomicFile::open(path, existing)?;
        sidecar::check_parts(path)?;
        let is_staged = || Layer::open(path).is_ok_and(|layer| layer.manifest_name == ManifestName::Staged);
        sidecar::complete_interrupted(path, file.entry(), is_staged)?;
        let previous_manifest = sidecar::current_manifest(path, file.entry())?;
        Ok(Self {
            path: path.into(),
            origin,
            base: None,
            takes_base: false,
            increment: OnceLock::new(),
            arriving: OnceLock::new(),
            file: RwLock::new(Some(file)),
            direct: AtomicBool::new(true),
            configuration: OnceLock::new(),
            section_id: OnceLock::new(),
            device_state: Mutex::default(),
            layout: OnceLock::new(),
            previous_manifest,
            write_back: WriteBack::default(),
            complete: Mutex::default(),
            published: AtomicBool::new(false),
            notices: Mutex::default(),
        })
    }

    /// Makes the image incremental: it will contain only chunks that differ from the image at `base`, which
    /// must be a stored state of the same guest.
    ///
    /// # Errors
    /// The base cannot be read, has no manifest, is the image to be replaced, or has too many bases itself.
    pub fn based_on(self, base: &Path) -> Result<Self> {
        Ok(Self { base: Some(BaseImage::open(&self.path, base)?), ..self })
    }

    /// Makes an image with a base whole at the end: it takes the base's chunks, by reference on a filesystem with reflinks. What is known to be
    /// the base's need not arrive.
    #[must_use]
    pub fn taking_base(self) -> Self {
        Self { takes_base: true, ..self }
    }

    /// Number of chunks that an incremental image stores itself, after the commit; `None` for a whole image.
    pub fn increment(&self) -> Option<Increment> {
        self.increment.get().copied()
    }

    /// Path of the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the guest's memory; 0 before its block list.
    pub fn memory_bytes(&self) -> u64 {
        self.layout.get().map_or(0, |layout| layout.frame.total())
    }

    /// Returns true once the complete image has its name: a failure after that leaves it there.
    pub fn is_published(&self) -> bool {
        self.published.load(Ordering::Relaxed)
    }

    /// Deviations from what was requested, as text for the user.
    pub fn notices(&self) -> Vec<String> {
        lock(&self.notices).clone()
    }

    fn notice(&self, text: String) {
        lock(&self.notices).push(text);
    }

    fn order_error(&self, what: &'static str) -> Error {
        Error::Order { path: self.path.clone(), what }
    }

    fn layout(&self) -> Result<&ImageLayout> {
        self.layout.get().ok_or_else(|| self.order_error("pages arrived before the block list"))
    }

    fn with_file<T>(&self, work: impl FnOnce(&AtomicFile) -> io::Result<T>) -> Result<T> {
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        let file =
            file.as_ref().ok_or_else(|| self.order_error("pages arrived after the end of the stream"))?;
        work(file).map_err(write_error(&self.path))
    }

    fn configuration(&self) -> Result<&Configuration> {
        self.configuration.get().ok_or_else(|| self.order_error("the stream has no configuration"))
    }

    fn plan_layout(&self, blocks: &[RamBlock]) -> Result<ImageLayout> {
        let configuration = self.configuration()?;
        let kind = match &self.base {
            Some(base) => {
                base.check(&self.path, blocks)?;
                ImageKind::Incremental
            }
            None => ImageKind::Whole,
        };
        let section_id = self.section_id.get().copied();
        let section_id = section_id.ok_or_else(|| self.order_error("the stream has no `ram` section"))?;
        let frame = ImageFrame::new(configuration, section_id, blocks, kind);
        let found = frame.total();
        if found > RAM_BYTES_MAX {
            return Err(Error::TooLarge { path: self.path.clone(), found, limit: RAM_BYTES_MAX });
        }
        // Fails on a filesystem with too little space before memory is allocated for it.
        self.with_file(|file| file.set_length(frame.end))?;
        let bitmaps = frame.blocks.iter().map(|block| Bitmap::new(block.pages())).collect();
        let budget = OpenBudget::new(OPEN_BYTES_MAX);
        let hashers = blocks.iter().map(|block| BlockHasher::new(block.length, budget.clone())).collect();
        Ok(ImageLayout { frame, bitmaps, hashers })
    }

    /// Writes consecutive pages of a block.
    fn write_run(&self, block: &RamBlock, offset: u64, contents: &[&[u8]]) -> Result<()> {
        let at = block.mapped.expect("laid out").pages_offset + offset;
        let length: usize = contents.iter().map(|slice| slice.len()).sum();
        self.with_file(|file| {
            if let ([bytes], true) = (contents, self.direct.load(Ordering::Relaxed))
                && bytes.len() >= DIRECT_BYTES_MIN
                && bytes.as_ptr().addr().is_multiple_of(DIRECT_ALIGNMENT)
                && let Some(written) = file.write_all_direct_at(bytes, at)
            {
                match written {
                    // A filesystem or device that allows direct I/O but requires a larger alignment than
                    // ours.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                        self.direct.store(false, Ordering::Relaxed);
                    }
                    result => return result,
                }
            }
            file.write_all_vectored_at(contents, at)?;
            self.write_back.written(file.file(), length as u64)
        })
    }

    /// Punches a hole for pages that had content and are zero now, so the file reads as the guest's memory.
    fn clear(&self, block: &RamBlock, offset: u64, length: u64) -> Result<()> {
        let at = block.mapped.expect("laid out").pages_offset + offset;
        self.with_file(|file| {
            if file.punch(at, length).is_ok() {
                return Ok(());
            }
            file.write_all_at(&vec![0; length as usize], at)
        })
    }

    /// Hashes of all chunks, after re-reading those whose pages were sent again.
    fn hashes(&self, layout: &ImageLayout) -> Result<Vec<Vec<ChunkHash>>> {
        let finish = |(hasher, block): (&BlockHasher, &RamBlock)| {
            let pages_offset = block.mapped.expect("laid out").pages_offset;
            hasher.finish(REREAD_THREADS, |offset, buffer| {
                self.with_file(|file| file.file().read_exact_at(buffer, pages_offset + offset))
            })
        };
        layout.hashers.iter().zip(&layout.frame.blocks).map(finish).collect()
    }

    /// Deallocates the chunks that equal the base's. On a filesystem without holes they stay, unread.
    fn punch_unchanged(
        &self,
        base: &BaseImage,
        layout: &ImageLayout,
        hashes: &[Vec<ChunkHash>],
    ) -> Result<()> {
        let mut total = Increment { stored: 0, in_base: 0 };
        for ((index, block), hashes) in (0..).map(BlockIndex).zip(&layout.frame.blocks).zip(hashes) {
            let pages_offset = block.mapped.expect("laid out").pages_offset;
            for run in base.unchanged_ranges(index, block.length, hashes, &mut total) {
                let (at, length) = (pages_offset + run.start, run.end - run.start);
                self.with_file(|file| match file.punch(at, length) {
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
                    result => result,
                })?;
            }
        }
        self.increment.get_or_init(|| total);
        Ok(())
    }

    fn manifest(
        &self,
        frame: &ImageFrame,
        bitmaps: &[Bitmap],
        hashes: Vec<Vec<ChunkHash>>,
        device_state: &DeviceState,
        base: Option<&BaseImage>,
    ) -> Result<Manifest> {
        let image_bytes = self.with_file(|file| Ok(file.file().metadata()?.len()))?;
        Ok(Manifest::new(ManifestContents {
            origin: &self.origin.clone().with_run_state(device_state),
            machine_type: &self.configuration()?.machine_type,
            blocks: &frame.blocks,
            plain_pages: bitmaps.iter().map(Bitmap::count).collect(),
            hashes,
            device_state,
            image_bytes,
            head: &frame.up_to_bitmap(),
            bitmaps: bitmaps.iter().map(|bitmap| Digest::of(&bitmap.to_bytes())).collect(),
            seal: seal::offset(&frame.blocks),
            base: base.map(|base| base.reference.clone()),
        }))
    }

    /// The base if the image is incremental and the base has not changed.
    ///
    /// # Errors
    /// [`Error::BaseChanged`]: what did not arrive was in the base.
    fn unchanged_base(&self) -> Result<Option<&BaseImage>> {
        let Some(base) = &self.base else { return Ok(None) };
        if base.is_unchanged() {
            return Ok(Some(base));
        }
        if self.arriving.get().is_some() {
            return Err(Error::BaseChanged { path: self.path.clone(), base: base.path.clone() });
        }
        let (path, base) = (self.path.display(), base.path.display());
        self.notice(format!(
            "{base} was replaced, changed or moved while {path} was stored, so {path} is a whole image that needs no base"
        ));
        Ok(None)
    }

    /// Makes memory and device state durable, without the parts that only readers of the image need, because
    /// the guest may be stopped.
    fn complete(&self) -> Result<()> {
        let layout = self.layout()?;
        let device_state = lock(&self.device_state).take();
        let device_state = device_state.ok_or_else(|| self.order_error("the stream has no device state"))?;
        self.write_parts(&layout.frame, layout, &device_state)?;
        self.with_file(AtomicFile::sync)?;
        *lock(&self.complete) = Some(device_state);
        Ok(())
    }

    /// Writes everything but pages.
    fn write_parts(&self, frame: &ImageFrame, layout: &ImageLayout, devices: &DeviceState) -> Result<()> {
        let bitmaps: Vec<_> = layout.bitmaps.iter().map(Bitmap::to_bytes).collect();
        let parts = frame.parts(bitmaps.iter().map(Vec::as_slice), devices.bytes());
        self.with_file(|file| {
            parts.iter().try_for_each(|(at, bytes)| file.write_all_at(bytes, *at))?;
            let end = parts.last().map_or(0, |(at, bytes)| at + bytes.len() as u64);
            file.set_length(end)
        })
    }

    /// Writes the header of an image that needs no base.
    fn make_whole(&self, layout: &ImageLayout, devices: &DeviceState) -> Result<ImageFrame> {
        let whole = layout.frame.whole(self.configuration()?);
        self.write_parts(&whole, layout, devices)?;
        Ok(whole)
    }

    /// Adds checksums and seal to the committed image, and syncs it.
    fn finish(&self) -> Result<FinishedImage<'_>> {
        let layout = self.layout()?;
        let device_state = lock(&self.complete).take();
        let device_state = device_state.ok_or_else(|| self.order_error("the image was not committed"))?;
        let hashes = self.hashes(layout)?;
        let base = self.unchanged_base()?;
        let needed = base.filter(|_| !self.takes_base);
        match (base, needed) {
            (_, Some(base)) => self.punch_unchanged(base, layout, &hashes)?,
            (Some(base), None) => self.take_chunks(base, layout, &hashes)?,
            (None, None) => {}
        }
        let frame = match (needed, &self.base) {
            (None, Some(_)) => &self.make_whole(layout, &device_state)?,
            _ => &layout.frame,
        };
        let manifest = self.manifest(frame, &layout.bitmaps, hashes, &device_state, needed)?;
        let manifest = manifest.to_json(&sidecar_path(&self.path))?;
        if let Some((at, seal)) = frame.seal(&manifest) {
            self.with_file(|file| file.write_all_at(&seal, at))?;
        }
        self.with_file(AtomicFile::sync)?;
        let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
        let file = file.ok_or_else(|| self.order_error("the image was published twice"))?;
        Ok(FinishedImage { file, manifest, base })
    }

    fn rename(&self) -> Result<()> {
        let FinishedImage { file, manifest, base } = self.finish()?;
        #[cfg(test)]
        if crate::journal::is_on(crate::journal::PublicationBug::ManifestFirst) {
            crate::atomic_file::write_sidecar(&sidecar_path(&self.path), &manifest, Existing::Replace)?;
            return Ok(file.commit()?);
        }
        let entry = Arc::clone(file.entry());
        let staged = StagedManifest::write(&self.path, self.previous_manifest, &manifest)?;
        // As late as possible: the base's chunks are in no other file from here on, or were taken from it.
        if let Some(base) = base.filter(|base| !base.is_unchanged()) {
            staged.discard(&entry);
            return Err(Error::BaseChanged { path: self.path.clone(), base: base.path.clone() });
        }
        let renamed = match file.rename() {
            Ok(renamed) => renamed,
            Err(error) => {
                staged.discard(&entry);
                return Err(error.into());
            }
        };
        if let Err(error) = renamed.sync_directory() {
            // After a crash either image may be the present one: both manifests stay.
            #[cfg(test)]
            if crate::journal::is_on(crate::journal::PublicationBug::StagedManifestRemoved) {
                staged.discard(&entry);
            }
            return Err(error.into());
        }
        if staged.publish(&entry, &renamed) == ManifestName::Staged {
            let at = sidecar::staged_path(&self.path);
            self.notice(format!("the manifest of {} is {}: keep both", self.path.display(), at.display()));
        }
        Ok(())
    }
}

impl Sink for ImageWriter {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        self.configuration.get_or_init(|| configuration.clone());
        Ok(())
    }

    fn section_start(&self, section: RamSection) -> towline_migration::Result<()> {
        if section.kind == SectionKind::Start {
            self.section_id.get_or_init(|| section.id);
        }
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        let layout = self.plan_layout(blocks)?;
        self.take_from_base(&layout);
        self.layout.get_or_init(|| layout);
        Ok(())
    }

    fn pages(&self, _stream: ChannelId, pages: &Pages<'_>) -> towline_migration::Result<()> {
        let layout = self.layout()?;
        let block = &layout.frame.blocks[pages.block.index()];
        for run in page_runs(pages) {
            self.write_run(block, run.offset, &run.contents)?;
            for (offset, slice) in run.slices() {
                layout.hashers[pages.block.index()].data(offset, slice);
            }
            let first = run.offset / PAGE_SIZE;
            (first..first + run.pages).for_each(|page| layout.bitmaps[pages.block.index()].set(page));
        }
        Ok(())
    }

    fn zero(&self, _stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> towline_migration::Result<()> {
        let layout = self.layout()?;
        let bitmap = &layout.bitmaps[block.index()];
        for run in offsets.chunk_by(|first, second| first + PAGE_SIZE == *second) {
            layout.hashers[block.index()].zero(run[0], run.len() as u64 * PAGE_SIZE);
            for &offset in run {
                if bitmap.clear(offset / PAGE_SIZE) {
                    self.clear(&layout.frame.blocks[block.index()], offset, PAGE_SIZE)?;
                }
            }
        }
        Ok(())
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> towline_migration::Result<()> {
        let block = &self.layout()?.frame.blocks[page.block.index()];
        let at = block.mapped.expect("laid out").pages_offset + page.offset;
        Ok(self.with_file(|file| file.file().read_exact_at(content, at))?)
    }

    fn device_state(&self, state: DeviceState) -> towline_migration::Result<()> {
        *lock(&self.device_state) = Some(state);
        Ok(())
    }

    fn commit(&self) -> towline_migration::Result<()> {
        Ok(self.complete()?)
    }

    fn publish(&self) -> towline_migration::Result<()> {
        self.rename()?;
        self.published.store(true, Ordering::Relaxed);
        Ok(())
    }
}
