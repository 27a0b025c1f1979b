//! Two signs in a store, so that nobody removes as garbage what somebody else counts on.
//!
//! ```text
//!   upload      put uploads/ID ─► is there a collection? then end ─► list chunks ─► … ─► put the index ─► remove uploads/ID
//!   collection  put collection ─► is there an upload?    then end ─► list chunks ─► remove ─► remove collection
//! ```
//!
//! Each raises its own sign before it looks for the other's, so on a store that is consistent, as they all are, at least one of
//! the two sees the other. A sign that is not renewed for [`PRESENCE_AGE_MAX`] is a dead process's. Ages are the store's: of
//! its own times, by the time of the sign that was just put.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;

use super::access::{Put, Store};
use super::{Error, PRESENCE_AGE_MAX, PRESENCE_INTERVAL, Result};

/// Where uploads have their signs.
pub(super) const UPLOADS: &str = "uploads";
/// The sign of who removes garbage.
pub(super) const COLLECTION: &str = "collection";

/// A sign that is renewed until it is dropped. What a process that was killed leaves of it grows old.
#[derive(Debug)]
pub(super) struct Presence {
    store: Arc<Store>,
    key: String,
    renewed: Arc<Mutex<Instant>>,
    /// Dropped, it ends the renewals.
    alive: Option<Arc<()>>,
}

impl Presence {
    /// Says that somebody uploads `image`, and that nobody removes garbage.
    pub(super) fn upload(store: &Arc<Store>, image: &str) -> Result<Self> {
        let key = format!("{UPLOADS}/{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let presence = Self::raise(store, key, format!("an upload of {image}\n"))?;
        let now = presence.now()?;
        match store.head(COLLECTION)? {
            Some(found) if age(found.last_modified.into(), now) < PRESENCE_AGE_MAX => {
                let object = store.shown(COLLECTION);
                Err(Error::Collecting { store: store.location().to_string(), object })
            }
            _ => Ok(presence),
        }
    }

    /// Says that somebody removes garbage, and that nobody uploads. Gives the signs of uploads that are dead.
    pub(super) fn collection(store: &Arc<Store>) -> Result<(Self, Vec<String>)> {
        let presence = Self::raise(store, COLLECTION.into(), "garbage is being removed\n".into())?;
        let now = presence.now()?;
        let (mut dead, mut alive) = (Vec::new(), Vec::new());
        store.list(UPLOADS, &mut |object| {
            let is_dead = age(object.last_modified.into(), now) >= PRESENCE_AGE_MAX;
            if is_dead { &mut dead } else { &mut alive }.push(store.key(&object));
            Ok(())
        })?;
        match alive.first() {
            Some(first) => Err(Error::Uploading {
                store: store.location().to_string(),
                count: alive.len(),
                object: store.shown(first),
            }),
            None => Ok((presence, dead)),
        }
    }

    fn raise(store: &Arc<Store>, key: String, text: String) -> Result<Self> {
        let text = Bytes::from(text);
        let renewed = Arc::new(Mutex::new(Instant::now()));
        store.put(&key, text.clone(), Put::Replace)?;
        let alive = Arc::new(());
        let (watched, noted) = (Arc::downgrade(&alive), Arc::clone(&renewed));
        let holder = Arc::downgrade(store);
        let renewing = key.clone();
        store.spawn(async move {
            loop {
                tokio::time::sleep(PRESENCE_INTERVAL).await;
                let put = {
                    let (Some(_), Some(store)) = (watched.upgrade(), holder.upgrade()) else { return };
                    store.putting(&renewing, text.clone(), Put::Replace)
                };
                let begun = Instant::now();
                match put.await {
                    Ok(()) => *noted.lock().unwrap_or_else(PoisonError::into_inner) = begun,
                    Err(error) => tracing::warn!(%error, "the upload's sign"),
                }
            }
        });
        Ok(Self { store: Arc::clone(store), key, renewed, alive: Some(alive) })
    }

    /// What the store's clock says: the time of the sign itself.
    pub(super) fn now(&self) -> Result<SystemTime> {
        let found = self.store.head(&self.key)?;
        Ok(found.map_or_else(SystemTime::now, |found| found.last_modified.into()))
    }

    /// Whether the sign was to be seen all the time: nobody has taken it for a dead process's.
    pub(super) fn check(&self) -> Result<()> {
        let since = self.renewed.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if since < PRESENCE_AGE_MAX / 2 {
            return Ok(());
        }
        Err(Error::Absent { store: self.store.location().to_string(), seconds: since.as_secs() })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.alive.take();
        if let Err(error) = self.store.remove(&self.key) {
            tracing::warn!(%error, "the sign of this process stays; it counts for an hour");
        }
    }
}

/// How old something of that time is; nothing is younger than now.
pub(super) fn age(time: SystemTime, now: SystemTime) -> Duration {
    now.duration_since(time).unwrap_or_default()
}
