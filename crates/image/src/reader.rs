//! Reading a stored guest: a mapped-ram file, ours or stock QEMU's, as a [`Guest`] that the engine can send.
//!
//! The file is mapped. A page that the bitmap calls zero is never touched, one that it has goes from the page cache into
//! the channel without a copy in userspace. With [`Image::verify_on_read`] each 2 MiB is hashed just before it is first sent,
//! and a restore of a damaged image fails before the destination has its device state, so no guest runs from it.
//!
//! An incremental image is read through the images that it is based on, chunk by chunk ([`chain`](crate::chain)). Any number of
//! threads and copies read one [`Image`] at the same time.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use towline_channel::IoBuf;
use towline_migration::{Extent, ExtentKind, Guest, Snapshot};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::chain::Chain;
use crate::checksum::{self, CHUNK_BYTES, Content};
use crate::layer::Layer;
use crate::manifest::Manifest;
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

    /// Has every chunk compared with the manifest before it is first sent, and the device state at once.
    ///
    /// # Errors
    /// There is no manifest, or the device state is not what it says.
    pub fn verify_on_read(mut self) -> Result<Self> {
        self.top().verify_device_state()?;
        self.verify = true;
        Ok(self)
    }

    /// Compares the whole image with its manifest, with `threads` threads; `progress` is told of bytes done. Each chunk is
    /// compared once for as long as the image is open, whoever asks.
    ///
    /// # Errors
    /// There is no manifest; or the first chunk in the image's order that differs, or the device state.
    pub fn verify(&self, threads: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        self.top().verify_device_state()?;
        let chunks: Vec<_> = self.chunks().collect();
        let next = AtomicUsize::new(0);
        let worker = || {
            while let Some(&(page, length)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.verify_chunk(page)?;
                progress(length);
            }
            Ok(())
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("hashing does not panic"))
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
    pub(crate) fn content(&self, block: BlockIndex, offset: u64, length: u64) -> Result<Option<&[u8]>> {
        let page = PageRef { block, offset };
        if self.verify {
            self.verify_chunk(PageRef { offset: offset - offset % CHUNK_BYTES, ..page })?;
        }
        let extent = self.extent(page);
        let is_zero = extent.kind == ExtentKind::Zero && extent.pages * PAGE_SIZE >= length;
        Ok((!is_zero).then(|| self.bytes(page, length)))
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
            let extent = self.extent(page);
            let content = match extent.kind == ExtentKind::Zero && extent.pages * PAGE_SIZE >= length {
                true => Content::Zero,
                false => Content::Bytes(self.bytes(page, length)),
            };
            let path = || self.chain.layer_of(page).path.clone();
            checksum::verify(&block.name, chunk, content, manifest.chunk_hash(page.block, chunk))
                .map_err(|source| Error::Corrupt { path: path(), source: Box::new(source) })
        })
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
        let first = page.offset / PAGE_SIZE;
        let last = self.ram_blocks()[page.block.index()].pages();
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

    fn prepare(&self, page: PageRef, length: u64) -> towline_migration::Result<()> {
        let extent = self.extent(page);
        if extent.kind == ExtentKind::Data || extent.pages * PAGE_SIZE < length {
            self.chain.layer_of(page).populate(page, length);
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
        Ok(self.devices().bytes().to_vec())
    }
}

/// How an I/O error on an image is told.
pub(crate) fn write_error(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    move |source| Error::Write { path: path.into(), source }
}
