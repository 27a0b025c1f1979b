//! An image and its base images, read as one.
//!
//! ```text
//!   new.img    chunk  0 · · 3 · ·      stored where it differs from old.img
//!   old.img    chunk  · 1 · · · ·      stored where it differs from first.img
//!   first.img  chunk  0 1 2 3 4 5      whole
//!   read:             new old first new first first
//! ```
//!
//! Every manifest has the checksums of the whole guest, so no table says which file stores a chunk: a layer
//! stores it if its hash differs from the next layer's. A base is identified by its content
//! ([`Manifest::content`](crate::Manifest::content)), not by its path; if it was changed or replaced it is
//! refused, and the error has both hashes.
//!
//! Limits: [`LAYERS_MAX`]; one byte of memory per chunk. All layers have the same blocks.

use std::path::{Path, PathBuf};

use towline_protocol::{PageRef, RamBlock};

use crate::checksum::{CHUNK_BYTES, ChunkHash};
use crate::layer::Layer;
use crate::manifest::{Base, StoredBlock, named_by, sidecar_path};
use crate::sidecar::staged_path;
use crate::{Error, Result};

/// Maximum number of files of a chain: each costs descriptors, mappings and checks at every restore.
pub const LAYERS_MAX: usize = 16;

/// A chain of at least one layer.
#[derive(Debug)]
pub(crate) struct LayerChain {
    /// The image itself first, the whole image last.
    pub(crate) layers: Vec<Layer>,
    /// Index of the layer of each chunk, by block; empty for a single layer.
    layer_indexes: Vec<Vec<u8>>,
}

impl LayerChain {
    /// Opens the image at `path` and its base images.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let top = Layer::open(path)?;
        let mut layers = vec![top];
        while let Some(next) = layers.last().map(next_layer).transpose()?.flatten() {
            if layers.len() == LAYERS_MAX {
                return Err(Error::ChainTooLong { path: path.into(), limit: LAYERS_MAX });
            }
            layers.push(next);
        }
        let layer_indexes = match layers.len() {
            1 => Vec::new(),
            _ => (0..layers[0].blocks.len()).map(|block| layer_indexes(&layers, block)).collect(),
        };
        Ok(Self { layers, layer_indexes })
    }

    /// Checks that no file was truncated since it was opened.
    pub(crate) fn check_not_truncated(&self) -> Result<()> {
        self.layers.iter().try_for_each(Layer::check_not_truncated)
    }

    /// The image itself.
    pub(crate) fn top(&self) -> &Layer {
        self.layers.first().expect("a chain has a layer")
    }

    /// The layer that stores the chunk of this page.
    pub(crate) fn layer_of(&self, page: PageRef) -> &Layer {
        let indexes = self.layer_indexes.get(page.block.index());
        let index = indexes.map_or(0, |indexes| indexes[(page.offset / CHUNK_BYTES) as usize]);
        &self.layers[usize::from(index)]
    }

    /// Number of chunks that are read from this layer; chunks of zeros are not read.
    pub(crate) fn chunks_in(&self, layer: usize) -> usize {
        let manifest = self.top().manifest.as_ref();
        let blocks = manifest.map(|manifest| &manifest.blocks[..]).unwrap_or_default();
        let is_in_layer = |block: usize, chunk: usize| match self.layer_indexes.get(block) {
            Some(indexes) => usize::from(indexes[chunk]) == layer,
            None => layer == 0,
        };
        let in_block = |(index, block): (usize, &StoredBlock)| {
            let chunks = block.chunks.iter().enumerate();
            chunks.filter(|(chunk, hash)| **hash != ChunkHash::Zero && is_in_layer(index, *chunk)).count()
        };
        blocks.iter().enumerate().map(in_block).sum()
    }
}

/// Checks that a guest with these blocks can be stored on `base`.
pub(crate) fn check_blocks(path: &Path, blocks: &[RamBlock], base: &Layer) -> Result<()> {
    let shown = |block: &RamBlock| format!("{:?} of {} bytes", block.name, block.length);
    let [found, expected] = [blocks, &base.blocks].map(|list| list.iter().map(shown).collect::<Vec<_>>());
    if found == expected {
        return Ok(());
    }
    let differs = found.iter().zip(&expected).find(|(found, expected)| found != expected);
    let (found, expected) = match differs {
        Some((found, expected)) => (found.clone(), expected.clone()),
        None => (format!("{} RAM blocks", found.len()), format!("{} RAM blocks", expected.len())),
    };
    Err(Error::BaseDiffers { path: path.into(), base: base.path.clone(), found, expected })
}

