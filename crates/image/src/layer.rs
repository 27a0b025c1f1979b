//! A single image file: opened, mapped and checked.
//!
//! Not a whole guest: an image without a base has one layer, an incremental image has its own and its bases'
//! ([`crate::Image`]).

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use towline_protocol::configuration::{self, Configuration, MAPPED_RAM};
use towline_protocol::destination::{StreamDecoder, StreamItem};
use towline_protocol::device_state::DeviceState;
use towline_protocol::mapped_ram::{MappedRamHeader, bitmap_bytes};
use towline_protocol::ram::{self, RamFlags};
use towline_protocol::section::{SectionType, put_footer};
use towline_protocol::{BlockIndex, PageRef, RamBlock, Reader};

use crate::manifest::{Base, ImageProperties, Manifest, sidecar_path};
use crate::regular_file::open_regular;
use crate::sidecar::{self, ManifestName};
use crate::sys::Mapping;
use crate::{Error, Result, seal};

/// Capability listed in an incremental image. No QEMU knows it, so none loads such an image: it would read
/// the base's chunks as zeros.
pub(crate) const INCREMENTAL: &str = "x-towline-incremental";
/// Maximum bytes needed to decode an item of the stream.
const WINDOW_BYTES: usize = 1 << 20;
/// Maximum number of times that an image is opened again because it was replaced in between.
const OPEN_ATTEMPTS_MAX: usize = 16;

/// A mapped image file.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<File>,
    pub(crate) map: Mapping,
    /// Without the capabilities that only concern the file.
    pub(crate) configuration: Configuration,
    pub(crate) section_id: u32,
    pub(crate) blocks: Vec<RamBlock>,
    pub(crate) device_state: DeviceState,
    pub(crate) device_state_offset: u64,
    pub(crate) manifest: Option<Manifest>,
    /// Name under which the manifest was found.
    pub(crate) manifest_name: ManifestName,
}

impl Layer {
    /// Opens and checks the file at `path`: its structure, and that its manifest, if there is one, belongs to
    /// it.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut names = sidecar::file_ids(path);
        for _ in 0..OPEN_ATTEMPTS_MAX {
            let opened = Self::open_once(path);
            if matches!(&opened, Ok(layer) if layer.manifest.is_some()) {
                return opened;
            }
            // Another image may have been renamed to it between reading file and manifest.
            let now = sidecar::file_ids(path);
            if now == names {
                return opened;
            }
            names = now;
        }
        Self::open_once(path)
    }

    fn open_once(path: &Path) -> Result<Self> {
        let io = |source| Error::Read { path: path.into(), source };
        let file = open_regular(path, OFlags::empty())
            .map_err(|error| if is_socket(path) { Error::Socket { path: path.into() } } else { io(error) })?;
        let file = file.ok_or_else(|| Error::NotAFile { path: path.into() })?;
        let map = Mapping::new(&file).map_err(io)?;
        let head = Head::read(path, &map);
        check_not_truncated(path, &file, &map)?;
        let head = head?;
        let device_state = DeviceState::parse(&map[head.end..]);
        check_not_truncated(path, &file, &map)?;
        let device_state = device_state.map_err(|source| Error::DeviceState {
            path: path.into(),
            offset: head.end as u64,
            source,
        })?;
        let mut layer = Self {
            path: path.into(),
            file: Arc::new(file),
            map,
            configuration: head.configuration,
            section_id: head.section_id,
            blocks: head.blocks,
            device_state,
            device_state_offset: head.end as u64,
            manifest: None,
            manifest_name: ManifestName::Final,
        };
        let found = sidecar::find(path, &layer.facts());
        layer.check_not_truncated()?;
        if let Some((manifest, name)) = found? {
            (layer.manifest, layer.manifest_name) = (Some(manifest), name);
        }
        match (head.is_incremental, layer.base()) {
            (true, None) => Err(Error::NoBase { path: path.into(), sidecar: sidecar_path(path) }),
            _ => Ok(layer),
        }
    }

    /// The manifest.
    ///
    /// # Errors
    /// [`Error::NoManifest`].
    pub(crate) fn required_manifest(&self) -> Result<&Manifest> {
        let missing = || Error::NoManifest { path: self.path.clone(), sidecar: sidecar_path(&self.path) };
        self.manifest.as_ref().ok_or_else(missing)
    }

    /// The base as recorded in the manifest.
    pub(crate) fn base(&self) -> Option<&Base> {
        self.manifest.as_ref()?.base.as_ref()
    }

    /// The file's bytes of these pages.
    pub(crate) fn bytes(&self, page: PageRef, length: u64) -> &[u8] {
        let start = (self.mapped(page.block).pages_offset + page.offset) as usize;
        &self.map[start..start + length as usize]
    }

    /// Maps these pages at once, which is much cheaper than a fault for each; kernels before 5.14 fault them
    /// one by one.
    pub(crate) fn populate(&self, page: PageRef, length: u64) {
        let start = (self.mapped(page.block).pages_offset + page.offset) as usize;
        self.map.populate(start, length as usize);
    }

    /// A 64-bit word of a block's bitmap.
    pub(crate) fn word(&self, block: BlockIndex, word: u64) -> u64 {
        let start = (self.mapped(block).bitmap_offset + 8 * word) as usize;
        let bytes = self.map[start..start + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    }

    /// Compares everything except the pages with the manifest: bitmaps, page counts, the end of the memory,
    /// the device state.
    ///
    /// # Errors
    /// The manifest is missing, or one of these differs.
    pub(crate) fn verify_frame(&self) -> Result<()> {
        let verified = self.verify_against(self.required_manifest()?);
        self.check_not_truncated().and(verified)
    }

    fn verify_against(&self, manifest: &Manifest) -> Result<()> {
        for (index, block) in self.blocks.iter().enumerate() {
            let mapped = block.mapped.expect("every block of a mapped-ram file has a position");
            let (at, length) = (mapped.bitmap_offset as usize, bitmap_bytes(block.length, mapped.page_size));
            manifest.check_bitmap(&self.path, index, &self.map[at..at + length as usize])?;
        }
        let expected = memory_end(self.section_id);
        let at = (self.device_state_offset as usize).saturating_sub(expected.len());
        if self.map.get(at..).is_none_or(|bytes| !bytes.starts_with(&expected)) {
            return Err(Error::MemoryEnd { path: self.path.clone(), offset: at as u64 });
        }
        // Read again from the file: other readers may not get the bytes that were read when it was opened.
        let bytes = &self.map[self.device_state_offset as usize..];
        Ok(manifest.verify_device_state(&self.path, bytes)?)
    }

    /// Checks that the file was not truncated since it was opened.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub(crate) fn check_not_truncated(&self) -> Result<()> {
        check_not_truncated(&self.path, &self.file, &self.map)
    }

    /// Locks the file while it is open: no towline replaces it.
    ///
    /// # Errors
    /// A writer is replacing it. A filesystem without locks is not an error.
    pub(crate) fn lock(&self) -> Result<()> {
        match flock(&*self.file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Err(Error::BaseBusy {
                path: self.path.clone(),
                holder: crate::lock_holder::lock_holder(&self.file),
            }),
            _ => Ok(()),
        }
    }

    fn mapped(&self, block: BlockIndex) -> MappedRamHeader {
        self.blocks[block.index()].mapped.expect("every block of a mapped-ram file has a position")
    }

    fn facts(&self) -> ImageProperties<'_> {
        let first = self.blocks.first().and_then(|block| block.mapped);
        ImageProperties {
            machine_type: &self.configuration.machine_type,
            blocks: &self.blocks,
            head: &self.map[..first.map_or(0, |mapped| mapped.bitmap_offset as usize)],
            device_state: self.device_state.bytes(),
            image_bytes: self.map.len() as u64,
            seal: seal::read(&self.map, &self.blocks),
        }
    }
}

