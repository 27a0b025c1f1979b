//! Storing an incremental image: chunks that equal those of the base image are not kept.
//!
//! Pages arrive in any order and from several threads, and a chunk's hash is final only when all of them
//! have. So all pages are written, and at the end the chunks whose hashes equal the base's are deallocated
//! (holes). The cost is the disk space of a whole image while it is stored, and one system call for each run
//! of such chunks; nothing is read back.
//!
//! Deallocation cannot be undone. The base is therefore checked again first: if it was replaced or removed,
//! the image becomes a whole one. It is checked again just before the image is renamed. Its files are locked
//! until then, so no towline replaces them; if another program does, the image is discarded and the source
//! keeps its guest.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use schemars::JsonSchema;
use serde::Serialize;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::chain::{LAYERS_MAX, LayerChain, check_blocks, resolve_base};
use crate::checksum::{ChunkHash, chunk_runs};
use crate::journal::{self, PublicationBug};
use crate::layer::Layer;
use crate::manifest::{Base, Manifest, sidecar_path};
use crate::regular_file::FileId;
use crate::sidecar::staged_path;
use crate::{Error, Result};

/// Number of chunks that an incremental image stores itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Increment {
    /// Chunks that differ from the base's.
    #[serde(rename = "chunks-stored")]
    pub stored: usize,
    /// Chunks that equal the base's and are not zero.
    #[serde(rename = "chunks-in-base")]
    pub in_base: usize,
}

/// The base of an image that is being stored. Its files stay open and locked until the image is complete.
#[derive(Debug)]
pub(crate) struct BaseImage {
    chain: LayerChain,
    /// Entry for the image's manifest.
    pub(crate) reference: Base,
    image_path: PathBuf,
    /// Path of the base as given.
    pub(crate) path: PathBuf,
    /// Files of the chain and their manifests when the chain was opened; `None` for one that did not exist.
    opened: Vec<Option<FileState>>,
}

