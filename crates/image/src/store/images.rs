//! Index objects of a prefix: their readers, replacement and removal.
//!
//! ```text
//!   publish   old index has readers? copy it to retired/BLAKE3 ─► put the new one, if the old one has not changed
//!   remove    the same ─► remove the index
//! ```
//!
//! Everything except an image's chunks is in its index, which one request replaces. So there is either the
//! old image or the new one, whenever the process ends. The old one's chunks become garbage, unless a
//! reader's lease names the old index: a collector finds its chunks in the copy, or, if another program
//! removed the index, keeps all chunks while the reader is alive.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use object_store::ObjectMeta;
use towline_channel::Cancel;

use super::access::Store;
use super::fault::StoreBug;
use super::lease::{Lease, LeaseKind, leases};
use super::objects::{WriteMode, version_of};
use super::{ConditionalWrites, Error, Result};
use crate::Existing;
use crate::index::{INDEX_BYTES_MAX, Index};
use crate::location::Location;
use crate::manifest::Digest;

/// Directory of copies of indexes that were replaced or removed while they were read.
pub(super) const RETIRED: &str = "retired";
/// Maximum number of attempts to replace or read an index that other processes replace.
pub(super) const ATTEMPTS_MAX: usize = 8;

/// Action if an image to be removed has readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfInUse {
    /// Keep the image and report its readers.
    Refuse,
    /// Remove the image; its chunks are kept until the readers end.
    KeepChunks,
}

/// A process that reads an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageReader {
    /// Description of process, host and lease.
    pub description: String,
    /// BLAKE3 of the index that it reads.
    pub index: Digest,
}

/// Lists readers of the image, including those killed within the last hour.
///
/// # Errors
/// The store is unreachable or refuses access.
pub fn readers(image: &Location, cancel: Option<Cancel>) -> Result<Vec<ImageReader>> {
    let store = Store::open(&image.parent(), cancel)?;
    readers_in(&store, &key(image)?)
}

/// Returns true if the location names an image.
///
/// # Errors
/// The store is unreachable or refuses access.
pub fn is_image(location: &Location, cancel: Option<Cancel>) -> Result<bool> {
    let Ok(key) = key(location) else { return Ok(false) };
    Ok(Store::open_existing(&location.parent(), cancel)?.find(&key)?.is_some())
}

/// Removes an image; chunks that only it references become garbage. Returns the readers for which they are
/// kept. Stores have no conditional removal: an image that replaces this one at the same moment may be
/// removed in its place, and a reader that begins then is not refused, but keeps its chunks.
///
/// # Errors
/// [`Error::NoImage`]; [`Error::InUse`] with [`IfInUse::Refuse`]; the store is unreachable or refuses access.
pub fn remove_image(image: &Location, in_use: IfInUse, cancel: Option<Cancel>) -> Result<Vec<ImageReader>> {
    if !image.scheme().is_writable() {
        return Err(Error::Location { text: format!("{image}: http:// and https:// are read-only") });
    }
    let store = Store::open_existing(&image.parent(), cancel)?;
    remove_in(&store, &image.to_string(), &key(image)?, in_use)
}

/// Key of an image's index.
pub(super) fn key(image: &Location) -> Result<String> {
    Ok(format!("{}{}", image.name()?, Location::SUFFIX))
}

pub(super) fn remove_in(
    store: &Arc<Store>,
    image: &str,
    key: &str,
    in_use: IfInUse,
) -> Result<Vec<ImageReader>> {
    if store.find(key)?.is_none() {
        return Err(Error::NoImage { image: image.into(), object: store.object_name(key) });
    }
    let readers = retire(store, key, in_use)?;
    store.delete(key)?;
    Ok(readers)
}

/// Readers of the image with this key. Expired leases are included: without its own lease this process does
/// not know the store's time.
pub(super) fn readers_in(store: &Arc<Store>, key: &str) -> Result<Vec<ImageReader>> {
    let mut readers = Vec::new();
    for lease in leases(store, LeaseKind::Reader, SystemTime::UNIX_EPOCH)? {
        let Some(Some(owner)) = lease.owner(store)? else { continue };
        if let (Some(image), Some(index)) = (&owner.image, owner.index)
            && image == key
        {
            readers.push(ImageReader { description: lease.describe_owner(store), index });
        }
    }
    Ok(readers)
}

/// Copies the index with this key for its readers, and returns them.
fn retire(store: &Arc<Store>, key: &str, in_use: IfInUse) -> Result<Vec<ImageReader>> {
    let mut readers = readers_in(store, key)?;
    if readers.is_empty() {
        return Ok(readers);
    }
    let Some(bytes) = store.get(key, INDEX_BYTES_MAX)? else { return Ok(Vec::new()) };
    let index = Digest::of(&bytes);
    readers.retain(|reader| reader.index == index);
    if in_use == IfInUse::Refuse && !readers.is_empty() {
        let image = store.object_name(key.strip_suffix(Location::SUFFIX).unwrap_or(key));
        let readers = readers.into_iter().map(|reader| reader.description).collect();
        return Err(Error::InUse { image, readers });
    }
    if !readers.is_empty() {
        store.wait(store.put(&retired_key(index), bytes, WriteMode::Replace))?;
    }
    Ok(readers)
}

/// Key of the copy of an index.
pub(super) fn retired_key(index: Digest) -> String {
    format!("{RETIRED}/{index}")
}

