//! Reading a stored guest: a mapped-ram file, ours or stock QEMU's, as a [`Guest`] that the engine can send.
//!
//! The file is mapped. A page that the bitmap calls zero is never touched, one that it has goes from the page cache into
//! the channel without a copy in userspace. With [`Image::verify_on_read`] each 2 MiB is hashed just before it is first sent, as it
//! is delivered: zeros where the bitmap says so. A restore of a damaged image fails before the destination has its device state,
//! so no guest runs from it. The same goes for a file that is cut short meanwhile ([`Error::Lost`]).
//!
//! An incremental image is read through the images that it is based on, chunk by chunk ([`chain`](crate::chain)). Any number of
//! threads and copies read one [`Image`] at the same time.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use towline_channel::IoBuf;
use towline_migration::{Extent, ExtentKind, Guest, Snapshot};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::beside::{Settled, pending_path};
use crate::chain::Chain;
use crate::checksum::{self, CHUNK_BYTES};
use crate::delivered::{self, Run};
use crate::layer::Layer;
use crate::manifest::{Manifest, sidecar_path};
use crate::verified::Verified;
use crate::{Error, Result};

/// A stored guest, mapped.
#[derive(Debug)]
pub struct Image {
    chain: Chain,
    verify: bool,
    verified: Verified,
}

/// How many of a block's pages have content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCount {
    /// Pages with content.
    pub plain: u64,
    /// Pages that are zero.
    pub zero: u64,
}

/// One file of a chain.
#[derive(Debug, Clone, Copy)]
pub struct LayerInfo<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// The open file.
    pub file: &'a File,
    /// `None` for a whole image that stock QEMU made.
    pub manifest: Option<&'a Manifest>,
    /// Chunks of the guest that are read from it.
    pub chunks: usize,
}

impl Image {
    /// Opens and checks the image at `path`: its structure, that its manifest, if there is one, is its own, and the same of all
    /// that it is based on.
    ///
    /// # Errors
    /// The file cannot be read, is no mapped-ram file, ends too early, or has another image's manifest beside it; a base is
    /// missing or was changed.
    pub fn open(path: &Path) -> Result<Self> {
        let chain = Chain::open(path)?;
        let verified = Verified::new(&chain.top().blocks);
        Ok(Self { chain, verify: false, verified })
    }

    /// Has every chunk compared with the manifest before it is first sent, and all else at once: page bitmaps, page counts, device
    /// state.
    ///
    /// # Errors
    /// There is no manifest, or one of these is not what it says.
    pub fn verify_on_read(mut self) -> Result<Self> {
        self.top().verify_frame()?;
        self.verify = true;
        Ok(self)
    }

