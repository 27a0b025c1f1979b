//! Reading a stored guest: a mapped-ram file, ours or stock QEMU's, as a [`Guest`] that the engine can send.
//!
//! The file is mapped. Zero pages by the bitmap are never touched, the others go from the page cache into the
//! channel without a copy in userspace. With [`Image::verify_on_read`] each 2 MiB is hashed just before it is
//! first sent, as delivered, with zeros where the bitmap has no bit. A restore of a damaged image fails
//! before the destination has its device state, so no guest runs from it. The same holds for a file that is
//! truncated during the restore ([`Error::Lost`]).
//!
//! An incremental image is read through its base images, chunk by chunk ([`chain`](crate::chain)). Any number
//! of threads and copies can read one [`Image`] at the same time.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use towline_channel::IoBuf;
use towline_migration::{Extent, ExtentKind, Guest, Snapshot, parallel};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::chain::LayerChain;
use crate::checksum::{self, CHUNK_BYTES, CorruptChunk};
use crate::delivered::{self, ByteRun};
use crate::layer::Layer;
use crate::manifest::{Manifest, sidecar_path};
use crate::sidecar::{ManifestName, staged_path};
use crate::verified::Verified;
use crate::{Error, Result};

/// A stored guest, mapped.
#[derive(Debug)]
pub struct Image {
    chain: LayerChain,
    verify: bool,
    verified: Verified,
    /// Of an incremental image.
    whole: Option<WholeBase>,
}

/// The whole image at the end of a chain, which a guest can map.
#[derive(Debug)]
struct WholeBase {
    image: Box<Image>,
    /// Ranges of each block whose chunks differ from it.
    difference: Vec<Vec<Range<u64>>>,
}

/// Numbers of pages of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PageCount {
    /// Pages with content.
    #[serde(rename = "plain-pages")]
    pub plain: u64,
    /// Pages that are zero.
    #[serde(rename = "zero-pages")]
    pub zero: u64,
}

/// One file of a chain.
#[derive(Debug, Clone, Copy)]
pub struct LayerInfo<'a> {
    /// Path of the file.
    pub path: &'a Path,
    /// The open file.
    pub file: &'a File,
    /// `None` for a whole image that stock QEMU made.
    pub manifest: Option<&'a Manifest>,
    /// Number of the guest's chunks that are read from it.
    pub chunks: usize,
}

impl Image {
    /// Opens and checks the image at `path` and its base images: their structure, and that each manifest
    /// belongs to its image.
    ///
    /// # Errors
    /// The file cannot be read, is not a mapped-ram file, is truncated, or has another image's manifest; a
    /// base is missing or was changed.
    pub fn open(path: &Path) -> Result<Self> {
        let chain = LayerChain::open(path)?;
        let verified = Verified::new(&chain.top().blocks);
        let whole = match &chain.layers[..] {
            [_] => None,
            [top, .., last] => Some(WholeBase::open(top, &last.path)?),
            [] => unreachable!("a chain has a layer"),
        };
        Ok(Self { chain, verify: false, verified, whole })
    }

    /// The whole image that the guest is but for its [`Guest::difference`]: this one, or the last of its chain.
    pub fn whole(&self) -> &Self {
        self.whole.as_ref().map_or(self, |whole| &whole.image)
    }

    /// Verifies page bitmaps, page counts and device state now, and every chunk before it is first sent.
    ///
    /// # Errors
    /// The manifest is missing, or one of these differs from it.
    pub fn verify_on_read(mut self) -> Result<Self> {
        self.top().verify_frame()?;
        self.verify = true;
        Ok(self)
    }

    /// Compares the whole image with its manifest, using `threads` threads; `progress` receives the bytes of
    /// each chunk. Each chunk is verified only once while the image is open, for all callers.
    ///
    /// # Errors
    /// The manifest is missing, or page bitmaps or counts, the device state, or a chunk as delivered differ
    /// from it.
    pub fn verify(&self, threads: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        self.top().verify_frame()?;
        let chunks: Vec<_> = self.chunks(CHUNK_BYTES).collect();
        let verify = |&(page, length)| self.verify_chunk(page).map(|()| progress(length));
        parallel::for_each(&chunks, threads, || verify)?;
        self.check_not_truncated()
    }

