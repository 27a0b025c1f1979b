//! One image file by itself: opened, mapped and checked.
//!
//! What it is not: a guest. A whole image is one layer, an incremental one is a layer on others ([`crate::Image`]).

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Advice, Mmap};
use rustix::fs::OFlags;
use towline_protocol::configuration::{self, Configuration, MAPPED_RAM};
use towline_protocol::destination::{Destination, Event};
use towline_protocol::device_state::DeviceState;
use towline_protocol::mapped_ram::MappedRamHeader;
use towline_protocol::{BlockIndex, PageRef, RamBlock, Reader};

use crate::manifest::{Base, Found, Manifest, sidecar_path};
use crate::{Error, Result, sys};

/// The capability that an incremental image lists. No QEMU knows it, so none loads such an image by itself: it would take
/// what is in the base for zeros.
pub(crate) const INCREMENTAL: &str = "x-towline-incremental";
/// More than any item of the stream needs to be decoded.
const WINDOW_BYTES: usize = 1 << 20;

/// A mapped image file.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<File>,
    pub(crate) map: Mmap,
    /// Without what is the file's own.
    pub(crate) configuration: Configuration,
    pub(crate) section_id: u32,
    pub(crate) blocks: Vec<RamBlock>,
    pub(crate) device_state: DeviceState,
    pub(crate) device_state_offset: u64,
    pub(crate) manifest: Option<Manifest>,
}

impl Layer {
    /// Opens and checks the file at `path`: its structure, and that its manifest, if there is one, is its own.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Read { path: path.into(), source };
        // Without NONBLOCK a FIFO of that name could keep us here for ever.
        let mut options = File::options();
        let file = options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path);
        let file = file.map_err(io)?;
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
        let layer = Self {
            path: path.into(),
            file: Arc::new(file),
            map,
            configuration: head.configuration,
            section_id: head.section_id,
            blocks: head.blocks,
            device_state,
            device_state_offset: head.end as u64,
            manifest,
        };
        layer.check_manifest()?;
        match (head.is_incremental, layer.base()) {
            (true, None) => Err(Error::NoBase { path: path.into(), sidecar: sidecar_path(path) }),
            _ => Ok(layer),
        }
    }

    /// What it is based on.
    pub(crate) fn base(&self) -> Option<&Base> {
        self.manifest.as_ref()?.base()
    }

    /// The file's bytes of these pages.
    pub(crate) fn bytes(&self, page: PageRef, length: u64) -> &[u8] {
        let start = (self.mapped(page.block).pages_offset + page.offset) as usize;
        &self.map[start..start + length as usize]
    }

    /// Has them mapped at once, which costs a fraction of a fault each; a kernel before 5.14 does it fault by fault.
    pub(crate) fn populate(&self, page: PageRef, length: u64) {
        let start = (self.mapped(page.block).pages_offset + page.offset) as usize;
        let _ = self.map.advise_range(Advice::PopulateRead, start, length as usize);
    }

    /// 64 bits of a block's bitmap.
    pub(crate) fn word(&self, block: BlockIndex, word: u64) -> u64 {
        let start = (self.mapped(block).bitmap_offset + 8 * word) as usize;
        let bytes = self.map[start..start + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    }

    /// Whether the device state is what the manifest says.
    pub(crate) fn verify_device_state(&self) -> Result<()> {
        let missing = || Error::NoManifest { path: self.path.clone(), sidecar: sidecar_path(&self.path) };
        let manifest = self.manifest.as_ref().ok_or_else(missing)?;
        Ok(manifest.verify_device_state(&self.path, self.device_state.bytes())?)
    }

    fn mapped(&self, block: BlockIndex) -> MappedRamHeader {
        self.blocks[block.index()].mapped.expect("every block of a mapped-ram file has its place")
    }

    fn check_manifest(&self) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        let first = self.blocks.first().and_then(|block| block.mapped);
        let found = Found {
            machine_type: &self.configuration.machine_type,
            blocks: &self.blocks,
            head: &self.map[..first.map_or(0, |mapped| mapped.bitmap_offset as usize)],
            device_state: self.device_state.bytes(),
            image_bytes: self.map.len() as u64,
        };
        Ok(manifest.check(&self.path, &found)?)
    }
}

/// What stands before the device state.
struct Head {
    configuration: Configuration,
    section_id: u32,
    blocks: Vec<RamBlock>,
    /// Where the device state begins.
    end: usize,
    is_incremental: bool,
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
                    let is_incremental = configuration.capabilities.iter().any(|name| name == INCREMENTAL);
                    configuration
                        .capabilities
                        .retain(|name| ![MAPPED_RAM, INCREMENTAL].contains(&name.as_str()));
                    let blocks = state.blocks().to_vec();
                    return Ok(Self { configuration, section_id, blocks, end: at, is_incremental });
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