    /// Compares the whole image with its manifest, with `threads` threads; `progress` is told of bytes done. Each chunk is
    /// compared once for as long as the image is open, whoever asks.
    ///
    /// # Errors
    /// There is no manifest; or what differs: page bitmaps and counts, the device state, a chunk as it is delivered.
    pub fn verify(&self, threads: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        self.top().verify_frame()?;
        let chunks: Vec<_> = self.chunks().collect();
        let next = AtomicUsize::new(0);
        let worker = || {
            while let Some(&(page, length)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.verify_chunk(page)?;
                progress(length);
            }
            Ok::<(), Error>(())
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("hashing does not panic"))
        })?;
        self.check_intact()
    }

    /// Whether nothing of its files went away since they were opened: what is lost reads as zeros, which are no guest's.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn check_intact(&self) -> Result<()> {
        self.chain.check_intact()
    }

    /// Whether the hash of its manifest's text is in the file, so that a comparison with the manifest covers that too. Images
    /// of earlier versions have none.
    pub fn is_sealed(&self) -> bool {
        self.manifest().is_some_and(|manifest| manifest.image().seal.is_some())
    }

    /// Where its manifest is, if there is one: `NAME.manifest.json`, or beside that what a crash left there.
    pub fn manifest_path(&self) -> Option<PathBuf> {
        self.manifest()?;
        Some(match self.top().settled {
            Settled::Named => sidecar_path(self.path()),
            Settled::Pending => pending_path(self.path()),
        })
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.top().path
    }

    /// The open file.
    pub fn file(&self) -> &Arc<File> {
        &self.top().file
    }

    /// The same file opened once more: with a position of its own, which a duplicate has not.
    ///
    /// # Errors
    /// The kernel opens no further file.
    pub fn reopen(&self) -> Result<File> {
        let failed = |source| Error::Read { path: self.path().into(), source };
        // By its descriptor, as its name may be another image's by now.
        File::open(format!("/proc/self/fd/{}", self.file().as_raw_fd())).map_err(failed)
    }

    /// The file's length in bytes.
    pub fn length(&self) -> u64 {
        self.top().map.len() as u64
    }

    /// `None` for an image that stock QEMU made.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.top().manifest.as_ref()
    }

    /// Whether a part of the memory is in other images, so that QEMU cannot load it by itself.
    pub fn is_incremental(&self) -> bool {
        self.chain.layers().len() > 1
    }

    /// The file and those that it is based on, the whole image last.
    pub fn layers(&self) -> impl Iterator<Item = LayerInfo<'_>> {
        self.chain.layers().iter().enumerate().map(|(index, layer)| LayerInfo {
            path: &layer.path,
            file: &layer.file,
            manifest: layer.manifest.as_ref(),
            chunks: self.chain.chunks_in(index),
        })
    }

    /// The stored device state.
    pub fn devices(&self) -> &DeviceState {
        &self.top().device_state
    }

    /// Where in the file it begins.
    pub fn device_state_offset(&self) -> u64 {
        self.top().device_state_offset
    }

    /// The blocks with their places in the file.
    pub fn ram_blocks(&self) -> &[RamBlock] {
        &self.top().blocks
    }

    /// Counts a block's pages.
    pub fn count_pages(&self, block: BlockIndex) -> PageCount {
        let pages = self.ram_blocks()[block.index()].pages();
        let words = (0..pages.div_ceil(64)).map(|word| self.top().word(block, word));
        let plain: u64 = words.map(|word| u64::from(word.count_ones())).sum();
        PageCount { plain: plain.min(pages), zero: pages.saturating_sub(plain) }
    }

    /// The content of `length` bytes of a block, within one chunk; `None` where they are zero. Compared with the manifest where that
    /// was asked for.
    ///
    /// # Errors
    /// The chunk is not what the manifest says.
    #[cfg(feature = "store")]
    pub(crate) fn content(&self, block: BlockIndex, offset: u64, length: u64) -> Result<Option<Vec<u8>>> {
        let page = PageRef { block, offset };
        if self.verify {
            self.verify_chunk(PageRef { offset: offset - offset % CHUNK_BYTES, ..page })?;
        }
        let runs = self.runs(page, length);
        if runs.iter().all(|run| !run.has_content) {
            return Ok(None);
        }
        // A copy, as what is hashed and then compressed must not become zeros in between.
        let bytes = delivered::copy(self.bytes(page, length), &runs);
        self.check_intact()?;
        Ok(Some(bytes))
    }

    /// What it means that a QEMU loaded the file itself: its pages, none of which we have touched.
    pub fn loaded_by_qemu(&self) -> Snapshot {
        let count =
            |index| self.count_pages(BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX")));
        let counts = || (0..self.ram_blocks().len()).map(count);
        let normal: u64 = counts().map(|count| count.plain).sum();
        Snapshot {
            total: self.ram_blocks().iter().map(|block| block.length).sum(),
            normal,
            duplicate: counts().map(|count| count.zero).sum(),
            normal_bytes: normal * PAGE_SIZE,
            ..Snapshot::default()
        }
    }

    fn top(&self) -> &Layer {
        self.chain.top()
    }

    fn chunks(&self) -> impl Iterator<Item = (PageRef, u64)> + '_ {
        self.ram_blocks().iter().enumerate().flat_map(|(index, block)| {
            let index = BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX"));
            (0..block.length)
                .step_by(CHUNK_BYTES as usize)
                .map(move |offset| (PageRef { block: index, offset }, CHUNK_BYTES.min(block.length - offset)))
        })
    }

    /// Compares the chunk that begins at `page`.
    fn verify_chunk(&self, page: PageRef) -> Result<()> {
        let Some(manifest) = self.manifest() else { return Ok(()) };
        let block = &self.ram_blocks()[page.block.index()];
        let chunk = (page.offset / CHUNK_BYTES) as usize;
        let length = CHUNK_BYTES.min(block.length - page.offset);
        self.verified.once(page.block, chunk, || {
            let found = delivered::hash(self.bytes(page, length), &self.runs(page, length));
            let layer = self.chain.layer_of(page);
            if layer.map.is_lost() {
                layer.check_intact()?;
            }
            checksum::verify(&block.name, chunk, found, manifest.chunk_hash(page.block, chunk))
                .map_err(|source| Error::Corrupt { path: layer.path.clone(), source: Box::new(source) })
        })
    }

    /// Which of `length` bytes from `page` on have content.
    fn runs(&self, page: PageRef, length: u64) -> Vec<Run> {
        let (mut runs, mut at) = (Vec::new(), 0);
        while at < length {
            let extent = self.extent_within(PageRef { offset: page.offset + at, ..page }, length - at);
            let end = (at + extent.pages * PAGE_SIZE).min(length);
            runs.push(Run { range: at as usize..end as usize, has_content: extent.kind == ExtentKind::Data });
            at = end;
        }
        runs
    }

    /// As [`Guest::extent`], of at most `length` bytes: who wants no more does not look through the whole bitmap.
    fn extent_within(&self, page: PageRef, length: u64) -> Extent {
        let first = page.offset / PAGE_SIZE;
        let last = self.ram_blocks()[page.block.index()].pages().min(first + length.div_ceil(PAGE_SIZE));
        let content = self.top().word(page.block, first / 64) >> (first % 64) & 1 == 1;
        let mut at = first;
        while at < last {
            let word = self.top().word(page.block, at / 64) >> (at % 64);
            let word = if content { word } else { !word };
            let run = u64::from(word.trailing_ones()).min(64 - at % 64);
            at += run;
            if run == 0 || !at.is_multiple_of(64) {
                break;
            }
        }
        let kind = if content { ExtentKind::Data } else { ExtentKind::Zero };
        Extent { pages: at.min(last) - first, kind }
    }

    /// The bytes of these pages, which lie within one chunk of an incremental image; also those that are zero read so, because
    /// holes do.
    fn bytes(&self, page: PageRef, length: u64) -> &[u8] {
        let in_chunk = CHUNK_BYTES - page.offset % CHUNK_BYTES;
        assert!(length <= in_chunk || !self.is_incremental(), "a unit lies within one chunk");
        self.chain.layer_of(page).bytes(page, length)
    }
}