fn next_layer(layer: &Layer) -> Result<Option<Layer>> {
    let Some(base) = layer.base() else { return Ok(None) };
    let path = resolve_base(&layer.path, base);
    let next = Layer::open(&path).map_err(|source| Error::BaseUnusable {
        path: layer.path.clone(),
        base: path.clone(),
        content: base.content,
        source: Box::new(source),
    })?;
    let found = next.manifest.as_ref().map(crate::Manifest::content);
    if found != Some(base.content) {
        return Err(Error::OtherBase {
            path: layer.path.clone(),
            base: path,
            found: found.map_or_else(|| "unknown (it has no manifest)".into(), |found| found.to_string()),
            expected: base.content,
        });
    }
    check_blocks(&layer.path, &layer.blocks, &next)?;
    Ok(Some(next))
}

/// The files that an image is based on, as named in their manifests; no image is opened or compared. For a
/// process that must know in advance which directories it will read. A manifest that cannot be read ends the
/// list: the error is reported when the image is opened.
pub fn base_paths(image: &Path) -> Vec<PathBuf> {
    named_bases(image).paths
}

/// Files without which an image cannot be run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needed {
    /// Its base; those of both manifests while it is being replaced.
    pub bases: Vec<PathBuf>,
    /// Disks that stay as they were at its instant.
    pub disks: Vec<PathBuf>,
}

/// The files that an image's manifests name, whichever of them belongs to it; none without a manifest. No image is opened or compared.
///
/// # Errors
/// A manifest cannot be read.
pub fn needed_by(image: &Path) -> crate::manifest::Result<Needed> {
    let mut needed = Needed::default();
    for manifest in [sidecar_path(image), staged_path(image)] {
        let named = named_by(&manifest)?;
        needed.disks.extend(named.disks());
        needed.bases.extend(named.base.map(|base| resolve_base(image, &base)));
    }
    Ok(needed)
}

/// Returns true if a file has a manifest, as each image has that this crate has stored.
pub fn has_manifest(image: &Path) -> bool {
    sidecar_path(image).exists() || staged_path(image).exists()
}

/// Base images as their manifests name them.
#[derive(Debug, Default)]
pub(crate) struct NamedBases {
    /// The files, each once.
    pub(crate) paths: Vec<PathBuf>,
    /// Error of the first manifest that cannot be read: there may be more bases.
    pub(crate) unread: Option<crate::manifest::Error>,
}

/// As [`base_paths`], with the error of a manifest that cannot be read.
pub(crate) fn named_bases(image: &Path) -> NamedBases {
    let mut named = NamedBases::default();
    let (mut next, mut read) = (Some(image.to_owned()), 0);
    while let Some(last) = next.filter(|_| named.paths.len() < LAYERS_MAX) {
        // Both manifests are read, whichever of them belongs to the image.
        for manifest in [sidecar_path(&last), staged_path(&last)] {
            match named_by(&manifest) {
                Ok(found) => {
                    let base = found.base.map(|base| resolve_base(&last, &base));
                    let new = base.filter(|base| !named.paths.contains(base));
                    named.paths.extend(new);
                }
                Err(error) => {
                    named.unread.get_or_insert(error);
                }
            }
        }
        next = named.paths.get(read).cloned();
        read += 1;
    }
    named
}

/// Path of a base: as recorded in the image, or, if that does not exist, beside the image.
pub(crate) fn resolve_base(image: &Path, base: &Base) -> PathBuf {
    let path = Path::new(&base.path);
    let directory = image.parent().unwrap_or(Path::new(""));
    match path.file_name() {
        Some(name) if path.is_absolute() && !path.exists() => directory.join(name),
        _ => directory.join(path),
    }
}

/// Index of the layer of each chunk of a block.
fn layer_indexes(layers: &[Layer], block: usize) -> Vec<u8> {
    let manifests = layers.iter().filter_map(|layer| layer.manifest.as_ref());
    let lists: Vec<&[ChunkHash]> = manifests.map(|manifest| &manifest.blocks[block].chunks[..]).collect();
    let index = |chunk: usize| {
        if lists[0][chunk] == ChunkHash::Zero {
            // A hole of the image itself.
            return 0;
        }
        let stored = lists.windows(2).position(|lists| lists[0][chunk] != lists[1][chunk]);
        u8::try_from(stored.unwrap_or(layers.len() - 1)).expect("bounded by LAYERS_MAX")
    };
    (0..lists.first().map_or(0, |hashes| hashes.len())).map(index).collect()
}