/// Returns true if `key` is that of the copy of an index. Others in its directory are objects of other
/// programs.
pub(super) fn is_retired_key(key: &str) -> bool {
    let hash = key.rsplit_once('/').and_then(|(_, hash)| blake3::Hash::from_hex(hash).ok());
    hash.is_some_and(|hash| retired_key(Digest(*hash.as_bytes())) == key)
}

/// Publishes an image whose chunks are all stored by putting its index.
///
/// # Errors
/// [`Error::Lost`] without the upload's lease; [`Error::Exists`], [`Error::Changed`]. After an inconclusive
/// failure the index is read again; if it may still arrive, the lease stays.
pub(super) fn publish(
    store: &Arc<Store>,
    lease: &Lease,
    key: &str,
    bytes: &Bytes,
    existing: Existing,
) -> Result<()> {
    for _ in 0..ATTEMPTS_MAX {
        let mode = match existing {
            Existing::Refuse => WriteMode::Create,
            Existing::Replace => replacement(store, lease, key)?,
        };
        match put_index(store, lease, key, bytes, mode) {
            Err(Error::Changed { .. }) => {}
            done => return done,
        }
    }
    Err(Error::Changed { object: store.object_name(key) })
}

/// Keeps the chunks of an image that is replaced for its readers. Returns how its index is replaced.
fn replacement(store: &Arc<Store>, lease: &Lease, key: &str) -> Result<WriteMode> {
    let Some(found) = store.wait_uncancelled(store.head(key))? else { return Ok(WriteMode::Replace) };
    for reader in retire(store, key, IfInUse::KeepChunks)? {
        tracing::info!(
            reader = reader.description,
            image = key,
            "keeping the chunks of the replaced image for its reader"
        );
    }
    Ok(match lease.writes() {
        ConditionalWrites::All => WriteMode::Update(version_of(&found)),
        ConditionalWrites::Create | ConditionalWrites::None => WriteMode::Replace,
    })
}

/// Puts an index, and reads it again if the result is unknown.
fn put_index(store: &Arc<Store>, lease: &Lease, key: &str, bytes: &Bytes, mode: WriteMode) -> Result<()> {
    let (objects, owned_key, content) = (store.objects.clone(), key.to_owned(), bytes.clone());
    let request = async move { objects.put_with_lease(&owned_key, content, mode).await };
    let error = match store.wait_uncancelled(request) {
        Ok(_) => return Ok(()),
        Err(error) if error.is_final() => return Err(error),
        Err(error) => error,
    };
    if !store.has_fault(StoreBug::LateIndexIgnored) {
        lease.keep_in_store();
    }
    match store.wait_uncancelled(store.objects.get(key, bytes.len() as u64)) {
        Ok(Some((found, _))) if found == *bytes => Ok(()),
        _ => Err(error),
    }
}

/// An image of which only the index was read: everything else may be removed at any time.
#[derive(Debug)]
pub struct UnopenedImage {
    pub(super) store: Arc<Store>,
    pub(super) image: String,
    key: String,
    /// The index.
    pub index: Index,
    pub(super) bytes: Bytes,
    meta: ObjectMeta,
}

impl UnopenedImage {
    /// Reads the index by one request. `cancel` ends every wait for the store.
    ///
    /// # Errors
    /// [`Error::NoImage`]; the index is damaged; the store is unreachable or refuses access.
    pub fn read(location: &Location, cancel: Option<Cancel>) -> Result<Self> {
        let store = Store::open(&location.parent(), cancel)?;
        Self::read_in(store, location.to_string(), key(location)?)
    }

    /// As [`Self::read`], in an open store.
    pub(super) fn read_in(store: Arc<Store>, image: String, key: String) -> Result<Self> {
        let Some((bytes, meta)) = store.wait(store.objects.get(&key, INDEX_BYTES_MAX))? else {
            return Err(Error::NoImage { image, object: store.object_name(&key) });
        };
        match Index::parse(&bytes) {
            Ok(index) => Ok(Self { store, image, key, index, bytes, meta }),
            Err(why) => Err(Error::Index { image, why }),
        }
    }

    /// Protects the chunks that the index references by a lease, or returns the error of a store that is read-only for this process.
    ///
    /// # Errors
    /// [`Error::Changed`]: the image was replaced or removed in between. Or the store is unreachable or refuses access.
    pub(super) fn lease(&self) -> Result<Result<Lease, String>> {
        let (store, key) = (&self.store, &self.key);
        if !store.location.scheme().is_writable() {
            return Ok(Err("http:// and https:// are read-only".into()));
        }
        let lease = match Lease::reader(store, key, Digest::of(&self.bytes)) {
            Ok(lease) => lease,
            Err(error) if error.is_read_only() => return Ok(Err(error.to_string())),
            Err(error) => return Err(error),
        };
        // A process that replaced or removed the index before the lease existed did not see the lease.
        if store.has_fault(StoreBug::ReaderUnconfirmed) || is_current(store, key, &self.meta, &self.bytes)? {
            Ok(Ok(lease))
        } else {
            Err(Error::Changed { object: store.object_name(key) })
        }
    }
}

/// Returns true if the object is still the one that was read.
fn is_current(store: &Arc<Store>, key: &str, meta: &ObjectMeta, bytes: &Bytes) -> Result<bool> {
    if meta.e_tag.is_some() || meta.version.is_some() {
        let found = store.find(key)?;
        return Ok(found.is_some_and(|found| version_of(&found) == version_of(meta)));
    }
    Ok(store.get(key, INDEX_BYTES_MAX)?.is_some_and(|found| found == *bytes))
}