impl Guest for Image {
    fn configuration(&self) -> &Configuration {
        &self.top().configuration
    }

    fn blocks(&self) -> &[RamBlock] {
        self.ram_blocks()
    }

    fn ram_section_id(&self) -> u32 {
        self.top().section_id
    }

    fn extent(&self, page: PageRef) -> Extent {
        self.extent_within(page, self.ram_blocks()[page.block.index()].length - page.offset)
    }

    fn prepare(&self, page: PageRef, length: u64) -> towline_migration::Result<()> {
        let extent = self.extent_within(page, length);
        if extent.kind == ExtentKind::Data || extent.pages * PAGE_SIZE < length {
            let layer = self.chain.layer_of(page);
            layer.populate(page, length);
            if layer.map.is_lost() {
                layer.check_intact().map_err(towline_migration::Error::guest)?;
            }
        }
        if !self.verify {
            return Ok(());
        }
        // Whole chunks, however little of them is asked for.
        let first = page.offset - page.offset % CHUNK_BYTES;
        (first..page.offset + length)
            .step_by(CHUNK_BYTES as usize)
            .try_for_each(|offset| self.verify_chunk(PageRef { offset, ..page }))
            .map_err(towline_migration::Error::guest)
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        IoBuf::from(self.bytes(page, length))
    }

    fn immutable(&self, page: PageRef, length: u64) -> Option<&[u8]> {
        Some(self.bytes(page, length))
    }

    fn device_state(&self) -> towline_migration::Result<Vec<u8>> {
        // All memory was sent. Without this no guest runs that got zeros for pages which went away.
        self.check_intact().map_err(towline_migration::Error::guest)?;
        Ok(self.devices().bytes().to_vec())
    }
}

/// How an I/O error on an image is told.
pub(crate) fn write_error(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    move |source| Error::Write { path: path.into(), source }
}
