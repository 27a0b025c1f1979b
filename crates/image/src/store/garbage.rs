//! Collection of chunks that no index references: remains of interrupted uploads and of removed images.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use schemars::JsonSchema;
use serde::Serialize;
use towline_channel::Cancel;

use super::access::Store;
use super::fault::StoreBug;
use super::images::{RETIRED, is_retired_key, retired_key};
use super::lease::{Lease, LeaseEntry, LeaseKind, leases};
use super::objects::Object;
use super::{ConditionalWrites, Error, Result, chunk};
use crate::index::{INDEX_BYTES_MAX, Index};
use crate::location::Location;
use crate::manifest::Digest;

/// Maximum number of images of a prefix.
const IMAGES_MAX: usize = 100_000;

/// A number of chunks and their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct ChunkTotals {
    /// Number of chunks.
    pub chunks: u64,
    /// Length of their objects in bytes.
    pub bytes: u64,
}

impl ChunkTotals {
    pub(super) fn add(&mut self, bytes: u64) {
        self.chunks += 1;
        self.bytes += bytes;
    }
}

/// Contents of a prefix, and the garbage in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Garbage {
    /// Number of images.
    pub images: usize,
    /// Chunks referenced by the images.
    pub used: ChunkTotals,
    /// Unreferenced chunks that are too young to be garbage, since an upload may still reference them.
    pub young: ChunkTotals,
    /// Chunks that only readers of replaced or removed images need.
    pub kept: ChunkTotals,
    /// Descriptions of the readers for which they are kept.
    pub kept_for: Vec<String>,
    /// Number of active uploads.
    pub uploads: usize,
    /// Number of active readers.
    pub readers: usize,
    /// Objects that may be removed, in this order.
    pub objects: Vec<Object>,
    /// Conditional writes that the store enforces; only known to a process that may write.
    pub conditional_writes: Option<ConditionalWrites>,
}

impl Garbage {
    /// Lists a prefix: chunks older than `age_min` that no image references are garbage. An index that cannot
    /// be read is an error, since its chunks are unknown.
    ///
    /// # Errors
    /// The store is unreachable or refuses access, or an index cannot be read.
    pub fn find(prefix: &Location, age_min: Duration, cancel: Option<Cancel>) -> Result<Self> {
        find(&Store::open_existing(prefix, cancel)?, age_min, SystemTime::now())
    }

    /// Removes the objects that [`Self::find`] would find, unless an upload or another collection is active;
    /// calls `removed` for each. Returns what was found, with the removed objects.
    ///
    /// # Errors
    /// As [`Self::find`]; [`Error::Uploading`] and [`Error::Collecting`]; [`Error::Lost`] if the remaining
    /// objects were kept.
    pub fn remove(
        prefix: &Location,
        age_min: Duration,
        cancel: Option<Cancel>,
        removed: &mut dyn FnMut(&Object),
    ) -> Result<Self> {
        if !prefix.scheme().is_writable() {
            let text = format!("{prefix}: http:// and https:// are read-only");
            return Err(Error::Location { text });
        }
        Self::remove_in(&Store::open_existing(prefix, cancel)?, age_min, removed)
    }

    /// As [`Self::remove`], in an open store.
    pub(super) fn remove_in(
        store: &Arc<Store>,
        age_min: Duration,
        removed: &mut dyn FnMut(&Object),
    ) -> Result<Self> {
        let lease = Lease::collection(store)?;
        let mut found = find(store, age_min, lease.store_time()?)?;
        found.conditional_writes = Some(lease.writes());
        for object in &found.objects {
            store.check_cancelled()?;
            let (objects, key) = (store.objects.clone(), object.key.clone());
            let done = store.wait_uncancelled(async move { objects.remove_with_lease(&key).await });
            if let Err(error) = done {
                if !error.is_final() && !store.has_fault(StoreBug::LateRemovalIgnored) {
                    // The request may still arrive.
                    lease.keep_in_store();
                }
                return Err(error);
            }
            removed(object);
        }
        Ok(found)
    }
}

/// Chunks and indexes that images reference, or that their readers need.
#[derive(Default)]
struct Referenced {
    chunks: HashSet<[u8; 32]>,
    indexes: HashSet<Digest>,
    /// The index of a reader is missing, so it may need any chunk.
    is_unknown: bool,
}