/// Bytes between the last page and the device state: empty sections.
pub(crate) fn memory_end(section_id: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    ram::put_flag(RamFlags::EOS, &mut bytes);
    put_footer(&mut bytes, section_id);
    bytes.push(SectionType::End as u8);
    bytes.extend_from_slice(&section_id.to_be_bytes());
    ram::put_flag(RamFlags::EOS, &mut bytes);
    put_footer(&mut bytes, section_id);
    bytes
}

fn check_not_truncated(path: &Path, file: &File, map: &Mapping) -> Result<()> {
    let expected = map.len() as u64;
    let found = file.metadata().map_or(0, |metadata| metadata.len());
    if map.is_lost() || found < expected {
        Err(Error::Lost { path: path.into(), found, expected })
    } else {
        Ok(())
    }
}

/// Everything before the device state.
struct Head {
    configuration: Configuration,
    section_id: u32,
    blocks: Vec<RamBlock>,
    /// Offset of the device state.
    end: usize,
    is_incremental: bool,
}

impl Head {
    fn read(path: &Path, map: &[u8]) -> Result<Self> {
        check_magic(path, map)?;
        let truncated = |awaiting| Error::Truncated { path: path.into(), length: map.len() as u64, awaiting };
        // Pages lie between the headers of blocks.
        let after_pages =
            |at: usize, awaiting| truncated(if at > map.len() { "the pages" } else { awaiting });
        let mut state = StreamDecoder::default();
        let mut configuration = Configuration::default();
        let (mut at, mut section_id) = (0, 0);
        loop {
            state.at_file_offset(at as u64);
            let window = map.get(at..).ok_or_else(|| after_pages(at, state.awaits()))?;
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
                Some(StreamItem::Configuration(found)) if found.is_mapped_ram() => configuration = found,
                Some(StreamItem::Configuration(_)) => return Err(Error::NotMappedRam { path: path.into() }),
                Some(StreamItem::SectionStart(section)) => section_id = section.id,
                Some(StreamItem::Block(block)) => {
                    let mapped = block.mapped.expect("mapped-ram is in the configuration");
                    at = usize::try_from(mapped.end(block.length)).map_err(|_| truncated(state.awaits()))?;
                }
                Some(StreamItem::DeviceState) => {
                    let is_incremental = configuration.capabilities.iter().any(|name| name == INCREMENTAL);
                    configuration
                        .capabilities
                        .retain(|name| ![MAPPED_RAM, INCREMENTAL].contains(&name.as_str()));
                    let blocks = state.blocks().to_vec();
                    return Ok(Self { configuration, section_id, blocks, end: at, is_incremental });
                }
                Some(
                    StreamItem::Page(_)
                    | StreamItem::ZeroPage(_)
                    | StreamItem::Xbzrle { .. }
                    | StreamItem::Flush,
                ) => {
                    return Err(Error::NotMappedRam { path: path.into() });
                }
                None | Some(_) => {}
            }
        }
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Distinguishes other files from damaged images.
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