    /// Checks that no file was truncated since it was opened: lost pages read as zeros.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn check_not_truncated(&self) -> Result<()> {
        self.chain.check_not_truncated()
    }

    /// Returns true if the file has the hash of its manifest's text, so comparing with the manifest verifies
    /// that too. Images of earlier versions have none.
    pub fn is_sealed(&self) -> bool {
        self.manifest().is_some_and(|manifest| manifest.image.seal.is_some())
    }

    /// Path of the manifest, if there is one: `NAME.manifest.json`, or the staged one after a crash.
    pub fn manifest_path(&self) -> Option<PathBuf> {
        self.manifest()?;
        Some(match self.top().manifest_name {
            ManifestName::Final => sidecar_path(self.path()),
            ManifestName::Staged => staged_path(self.path()),
        })
    }

    /// Path by which the image was opened.
    pub fn path(&self) -> &Path {
        &self.top().path
    }

    /// The open file.
    pub fn file(&self) -> &Arc<File> {
        &self.top().file
    }

    /// Opens the same file again: unlike a duplicate, with its own position.
    ///
    /// # Errors
    /// The kernel cannot open another file.
    pub fn reopen(&self) -> Result<File> {
        let failed = |source| Error::Read { path: self.path().into(), source };
        // By its descriptor: the name may be another image's by now.
        File::open(format!("/proc/self/fd/{}", self.file().as_raw_fd())).map_err(failed)
    }

    /// The file's length in bytes.
    pub fn length(&self) -> u64 {
        self.top().map.len() as u64
    }

    /// The manifest; `None` for an image written by stock QEMU.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.top().manifest.as_ref()
    }

    /// Returns true if a part of the memory is in other images, so QEMU cannot load the image itself.
    pub fn is_incremental(&self) -> bool {
        self.chain.layers.len() > 1
    }

    /// The file and those of its base images, the whole image last.
    pub fn layers(&self) -> impl Iterator<Item = LayerInfo<'_>> {
        self.chain.layers.iter().enumerate().map(|(index, layer)| LayerInfo {
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

    /// Offset of the device state in the file.
    pub fn device_state_offset(&self) -> u64 {
        self.top().device_state_offset
    }

    /// The block list, with each block's position in the file.
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

    /// Content of `length` bytes from `page` on, within one chunk; `None` if they are zero. Verified after
    /// [`Image::verify_on_read`].
    ///
    /// # Errors
    /// The chunk differs from the manifest.
    #[cfg(feature = "store")]
    pub(crate) fn content(&self, page: PageRef, length: u64) -> Result<Option<Vec<u8>>> {
        if self.verify {
            self.verify_chunk(PageRef { offset: page.offset - page.offset % CHUNK_BYTES, ..page })?;
        }
        let runs = self.runs(page, length);
        if runs.iter().all(|run| !run.has_content) {
            return Ok(None);
        }
        // A copy, so bytes cannot change to zeros between hashing and compression.
        let bytes = delivered::copy(self.bytes(page, length), &runs);
        self.check_not_truncated()?;
        Ok(Some(bytes))
    }

    /// Statistics of a migration in which QEMU loaded the file itself: its pages, none of which towline read.
    pub fn qemu_load_statistics(&self) -> Snapshot {
        let mut loaded = Snapshot::default();
        for (index, block) in (0..).map(BlockIndex).zip(self.ram_blocks()) {
            let PageCount { plain, zero } = self.count_pages(index);
            loaded.total += block.length;
            loaded.normal += plain;
            loaded.normal_bytes += plain * PAGE_SIZE;
            loaded.duplicate += zero;
        }
        loaded
    }

    fn top(&self) -> &Layer {
        self.chain.top()
    }

    /// The memory in chunks of this length: the first page of each, and its length.
    pub(crate) fn chunks(&self, chunk_bytes: u64) -> impl Iterator<Item = (PageRef, u64)> + '_ {
        (0..).map(BlockIndex).zip(self.ram_blocks()).flat_map(move |(block, ram)| {
            (0..ram.length)
                .step_by(chunk_bytes as usize)
                .map(move |offset| (PageRef { block, offset }, chunk_bytes.min(ram.length - offset)))
        })
    }

    /// Verifies the chunk that begins at `page`.
    fn verify_chunk(&self, page: PageRef) -> Result<()> {
        let Some(manifest) = self.manifest() else { return Ok(()) };
        let block = &self.ram_blocks()[page.block.index()];
        let chunk = (page.offset / CHUNK_BYTES) as usize;
        let length = CHUNK_BYTES.min(block.length - page.offset);
        self.verified.verify_once(page.block, chunk, || {
            let found = delivered::hash(self.bytes(page, length), &self.runs(page, length));
            let layer = self.chain.layer_of(page);
            if layer.map.is_lost() {
                layer.check_not_truncated()?;
            }
            let expected = manifest.chunk_hash(page.block, chunk);
            if found == expected {
                return Ok(());
            }
            let source = Box::new(CorruptChunk { block: block.name.clone(), chunk, found, expected });
            Err(Error::Corrupt { path: layer.path.clone(), source })
        })
    }

    /// Runs of content and zeros in `length` bytes from `page` on.
    fn runs(&self, page: PageRef, length: u64) -> Vec<ByteRun> {
        let (mut runs, mut at) = (Vec::new(), 0);
        while at < length {
            let extent = self.extent_within(PageRef { offset: page.offset + at, ..page }, length - at);
            let end = (at + extent.pages * PAGE_SIZE).min(length);
            runs.push(ByteRun {
                range: at as usize..end as usize,
                has_content: extent.kind == ExtentKind::Data,
            });
            at = end;
        }
        runs
    }

    /// As [`Guest::extent`], of at most `length` bytes, so a short request does not scan the whole bitmap.
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

    /// The bytes of these pages, which are within one chunk of an incremental image. Zero pages read as zeros
    /// too, since they are holes.
    fn bytes(&self, page: PageRef, length: u64) -> &[u8] {
        let in_chunk = CHUNK_BYTES - page.offset % CHUNK_BYTES;
        assert!(length <= in_chunk || !self.is_incremental(), "a unit is within one chunk");
        self.chain.layer_of(page).bytes(page, length)
    }
}

