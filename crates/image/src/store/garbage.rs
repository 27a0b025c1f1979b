//! Chunks that no index names: what uploads that were broken off, and images that were removed, leave behind.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use towline_channel::Cancel;

use super::access::Store;
use super::location::{Location, SUFFIX};
use super::presence::{COLLECTION, Presence, UPLOADS, age};
use super::{Error, PRESENCE_AGE_MAX, Result, chunk};
use crate::index::{INDEX_BYTES_MAX, Index};

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
    /// Uploads that go on.
    pub uploads: usize,
    /// What may be removed.
    pub objects: Vec<Object>,
}

impl Garbage {
    /// Looks through a prefix: chunks that are older than `age_min` and named by no image are garbage. `Err` of a single image
    /// names it: while nobody knows what it names, nothing is garbage.
    ///
    /// # Errors
    /// The store cannot be reached or refuses, or an image cannot be read.
    pub fn find(prefix: &Location, age_min: Duration, cancel: Option<Cancel>) -> Result<Self> {
        let store = Arc::new(Store::open(prefix, cancel)?);
        find(&store, age_min, SystemTime::now(), &[])
    }

    /// Removes what [`Self::find`] would find, unless somebody uploads; tells `removed` of each object. Returns what was removed.
    ///
    /// # Errors
    /// As [`Self::find`], and [`Error::Uploading`].
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
        let store = Arc::new(Store::open(prefix, cancel)?);
        let (presence, dead) = Presence::collection(&store)?;
        let found = find(&store, age_min, presence.now()?, &dead)?;
        for object in &found.objects {
            store.check_cancelled()?;
            presence.check()?;
            store.remove(&object.key)?;
            removed(object);
        }
        Ok(found)
    }
}

/// `dead` are signs of uploads that are known to be dead.
fn find(store: &Arc<Store>, age_min: Duration, now: SystemTime, dead: &[String]) -> Result<Garbage> {
    // Chunks first: whatever is put later is not in this list, and what an index that comes meanwhile names is young, or its
    // upload's sign is up.
    let mut chunks = Vec::new();
    store.list(chunk::DIRECTORY, &mut |object| {
        if let Some(name) = chunk::name(&store.key(&object)) {
            chunks.push((name, object.size, age(object.last_modified.into(), now)));
        }
        Ok(())
    })?;
    let mut garbage = Garbage::default();
    store.list(UPLOADS, &mut |object| {
        let (key, age) = (store.key(&object), age(object.last_modified.into(), now));
        if dead.contains(&key) || age >= PRESENCE_AGE_MAX {
            garbage.objects.push(Object { key, bytes: object.size, age });
        } else {
            garbage.uploads += 1;
        }
        Ok(())
    })?;
    let named = named(store, &mut garbage)?;
    for (name, bytes, age) in chunks {
        let add = |(count, sum): (u64, u64)| (count + 1, sum + bytes);
        if named.contains(&name) {
            garbage.used = add(garbage.used);
        } else if age < age_min {
            garbage.young = add(garbage.young);
        } else {
            garbage.objects.push(Object { key: chunk::key(&name), bytes, age });
        }
    }
    Ok(garbage)
}

/// Everything that the prefix's images name.
fn named(store: &Arc<Store>, garbage: &mut Garbage) -> Result<HashSet<[u8; 32]>> {
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
    debug_assert!(!keys.iter().any(|key| key == COLLECTION));
    let mut named = HashSet::new();
    for key in keys {
        // One that was removed meanwhile names nothing.
        let Some(bytes) = store.get(&key, INDEX_BYTES_MAX)? else { continue };
        let index = Index::parse(&bytes);
        let index = index.map_err(|why| Error::KeepsGarbage { image: store.shown(&key), why })?;
        named.extend(index.all_names());
        garbage.images += 1;
    }
    Ok(named)
}
