//! Reading a stored guest: a mapped-ram file, ours or stock QEMU's, as a [`Guest`] that the engine can send.
//!
//! The file is mapped. A page that the bitmap calls zero is never touched, one that it has goes from the page cache into
//! the channel without a copy in userspace. With [`Image::verify_on_read`] each 2 MiB is hashed just before it is sent,
//! and a restore of a damaged image fails before the destination has its device state, so no guest runs from it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use memmap2::{Advice, Mmap};
use towline_channel::IoBuf;
use towline_migration::{Extent, ExtentKind, Guest, Snapshot};
use towline_protocol::configuration::{self, Configuration, MAPPED_RAM};
use towline_protocol::destination::{Destination, Event};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock, Reader};

use crate::checksum::{self, CHUNK_BYTES, Content};
use crate::manifest::{Found, Manifest, sidecar_path};
use crate::{Error, Result, sys};

/// More than any item of the stream needs to be decoded.
const WINDOW_BYTES: usize = 1 << 20;

/// A stored guest, mapped.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    file: Arc<File>,
    map: Mmap,
    configuration: Configuration,
    section_id: u32,
    blocks: Vec<RamBlock>,
    device_state: DeviceState,
    device_state_offset: u64,
    manifest: Option<Manifest>,
    verify: bool,
}

/// How many of a block's pages have content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCount {
    /// Pages with content.
    pub plain: u64,
    /// Pages that are zero.
    pub zero: u64,
}

impl Image {
    /// Opens and checks the image at `path`: its structure, and that its manifest, if there is one, is its own.
    ///
    /// # Errors
    /// The file cannot be read, is no mapped-ram file, ends too early, or has another image's manifest beside it.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Read { path: path.into(), source };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(Error::NotAFile { path: path.into() });
        }
        let map = sys::map(&file).map_err(io)?;
        let head = Head::read(path, &map)?;
        let tail = &map[head.end..];
        let device_state = DeviceState::parse(tail).map_err(|source| Error::DeviceState {
            path: path.into(),
            offset: head.end as u64,
            source,
        })?;
        let manifest = Manifest::load(path, &head.blocks)?;
        let image = Self {
            path: path.into(),
            file: Arc::new(file),
            map,
            configuration: head.configuration,
            section_id: head.section_id,
            blocks: head.blocks,
            device_state,
            device_state_offset: head.end as u64,
            manifest,
            verify: false,
        };
        image.check_manifest()?;
        Ok(image)
    }

    /// Has every chunk compared with the manifest before it is sent, and the device state at once.
    ///
    /// # Errors
    /// There is no manifest, or the device state is not what it says.
    pub fn verify_on_read(mut self) -> Result<Self> {
        self.verify_device_state()?;
        self.verify = true;
        Ok(self)
    }

    /// Compares the whole image with its manifest, with `threads` threads; `progress` is told of bytes done.
    ///
    /// # Errors
    /// There is no manifest; or the first chunk in the image's order that differs, or the device state.
    pub fn verify(&self, threads: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        self.verify_device_state()?;
        let chunks: Vec<_> = self.chunks().collect();
        let next = AtomicUsize::new(0);
        let worker = || {
            while let Some(&(page, length)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.verify_chunk(page, length)?;
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
        &self.path
    }

    /// The open file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The file's length in bytes.
    pub fn length(&self) -> u64 {
        self.map.len() as u64
    }

    /// `None` for an image that stock QEMU made.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// The stored device state.
    pub fn devices(&self) -> &DeviceState {
        &self.device_state
    }

    /// Where in the file it begins.
    pub fn device_state_offset(&self) -> u64 {
        self.device_state_offset
    }

    /// The blocks with their places in the file.
    pub fn ram_blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Counts a block's pages.
    pub fn count_pages(&self, block: BlockIndex) -> PageCount {
        let pages = self.blocks[block.index()].pages();
        let words = (0..pages.div_ceil(64)).map(|word| self.word(block, word));
        let plain: u64 = words.map(|word| u64::from(word.count_ones())).sum();
        PageCount { plain: plain.min(pages), zero: pages.saturating_sub(plain) }
    }

    /// What it means that a QEMU loaded the file itself: its pages, none of which we have touched.
    pub fn loaded_by_qemu(&self) -> Snapshot {
        let count =
            |index| self.count_pages(BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX")));
        let counts = || (0..self.blocks.len()).map(count);
        let normal: u64 = counts().map(|count| count.plain).sum();
        Snapshot {
            total: self.blocks.iter().map(|block| block.length).sum(),
            normal,
            duplicate: counts().map(|count| count.zero).sum(),
            normal_bytes: normal * PAGE_SIZE,
            ..Snapshot::default()
        }
    }

    fn chunks(&self) -> impl Iterator<Item = (PageRef, u64)> + '_ {
        self.blocks.iter().enumerate().flat_map(|(index, block)| {
            let index = BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX"));
            (0..block.length)
                .step_by(CHUNK_BYTES as usize)
                .map(move |offset| (PageRef { block: index, offset }, CHUNK_BYTES.min(block.length - offset)))
        })
    }

    fn check_manifest(&self) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        let first = self.blocks.first().and_then(|block| block.mapped);
        let found = Found {
            machine_type: &self.configuration.machine_type,
            blocks: &self.blocks,
            head: &self.map[..first.map_or(0, |mapped| mapped.bitmap_offset as usize)],
            device_state: self.device_state.bytes(),
            image_bytes: self.length(),
        };
        Ok(manifest.check(&self.path, &found)?)
    }

    fn verify_device_state(&self) -> Result<()> {
        let missing = || Error::NoManifest { path: self.path.clone(), sidecar: sidecar_path(&self.path) };
        let manifest = self.manifest.as_ref().ok_or_else(missing)?;
        Ok(manifest.verify_device_state(&self.path, self.device_state.bytes())?)
    }

    fn verify_chunk(&self, page: PageRef, length: u64) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        let chunk = (page.offset / CHUNK_BYTES) as usize;
        let extent = self.extent(page);
        let content = match extent.kind == ExtentKind::Zero && extent.pages * PAGE_SIZE >= length {
            true => Content::Zero,
            false => Content::Bytes(self.bytes(page, length)),
        };
        let block = &self.blocks[page.block.index()];
        let expected = manifest.chunk_hash(page.block, chunk);
        checksum::verify(&block.name, chunk, content, expected)
            .map_err(|source| Error::Corrupt { path: self.path.clone(), source: Box::new(source) })
    }

    /// The file's bytes of these pages; also those that are zero read so, because holes do.
    fn bytes(&self, page: PageRef, length: u64) -> &[u8] {
        let start = (self.mapped(page.block).pages_offset + page.offset) as usize;
        &self.map[start..start + length as usize]
    }

    fn mapped(&self, block: BlockIndex) -> towline_protocol::mapped_ram::MappedRamHeader {
        self.blocks[block.index()].mapped.expect("every block of a mapped-ram file has its place")
    }

    /// 64 bits of a block's bitmap.
    fn word(&self, block: BlockIndex, word: u64) -> u64 {
        let start = (self.mapped(block).bitmap_offset + 8 * word) as usize;
        let bytes = self.map[start..start + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    }
}

