//! Chunks that no index names: what uploads that were broken off, and images that were removed, leave behind.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use towline_channel::Cancel;

use super::access::Store;
use super::fault::Fault;
use super::images::{RETIRED, retired};
use super::lease::{FoundLease, Kind, Lease, age, leases};
use super::location::{Location, SUFFIX};
use super::{ConditionalWrites, Error, Result, chunk};
use crate::index::{INDEX_BYTES_MAX, Index};
use crate::manifest::Digest;

/// Images of one prefix that are looked at.
const IMAGES_MAX: usize = 100_000;

/// An object that nobody needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its key below the prefix.
    pub key: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// How long ago it was put there, by the store's clock.
    pub age: Duration,
}

/// What is in a prefix, and what of it is garbage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Garbage {
    /// The images.
    pub images: usize,
    /// Chunks that they name, and the bytes of these.
    pub used: (u64, u64),
    /// Chunks that none of them names, but too young to be called garbage: an upload may be about to name them.
    pub young: (u64, u64),
    /// Chunks that only readers need, of images that were replaced or removed meanwhile, and the bytes of these.
    pub kept: (u64, u64),
    /// The readers for which they are kept, for people.
    pub kept_for: Vec<String>,
    /// Uploads that go on.
    pub uploads: usize,
    /// Readers of images.
    pub readers: usize,
    /// What may be removed, in this order.
    pub objects: Vec<Object>,
    /// Which conditions the store enforces on writes; known only to who may write.
    pub conditional_writes: Option<ConditionalWrites>,
}

impl Garbage {
    /// Looks through a prefix: chunks that are older than `age_min` and named by no image are garbage. `Err` of a single image
    /// names it: while nobody knows what it names, nothing is garbage.
    ///
    /// # Errors
    /// The store cannot be reached or refuses, or an image cannot be read.
    pub fn find(prefix: &Location, age_min: Duration, cancel: Option<Cancel>) -> Result<Self> {
        let store = Arc::new(Store::open(prefix, cancel)?);
        find(&store, age_min, SystemTime::now())
    }

    /// Removes what [`Self::find`] would find, unless somebody uploads or collects; tells `removed` of each object. Returns what was
    /// removed.
    ///
    /// # Errors
    /// As [`Self::find`], [`Error::Uploading`] and [`Error::Collecting`]; [`Error::Lost`] when the rest was left alone.
    pub fn remove(
        prefix: &Location,
        age_min: Duration,
        cancel: Option<Cancel>,
        removed: &mut dyn FnMut(&Object),
    ) -> Result<Self> {
        if !prefix.scheme().is_writable() {
            let text = format!("{prefix}: http:// and https:// are only read");
            return Err(Error::Location { text });
        }
        Self::remove_in(&Arc::new(Store::open(prefix, cancel)?), age_min, removed)
    }

    /// As [`Self::remove`], in a store that is open.
    pub(super) fn remove_in(
        store: &Arc<Store>,
        age_min: Duration,
        removed: &mut dyn FnMut(&Object),
    ) -> Result<Self> {
        let lease = Lease::collection(store)?;
        let mut found = find(store, age_min, lease.now()?)?;
        found.conditional_writes = Some(lease.writes());
        for object in &found.objects {
            store.check_cancelled()?;
            let (objects, hold, key) =
                (store.objects().clone(), Arc::clone(lease.hold()), object.key.clone());
            let done = store.wait_anyway(async move { objects.remove_held(&key, &hold).await });
            if let Err(error) = done {
                if !error.is_final() && !store.has(Fault::LateRemovalIgnored) {
                    // It may still arrive.
                    lease.leave();
                }
                return Err(error);
            }
            removed(object);
        }
        Ok(found)
    }

    fn add_dead(&mut self, lease: FoundLease) {
        let FoundLease { key, bytes, age } = lease;
        self.objects.push(Object { key, bytes, age });
    }
}

/// What the images of a prefix name.
#[derive(Default)]
struct Named {
    chunks: HashSet<[u8; 32]>,
    indexes: HashSet<Digest>,
}

/// What readers need beside that.
#[derive(Default)]
struct Kept {
    chunks: HashSet<[u8; 32]>,
    indexes: HashSet<Digest>,
    /// A reader's index is nowhere, so it may need anything.
    is_unknown: bool,
}

