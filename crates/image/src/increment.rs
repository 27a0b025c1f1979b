//! Storing a guest on a base: what need not be kept because the base has it.
//!
//! Pages come in any order and from several threads, and a chunk's hash is known for good only when all have come. So all are
//! written, and at the end the chunks whose hashes are the base's are given back to the filesystem (holes). What that costs
//! is the room of a whole image while it is stored, and one system call for each run of such chunks; nothing is read.
//!
//! What is given back is gone. So the base is looked at again before that: if it is another image by now, or not there, the image
//! becomes a whole one. It is looked at once more when the image is about to appear, and locked meanwhile, so that no towline
//! replaces it; what another program does in between drops the image, and its source keeps the guest.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use towline_protocol::RamBlock;

use crate::beside::pending_path;
use crate::chain::{Chain, LAYERS_MAX, check_blocks, place_of};
use crate::checksum::{CHUNK_BYTES, ChunkHash};
use crate::journal::{self, Fault};
use crate::manifest::{Base, Manifest, sidecar_path};
use crate::{Error, Result};

/// How much of a guest an incremental image holds itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Increment {
    /// Chunks that differ from the base's.
    pub stored: usize,
    /// Chunks that are the base's, and not zero.
    pub in_base: usize,
}

/// What an image that is being stored is based on. Its files stay open, and locked, until the image is complete.
#[derive(Debug)]
pub(crate) struct Ground {
    chain: Chain,
    reference: Base,
    /// The image that is stored, and its base.
    paths: [PathBuf; 2],
    /// The files of the chain and their manifests, as they were when the chain was opened.
    seen: Vec<Seen>,
}

/// A file by its name, and what it was; `None` where there was none.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    path: PathBuf,
    state: Option<State>,
}

#[derive(Debug, PartialEq, Eq)]
struct State {
    device: u64,
    number: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Seen {
    fn now(path: &Path) -> Self {
        let state = |found: std::fs::Metadata| State {
            device: found.dev(),
            number: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        };
        Self { path: path.into(), state: std::fs::metadata(path).ok().map(state) }
    }
}

impl Ground {
    /// The image at `base`, for a new one at `image`.
    pub(crate) fn open(image: &Path, base: &Path) -> Result<Self> {
        let chain = Chain::open(base)?;
        if chain.layers().len() == LAYERS_MAX {
            return Err(Error::ChainTooLong { path: image.into(), limit: LAYERS_MAX });
        }
        let replaced = std::fs::metadata(image).ok().map(|found| (found.dev(), found.ino()));
        let is_replaced = |file: &std::fs::File| {
            file.metadata().is_ok_and(|found| Some((found.dev(), found.ino())) == replaced)
        };
        if let Some(layer) = chain.layers().iter().find(|layer| is_replaced(&layer.file)) {
            return Err(Error::OwnBase { path: image.into(), base: layer.path.clone() });
        }
        let missing = || Error::NoManifest { path: base.into(), sidecar: sidecar_path(base) };
        let content = chain.top().manifest.as_ref().ok_or_else(missing)?.content();
        chain.layers().iter().try_for_each(crate::layer::Layer::lock)?;
        let reference = Base { path: reference(image, base)?, content };
        let (paths, seen) = ([image.to_owned(), base.to_owned()], Vec::new());
        let mut ground = Self { chain, reference, paths, seen };
        // Before another look at what was opened: whatever changes from here on is seen.
        ground.seen = ground.look();
        match ground.has_content() {
            true => Ok(ground),
            false => Err(Error::BaseChanged { path: image.into(), base: base.into() }),
        }
    }

    /// Whether the image will be readable: its base is still what it was, where it was.
    pub(crate) fn is_still_there(&self) -> bool {
        journal::is_on(Fault::BaseNotSeenAgain) || self.look() == self.seen || self.has_content()
    }

    /// The base, as it was named.
    pub(crate) fn path(&self) -> &Path {
        &self.paths[1]
    }

    /// All that the image will be read through, by its names.
    fn look(&self) -> Vec<Seen> {
        let layers = self.chain.layers().iter().map(|layer| layer.path.clone());
        let layers = layers.chain([place_of(&self.paths[0], &self.reference)]);
        layers
            .flat_map(|path| [sidecar_path(&path), pending_path(&path), path])
            .map(|path| Seen::now(&path))
            .collect()
    }

    /// Opens the base as the image will, and compares what it holds.
    fn has_content(&self) -> bool {
        let chain = Chain::open(&place_of(&self.paths[0], &self.reference));
        let manifest = chain.ok().and_then(|chain| chain.top().manifest.as_ref().map(Manifest::content));
        manifest == Some(self.reference.content)
    }

    /// What the manifest says of it.
    pub(crate) fn reference(&self) -> &Base {
        &self.reference
    }

    /// Refuses another guest than the base's.
    pub(crate) fn check(&self, image: &Path, blocks: &[RamBlock]) -> Result<()> {
        check_blocks(image, blocks, self.chain.top())
    }

    /// The bytes of a block that the base has, as runs of chunks, and how many of its chunks are kept and not.
    pub(crate) fn unchanged(
        &self,
        block: usize,
        length: u64,
        hashes: &[ChunkHash],
    ) -> (Vec<Range<u64>>, Increment) {
        let manifest = self.chain.top().manifest.as_ref();
        let base = manifest.and_then(|manifest| manifest.blocks().get(block));
        let base = base.map_or(&[][..], |block| &block.chunks);
        let (mut runs, mut increment) = (Vec::<Range<u64>>::new(), Increment { stored: 0, in_base: 0 });
        for (chunk, hash) in hashes.iter().enumerate().filter(|(_, hash)| **hash != ChunkHash::Zero) {
            if base.get(chunk) != Some(hash) {
                increment.stored += 1;
                continue;
            }
            increment.in_base += 1;
            let start = chunk as u64 * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(length);
            match runs.last_mut().filter(|run| run.end == start) {
                Some(run) => run.end = end,
                None => runs.push(start..end),
            }
        }
        (runs, increment)
    }
}

/// A base in the image's own directory goes by its name, so that both can be moved together.
fn reference(image: &Path, base: &Path) -> Result<String> {
    let io = |source| Error::Read { path: base.into(), source };
    let base = base.canonicalize().map_err(io)?;
    let directory = match image.parent() {
        Some(parent) if parent != Path::new("") => parent.canonicalize().map_err(io)?,
        _ => PathBuf::from(".").canonicalize().map_err(io)?,
    };
    let path = match base.parent() == Some(&directory) {
        true => base.file_name().map(Path::new).unwrap_or(&base),
        false => &base,
    };
    path.to_str().map(str::to_owned).ok_or_else(|| Error::BasePath { path: base.clone() })
}