impl Guest for Image {
    fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    fn ram_section_id(&self) -> u32 {
        self.section_id
    }

    fn extent(&self, page: PageRef) -> Extent {
        let first = page.offset / PAGE_SIZE;
        let last = self.blocks[page.block.index()].pages();
        let content = self.word(page.block, first / 64) >> (first % 64) & 1 == 1;
        let mut at = first;
        while at < last {
            let word = self.word(page.block, at / 64) >> (at % 64);
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
        let start = (self.mapped(page.block).pages_offset + page.offset) as usize;
        let extent = self.extent(page);
        if extent.kind == ExtentKind::Data || extent.pages * PAGE_SIZE < length {
            // Mapping many pages at once costs a fraction of a fault each; a kernel before 5.14 does it fault by fault.
            let _ = self.map.advise_range(Advice::PopulateRead, start, length as usize);
        }
        match self.verify {
            true => self.verify_chunk(page, length).map_err(towline_migration::Error::guest),
            false => Ok(()),
        }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        IoBuf::from(self.bytes(page, length))
    }

    fn immutable(&self, page: PageRef, length: u64) -> Option<&[u8]> {
        Some(self.bytes(page, length))
    }

    fn device_state(&self) -> towline_migration::Result<Vec<u8>> {
        Ok(self.device_state.bytes().to_vec())
    }
}

/// What stands before the device state.
struct Head {
    configuration: Configuration,
    section_id: u32,
    blocks: Vec<RamBlock>,
    /// Where the device state begins.
    end: usize,
}

impl Head {
    fn read(path: &Path, map: &[u8]) -> Result<Self> {
        check_magic(path, map)?;
        let truncated = |awaiting| Error::Truncated { path: path.into(), length: map.len() as u64, awaiting };
        let mut state = Destination::default();
        let mut configuration = Configuration::default();
        let (mut at, mut section_id) = (0, 0);
        loop {
            state.at_file_offset(at as u64);
            let window = map.get(at..).ok_or_else(|| truncated(state.awaits()))?;
            let mut reader = Reader::new(&window[..window.len().min(WINDOW_BYTES)]);
            let (next, event) = state.handle(&mut reader).map_err(|source| Error::Format {
                path: path.into(),
                offset: at as u64,
                source,
            })?;
            let taken = reader.position();
            (state, at) = (next, at + taken);
            match event {
                None if taken == 0 => return Err(truncated(state.awaits())),
                Some(Event::Configuration(found)) if found.is_mapped_ram() => configuration = found,
                Some(Event::Configuration(_)) => return Err(Error::NotMappedRam { path: path.into() }),
                Some(Event::SectionStart(section)) => section_id = section.id,
                Some(Event::Block(block)) => {
                    let mapped = block.mapped.expect("asked for by the configuration");
                    at = usize::try_from(mapped.end(block.length)).map_err(|_| truncated(state.awaits()))?;
                }
                Some(Event::DeviceState) => {
                    configuration.capabilities.retain(|name| name != MAPPED_RAM);
                    let blocks = state.blocks().to_vec();
                    return Ok(Self { configuration, section_id, blocks, end: at });
                }
                Some(Event::Page(_) | Event::ZeroPage(_) | Event::Xbzrle { .. } | Event::Flush) => {
                    return Err(Error::NotMappedRam { path: path.into() });
                }
                None | Some(_) => {}
            }
        }
    }
}

/// Tells a file that was never an image from a damaged one.
fn check_magic(path: &Path, map: &[u8]) -> Result<()> {
    let magic = configuration::MAGIC.to_be_bytes();
    let first = &map[..map.len().min(magic.len())];
    if !first.is_empty() && magic.starts_with(first) {
        return Ok(());
    }
    let found = match first {
        [] => "it is empty".into(),
        first => format!("it begins with \"{}\"", first.escape_ascii()),
    };
    Err(Error::NotAnImage { path: path.into(), found })
}

/// How an I/O error on an image is told.
pub(crate) fn write_error(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    move |source| Error::Write { path: path.into(), source }
}