/// The order of the looks matters. Chunks first: what is put later is not in the list, and no upload goes on. Copies of indexes next: one
/// that is made later stays. Indexes before readers: a reader whose lease comes after the list of leases has seen its index
/// after that, so the index was there before, too.
fn find(store: &Arc<Store>, age_min: Duration, now: SystemTime) -> Result<Garbage> {
    let mut chunks = Vec::new();
    store.list(chunk::DIRECTORY, &mut |object| {
        if let Some(name) = chunk::name(&store.key(&object)) {
            chunks.push((name, object.size, age(object.last_modified.into(), now)));
        }
        Ok(())
    })?;
    let mut garbage = Garbage::default();
    let mut copies = Vec::new();
    store.list(RETIRED, &mut |object| {
        let age = age(object.last_modified.into(), now);
        copies.push(Object { key: store.key(&object), bytes: object.size, age });
        Ok(())
    })?;
    let early = store.has(Fault::ReadersFirst).then(|| leases(store, Kind::Reader, now)).transpose()?;
    let named = named(store, &mut garbage)?;
    let mut readers = Vec::new();
    for kind in Kind::ALL {
        let found = match &early {
            Some(early) if kind == Kind::Reader => early.clone(),
            _ => leases(store, kind, now)?,
        };
        let (alive, dead): (Vec<_>, Vec<_>) = found.into_iter().partition(FoundLease::is_alive);
        // Before any chunk: whoever is taken for dead finds that out first.
        dead.into_iter().for_each(|lease| garbage.add_dead(lease));
        match kind {
            Kind::Upload => garbage.uploads = alive.len(),
            Kind::Reader => readers = alive,
            Kind::Collection => {}
        }
    }
    garbage.readers = readers.len();
    let kept = kept(store, &named, &readers, &mut garbage)?;
    let needed: HashSet<_> = kept.indexes.iter().map(|index| retired(*index)).collect();
    garbage.objects.extend(copies.into_iter().filter(|copy| !needed.contains(&copy.key)));
    for (name, bytes, age) in chunks {
        let add = |(count, sum): (u64, u64)| (count + 1, sum + bytes);
        if named.chunks.contains(&name) {
            garbage.used = add(garbage.used);
        } else if kept.is_unknown || kept.chunks.contains(&name) {
            garbage.kept = add(garbage.kept);
        } else if age < age_min {
            garbage.young = add(garbage.young);
        } else {
            garbage.objects.push(Object { key: chunk::key(&name), bytes, age });
        }
    }
    Ok(garbage)
}

/// What live readers need that no image names.
fn kept(store: &Arc<Store>, named: &Named, readers: &[FoundLease], garbage: &mut Garbage) -> Result<Kept> {
    let mut kept = Kept::default();
    if store.has(Fault::ReadersIgnored) {
        return Ok(kept);
    }
    // The names of each copy are read once, however many read it.
    let mut copies: HashMap<Digest, Option<Index>> = HashMap::new();
    for lease in readers {
        let owner = match lease.owner(store)? {
            None => continue,
            Some(owner) => owner.ok(),
        };
        let index = owner.and_then(|owner| owner.index);
        if index.is_some_and(|index| named.indexes.contains(&index)) {
            continue;
        }
        garbage.kept_for.push(lease.shown(store));
        let copy = match index {
            None => None,
            Some(index) => {
                kept.indexes.insert(index);
                match copies.entry(index) {
                    Entry::Occupied(known) => known.into_mut().as_ref(),
                    Entry::Vacant(new) => new.insert(copy(store, index)?).as_ref(),
                }
            }
        };
        match copy {
            Some(copy) => kept.chunks.extend(copy.all_names()),
            None => kept.is_unknown |= !store.has(Fault::UnknownIndexIgnored),
        }
    }
    Ok(kept)
}

/// The copy of an index that was replaced or removed, if there is one that can be read.
fn copy(store: &Arc<Store>, index: Digest) -> Result<Option<Index>> {
    let bytes = store.get(&retired(index), INDEX_BYTES_MAX)?;
    let whole = bytes.filter(|bytes| Digest::of(bytes) == index);
    Ok(whole.and_then(|bytes| Index::parse(&bytes).ok()))
}

/// Everything that the prefix's images name.
fn named(store: &Arc<Store>, garbage: &mut Garbage) -> Result<Named> {
    let mut keys = Vec::new();
    store.list("", &mut |object| {
        let key = store.key(&object);
        if key.ends_with(SUFFIX) {
            keys.push(key);
        }
        match keys.len() > IMAGES_MAX {
            true => Err(Error::Location {
                text: format!("{}: more than {IMAGES_MAX} images; use several prefixes", store.location()),
            }),
            false => Ok(()),
        }
    })?;
    let mut named = Named::default();
    for key in keys {
        // One that was removed meanwhile names nothing.
        let Some(bytes) = store.get(&key, INDEX_BYTES_MAX)? else { continue };
        let index = Index::parse(&bytes);
        let index = index.map_err(|why| Error::KeepsGarbage { image: store.shown(&key), why })?;
        named.chunks.extend(index.all_names());
        named.indexes.insert(Digest::of(&bytes));
        garbage.images += 1;
    }
    Ok(named)
}