#[derive(Debug, PartialEq, Eq)]
struct FileState {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileState {
    fn at(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

impl BaseImage {
    /// Opens the image at `base` as the base of a new one at `image`.
    pub(crate) fn open(image: &Path, base: &Path) -> Result<Self> {
        let chain = LayerChain::open(base)?;
        if chain.layers.len() == LAYERS_MAX {
            return Err(Error::ChainTooLong { path: image.into(), limit: LAYERS_MAX });
        }
        let replaced = FileId::at(image);
        let is_replaced = |layer: &&Layer| replaced.is_some() && FileId::of_file(&layer.file) == replaced;
        if let Some(layer) = chain.layers.iter().find(is_replaced) {
            return Err(Error::OwnBase { path: image.into(), base: layer.path.clone() });
        }
        let content = chain.top().required_manifest()?.content();
        chain.layers.iter().try_for_each(Layer::lock)?;
        let reference = Base { path: reference(image, base)?, content };
        let (image_path, path) = (image.to_owned(), base.to_owned());
        let mut base_image = Self { chain, reference, image_path, path, opened: Vec::new() };
        // Taken before the base is opened a second time: every later change is detected.
        base_image.opened = base_image.states();
        if base_image.content_matches() {
            Ok(base_image)
        } else {
            Err(Error::BaseChanged { path: image.into(), base: base.into() })
        }
    }

    /// Returns true if the image will be readable: its base has not changed and is still in its place.
    pub(crate) fn is_unchanged(&self) -> bool {
        journal::is_on(PublicationBug::BaseNotRechecked)
            || self.states() == self.opened
            || self.content_matches()
    }

    /// States of all files through which the image will be read.
    fn states(&self) -> Vec<Option<FileState>> {
        let layers = self.chain.layers.iter().map(|layer| layer.path.clone());
        let layers = layers.chain([resolve_base(&self.image_path, &self.reference)]);
        layers
            .flat_map(|path| [sidecar_path(&path), staged_path(&path), path].map(|path| FileState::at(&path)))
            .collect()
    }

    /// Opens the base as a reader of the image will, and compares its content.
    fn content_matches(&self) -> bool {
        let chain = LayerChain::open(&resolve_base(&self.image_path, &self.reference));
        let manifest = chain.ok().and_then(|chain| chain.top().manifest.as_ref().map(Manifest::content));
        manifest == Some(self.reference.content)
    }

    /// Hash of a chunk of the base.
    pub(crate) fn chunk_hash(&self, block: BlockIndex, chunk: usize) -> ChunkHash {
        let manifest = self.chain.top().manifest.as_ref().expect("checked by `open`");
        manifest.chunk_hash(block, chunk)
    }

    /// Returns true if a page of the base has content.
    pub(crate) fn has_content(&self, page: PageRef) -> bool {
        let bit = page.offset / PAGE_SIZE;
        self.chain.top().word(page.block, bit / 64) >> (bit % 64) & 1 == 1
    }

    /// The file of the chain that stores the chunk of this page, and the page's offset in it.
    pub(crate) fn place_of(&self, page: PageRef) -> (&File, u64) {
        let layer = self.chain.layer_of(page);
        let pages_offset = layer.blocks[page.block.index()].mapped.expect("stored").pages_offset;
        (&layer.file, pages_offset + page.offset)
    }

    /// Refuses a guest whose RAM blocks differ from the base's.
    pub(crate) fn check(&self, image: &Path, blocks: &[RamBlock]) -> Result<()> {
        check_blocks(image, blocks, self.chain.top())
    }

    /// Ranges of a block of `length` bytes whose chunks equal the base's. Counts the chunks in them and outside.
    pub(crate) fn unchanged_ranges(
        &self,
        block: BlockIndex,
        length: u64,
        hashes: &[ChunkHash],
        increment: &mut Increment,
    ) -> Vec<Range<u64>> {
        chunk_runs(length, |chunk| match hashes[chunk] {
            ChunkHash::Zero => false,
            hash if self.chunk_hash(block, chunk) == hash => {
                increment.in_base += 1;
                true
            }
            _ => {
                increment.stored += 1;
                false
            }
        })
    }
}

impl Drop for BaseImage {
    fn drop(&mut self) {
        // Explicitly, as a process that is being started may have copies of the descriptors.
        for layer in &self.chain.layers {
            let _ = flock(&*layer.file, FlockOperation::Unlock);
        }
    }
}

/// A base in the image's own directory is recorded by its name alone, so the directory can be moved as a
/// whole.
fn reference(image: &Path, base: &Path) -> Result<String> {
    let io = |source| Error::Read { path: base.into(), source };
    let base = base.canonicalize().map_err(io)?;
    let directory = match image.parent() {
        Some(parent) if parent != Path::new("") => parent.canonicalize().map_err(io)?,
        _ => PathBuf::from(".").canonicalize().map_err(io)?,
    };
    let path = if base.parent() == Some(&directory) {
        base.file_name().map(Path::new).unwrap_or(&base)
    } else {
        &base
    };
    path.to_str().map(str::to_owned).ok_or_else(|| Error::BasePath { path: base.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Existing;
    use crate::atomic_file::AtomicFile;
    use crate::testing::{TestGuest, directory};

    #[test]
    fn a_base_is_free_although_a_process_that_is_being_started_has_its_descriptors() {
        let place = directory();
        let [image, base] = ["image", "base"].map(|name| place.path().join(name));
        TestGuest::new(3, 1).store(&base, Existing::Refuse, None).unwrap();
        let opened = BaseImage::open(&image, &base).unwrap();
        let inherited: Vec<_> = opened.chain.layers.iter().map(|layer| layer.file.try_clone()).collect();
        let error = AtomicFile::open(&base, Existing::Replace).unwrap_err();
        assert!(matches!(error, crate::atomic_file::Error::InUse { .. }), "{error}");
        drop(opened);
        AtomicFile::open(&base, Existing::Replace).unwrap();
        drop(inherited);
    }
}