/// The order of requests matters. Chunks are listed first: chunks put later are not in the list, and no
/// upload is active. Copies of indexes come next: later ones are kept. Indexes are read before the leases of
/// readers are listed: a reader with a later lease confirms its index later still, so the index was read here
/// too.
fn find(store: &Arc<Store>, age_min: Duration, now: SystemTime) -> Result<Garbage> {
    let mut chunks = Vec::new();
    store.list(chunk::DIRECTORY, &mut |object| {
        let Object { key, bytes, age } = store.object(&object, now);
        if let Some(name) = chunk::name(&key) {
            chunks.push((name, bytes, age));
        }
        Ok(())
    })?;
    let mut garbage = Garbage::default();
    let mut copies = Vec::new();
    store.list(RETIRED, &mut |object| {
        let object = store.object(&object, now);
        if is_retired_key(&object.key) {
            copies.push(object);
        }
        Ok(())
    })?;
    let early =
        store.has_fault(StoreBug::ReadersFirst).then(|| leases(store, LeaseKind::Reader, now)).transpose()?;
    let referenced = referenced(store, &mut garbage)?;
    let mut readers = Vec::new();
    for kind in LeaseKind::ALL {
        let found = match &early {
            Some(early) if kind == LeaseKind::Reader => early.clone(),
            _ => leases(store, kind, now)?,
        };
        let (alive, expired): (Vec<_>, Vec<_>) = found.into_iter().partition(LeaseEntry::is_alive);
        // Leases are removed before any chunk, so an owner that is considered dead detects it first.
        garbage.objects.extend(expired.into_iter().map(|lease| lease.0));
        match kind {
            LeaseKind::Upload => garbage.uploads = alive.len(),
            LeaseKind::Reader => readers = alive,
            LeaseKind::Collection => {}
        }
    }
    garbage.readers = readers.len();
    let needs = reader_needs(store, &referenced, &readers, &mut garbage)?;
    let needed: HashSet<_> = needs.indexes.iter().map(|index| retired_key(*index)).collect();
    garbage.objects.extend(copies.into_iter().filter(|copy| !needed.contains(&copy.key)));
    for (name, bytes, age) in chunks {
        if referenced.chunks.contains(&name) {
            garbage.used.add(bytes);
        } else if needs.is_unknown || needs.chunks.contains(&name) {
            garbage.kept.add(bytes);
        } else if age < age_min {
            garbage.young.add(bytes);
        } else {
            garbage.objects.push(Object { key: chunk::key(&name), bytes, age });
        }
    }
    Ok(garbage)
}

/// Unreferenced chunks, and indexes of no image, that live readers need.
fn reader_needs(
    store: &Arc<Store>,
    referenced: &Referenced,
    readers: &[LeaseEntry],
    garbage: &mut Garbage,
) -> Result<Referenced> {
    let mut needs = Referenced::default();
    if store.has_fault(StoreBug::ReadersIgnored) {
        return Ok(needs);
    }
    for lease in readers {
        let Some(owner) = lease.owner(store)? else { continue };
        let index = owner.and_then(|owner| owner.index);
        if index.is_some_and(|index| referenced.indexes.contains(&index)) {
            continue;
        }
        garbage.kept_for.push(lease.describe_owner(store));
        let copy = match index {
            None => None,
            // Each copy is read once, even if it has several readers.
            Some(index) if !needs.indexes.insert(index) => continue,
            Some(index) => load_retired_index(store, index)?,
        };
        match copy {
            Some(copy) => needs.chunks.extend(copy.all_names()),
            None => needs.is_unknown |= !store.has_fault(StoreBug::UnknownIndexIgnored),
        }
    }
    Ok(needs)
}

/// The copy of a replaced or removed index, if it exists and is valid.
fn load_retired_index(store: &Arc<Store>, index: Digest) -> Result<Option<Index>> {
    let bytes = match store.get(&retired_key(index), INDEX_BYTES_MAX) {
        Err(Error::TooLong { .. }) => None,
        bytes => bytes?,
    };
    let whole = bytes.filter(|bytes| Digest::of(bytes) == index);
    Ok(whole.and_then(|bytes| Index::parse(&bytes).ok()))
}

/// Keys of the indexes of a prefix, sorted.
pub(super) fn image_keys(store: &Store) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    store.list("", &mut |object| {
        let key = store.key(&object);
        if key.ends_with(Location::SUFFIX) {
            keys.push(key);
        }
        if keys.len() > IMAGES_MAX {
            Err(Error::Location {
                text: format!("{}: more than {IMAGES_MAX} images; use several prefixes", store.location),
            })
        } else {
            Ok(())
        }
    })?;
    keys.sort();
    Ok(keys)
}

/// Everything that the prefix's images reference.
fn referenced(store: &Arc<Store>, garbage: &mut Garbage) -> Result<Referenced> {
    let mut referenced = Referenced::default();
    for key in image_keys(store)? {
        // An image removed in between references nothing.
        let Some(bytes) = store.get(&key, INDEX_BYTES_MAX)? else { continue };
        let index = Index::parse(&bytes);
        let index = index.map_err(|why| Error::KeepsGarbage { image: store.object_name(&key), why })?;
        referenced.chunks.extend(index.all_names());
        referenced.indexes.insert(Digest::of(&bytes));
        garbage.images += 1;
    }
    Ok(referenced)
}
