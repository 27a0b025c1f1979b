//! The images of a prefix, and the chunks that they share.
//!
//! Reads every index, one at a time, lists every chunk, and changes nothing. Memory: about 100 bytes for each
//! chunk of the prefix, and one index. The result is not a snapshot: an image that is stored or removed at
//! the same time may be missing or have missing chunks.

use std::collections::{HashMap, HashSet};
use std::time::SystemTime;

use towline_channel::Cancel;

use super::access::Store;
use super::garbage::{ChunkTotals, image_keys};
use super::lease::{LeaseEntry, LeaseKind, LeaseOwner, leases};
use super::{Error, Result, chunk};
use crate::index::{INDEX_BYTES_MAX, Index};
use crate::location::Location;
use crate::manifest::{Digest, Timestamp};

/// Contents of a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Catalog {
    /// Images, by name.
    pub images: Vec<CatalogEntry>,
    /// Chunks referenced by at least one of them.
    pub used: ChunkTotals,
    /// Chunks that none of them references: garbage, and chunks of uploads in progress.
    pub unreferenced: ChunkTotals,
    /// Number of active uploads.
    pub uploads: usize,
}

/// An image of a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogEntry {
    /// Name below the prefix.
    pub name: String,
    /// Content of its index; the error's text if it cannot be read.
    pub summary: Result<StoredImageSummary, String>,
    /// Descriptions of the processes that read it, including those killed within the last hour.
    pub readers: Vec<String>,
}

/// Summary of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredImageSummary {
    /// Time at which it was made.
    pub created: Timestamp,
    /// Source of its guest.
    pub source: String,
    /// Version of the QEMU that ran the guest, if known.
    pub qemu: Option<String>,
    /// Memory of the guest in bytes.
    pub memory_bytes: u64,
    /// Length of the index in bytes.
    pub index_bytes: u64,
    /// Chunks that it references: its size if it were alone.
    pub chunks: ChunkTotals,
    /// Chunks that no other image references: its part of the store.
    pub own: ChunkTotals,
    /// Number of chunks that it references and the store does not have.
    pub missing: u64,
}

/// A chunk in the store.
struct Stored {
    bytes: u64,
    references: u32,
    /// Index of the image that referenced it first.
    owner: u32,
}

impl Catalog {
    /// Reads the indexes of a prefix and lists its chunks.
    ///
    /// # Errors
    /// The prefix is on a web server, which has no listing; the store is unreachable or refuses access.
    pub fn read(prefix: &Location, cancel: Option<Cancel>) -> Result<Self> {
        if !prefix.scheme().is_writable() {
            let text =
                format!("{prefix}: a web server has no list of images; name the store that it publishes");
            return Err(Error::Location { text });
        }
        let store = Store::open_existing(prefix, cancel)?;
        read(&store)
    }
}

/// Names of the images of a prefix, sorted. None of them is read.
///
/// # Errors
/// As [`Catalog::read`].
pub fn image_names(prefix: &Location, cancel: Option<Cancel>) -> Result<Vec<String>> {
    let store = Store::open_existing(prefix, cancel)?;
    let keys = image_keys(&store)?;
    Ok(keys.iter().map(|key| key.strip_suffix(Location::SUFFIX).unwrap_or(key).to_owned()).collect())
}

fn read(store: &Store) -> Result<Catalog> {
    let mut chunks = HashMap::new();
    store.list(chunk::DIRECTORY, &mut |object| {
        if let Some(name) = chunk::name(&store.key(&object)) {
            chunks.insert(name, Stored { bytes: object.size, references: 0, owner: u32::MAX });
        }
        Ok(())
    })?;
    let mut catalog = Catalog::default();
    // The index that each image has, by which its readers are found.
    let mut indexes = Vec::new();
    for key in image_keys(store)? {
        let name = key.strip_suffix(Location::SUFFIX).unwrap_or(&key).to_owned();
        let summary = match store.get(&key, INDEX_BYTES_MAX) {
            Ok(Some(bytes)) => {
                let owner = u32::try_from(catalog.images.len()).unwrap_or(u32::MAX);
                indexes.push(Some((key, Digest::of(&bytes))));
                let index = Index::parse(&bytes).map_err(|error| error.to_string());
                index.map(|index| summarize(&index, bytes.len() as u64, owner, &mut chunks))
            }
            // The image has since been removed.
            Ok(None) => continue,
            Err(error) if error.is_of_object() => {
                // In the order of the images.
                indexes.push(None);
                Err(error.to_string())
            }
            Err(error) => return Err(error),
        };
        catalog.images.push(CatalogEntry { name, summary, readers: Vec::new() });
    }
    for stored in chunks.values() {
        let totals = if stored.references > 0 { &mut catalog.used } else { &mut catalog.unreferenced };
        totals.add(stored.bytes);
        let owner = catalog.images.get_mut(stored.owner as usize).filter(|_| stored.references == 1);
        if let Some(Ok(summary)) = owner.map(|owner| &mut owner.summary) {
            summary.own.add(stored.bytes);
        }
    }
    // This process has no lease, so it judges their age by its own clock: for display only.
    let now = SystemTime::now();
    let is_alive = LeaseEntry::is_alive;
    catalog.uploads = leases(store, LeaseKind::Upload, now)?.iter().filter(|lease| is_alive(lease)).count();
    for lease in leases(store, LeaseKind::Reader, now)?.iter().filter(|lease| is_alive(lease)) {
        let Some(Some(owner)) = lease.owner(store)? else { continue };
        let LeaseOwner { image: Some(key), index: Some(index), .. } = owner else { continue };
        let is_read = |image: &Option<(String, Digest)>| *image == Some((key.clone(), index));
        if let Some(image) = indexes.iter().position(is_read) {
            catalog.images[image].readers.push(lease.describe_owner(store));
        }
    }
    Ok(catalog)
}

/// Counts the references of an image's index. Its own chunks are only known after the last image.
fn summarize(
    index: &Index,
    index_bytes: u64,
    owner: u32,
    chunks: &mut HashMap<[u8; 32], Stored>,
) -> StoredImageSummary {
    let (mut all, mut missing) = (ChunkTotals::default(), 0);
    let names: HashSet<_> = index.all_names().collect();
    for name in &names {
        match chunks.get_mut(name) {
            None => missing += 1,
            Some(stored) => {
                all.add(stored.bytes);
                if stored.references == 0 {
                    stored.owner = owner;
                }
                stored.references += 1;
            }
        }
    }
    StoredImageSummary {
        created: index.created,
        source: index.origin.source.clone(),
        qemu: index.origin.qemu.clone(),
        memory_bytes: index.blocks().iter().map(|block| block.length).sum(),
        index_bytes,
        chunks: all,
        own: ChunkTotals::default(),
        missing,
    }
}