impl WholeBase {
    fn open(top: &Layer, path: &Path) -> Result<Self> {
        let image = Box::new(Image::open(path)?);
        let differs = |block: BlockIndex, chunk: usize| {
            let hash =
                |manifest: Option<&Manifest>| manifest.map(|manifest| manifest.chunk_hash(block, chunk));
            let (here, there) = (hash(top.manifest.as_ref()), hash(image.manifest()));
            here.is_none() || here != there
        };
        let ranges = |(block, ram): (BlockIndex, &RamBlock)| {
            checksum::chunk_runs(ram.length, |chunk| differs(block, chunk))
        };
        let difference = (0..).map(BlockIndex).zip(&top.blocks).map(ranges).collect();
        Ok(Self { image, difference })
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

    fn difference(&self, block: BlockIndex) -> &[Range<u64>] {
        self.whole.as_ref().map_or(&[], |whole| &whole.difference[block.index()])
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
                layer.check_not_truncated()?;
            }
        }
        if !self.verify {
            return Ok(());
        }
        // Whole chunks, even for a part of one.
        let first = page.offset - page.offset % CHUNK_BYTES;
        let mut chunks = (first..page.offset + length).step_by(CHUNK_BYTES as usize);
        Ok(chunks.try_for_each(|offset| self.verify_chunk(PageRef { offset, ..page }))?)
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        IoBuf::from(self.bytes(page, length))
    }

    fn immutable(&self, page: PageRef, length: u64) -> Option<&[u8]> {
        Some(self.bytes(page, length))
    }

    fn device_state(&self) -> towline_migration::Result<Vec<u8>> {
        // All memory was sent. This check keeps a guest from running with zeros instead of lost pages.
        self.check_not_truncated()?;
        Ok(self.devices().bytes().to_vec())
    }
}

/// The error of a failed write to the image at `path`.
pub(crate) fn write_error(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    move |source| Error::Write { path: path.into(), source }
}
