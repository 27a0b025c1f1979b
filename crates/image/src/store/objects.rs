//! The objects of a prefix, and requests for them.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, PutResult, UpdateVersion,
};

use super::error::names_no_bucket;
use super::fault::StoreBug;
use super::lease_state::LeaseGuard;
use super::runtime::Clock;
use super::{Error, Result};
use crate::location::{Location, Scheme};

/// Attempts of a write that the store reports as a conflict, and the pause before the second; it doubles each
/// time.
const CONFLICTS_MAX: u32 = 6;
const CONFLICT_PAUSE: Duration = Duration::from_millis(50);

/// The objects of a prefix. Clones refer to the same.
#[derive(Debug, Clone)]
pub(super) struct Objects {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    pub(super) location: Location,
    /// Of leases.
    pub(super) clock: Clock,
    /// Of all modifying requests.
    pub(super) guard: LeaseGuard,
    /// The enabled bug.
    pub(super) fault: Option<StoreBug>,
}

/// An object that was found in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Key below the prefix.
    pub key: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Time since it was put, by the store's clock.
    pub age: Duration,
}

/// Condition of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WriteMode {
    /// Replaces an existing object.
    Replace,
    /// Fails if the object exists. A store without conditional writes replaces it.
    Create,
    /// Fails if the object exists, or the store has no conditional writes.
    CreateOnly,
    /// Fails unless the object has this version.
    Update(UpdateVersion),
}

/// The version of an object with this metadata.
pub(super) fn version_of(meta: &ObjectMeta) -> UpdateVersion {
    UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() }
}

impl Objects {
    /// `guard` is that with which `objects` checks modifying requests.
    pub(super) fn new(
        objects: Arc<dyn ObjectStore>,
        prefix: &Location,
        clock: Clock,
        guard: LeaseGuard,
    ) -> Result<Self> {
        let path = Path::parse(prefix.prefix())
            .map_err(|error| Error::Location { text: format!("{prefix}: {error}") })?;
        Ok(Self { objects, prefix: path, location: prefix.clone(), clock, guard, fault: None })
    }

    /// Returns true if this bug is enabled; never outside of tests.
    pub(super) fn has_fault(&self, fault: StoreBug) -> bool {
        self.fault == Some(fault)
    }

    /// Name of an object of the prefix, for messages.
    pub(super) fn object_name(&self, key: &str) -> String {
        self.location.object_name(key)
    }

    /// An object of a listing, with its age at this time, which is never negative.
    pub(super) fn object(&self, meta: &ObjectMeta, now: SystemTime) -> Object {
        let age = now.duration_since(meta.last_modified.into()).unwrap_or_default();
        Object { key: self.key(meta), bytes: meta.size, age }
    }

    /// Key of an object within the prefix.
    pub(super) fn key(&self, object: &ObjectMeta) -> String {
        let whole = object.location.as_ref();
        let rest = whole.strip_prefix(self.prefix.as_ref()).unwrap_or(whole);
        rest.trim_start_matches('/').to_owned()
    }

    /// An object's bytes, at most `limit`, and its metadata; `None` if it does not exist.
    pub(super) fn get(
        &self,
        key: &str,
        limit: u64,
    ) -> impl Future<Output = Result<Option<(Bytes, ObjectMeta)>>> + Send + use<> {
        let (objects, object, path) = (Arc::clone(&self.objects), self.object_name(key), self.path(key));
        async move {
            let found = match objects.get(&path?).await {
                Err(error @ object_store::Error::NotFound { .. }) if !names_no_bucket(&error) => {
                    return Ok(None);
                }
                found => found.map_err(Error::store("cannot be read", &object))?,
            };
            let meta = found.meta.clone();
            if meta.size > limit {
                return Err(Error::TooLong { object, limit });
            }
            let mut bytes = BytesMut::with_capacity(meta.size as usize);
            let mut parts = found.into_stream();
            while let Some(part) = parts.next().await {
                bytes.extend_from_slice(&part.map_err(Error::store("cannot be read", &object))?);
                // A server may send more than it announced.
                if bytes.len() as u64 > limit {
                    return Err(Error::TooLong { object, limit });
                }
            }
            Ok(Some((bytes.freeze(), meta)))
        }
    }

    /// Metadata of an object; `None` if it does not exist.
    pub(super) fn head(&self, key: &str) -> impl Future<Output = Result<Option<ObjectMeta>>> + Send + use<> {
        let (objects, object, path) = (Arc::clone(&self.objects), self.object_name(key), self.path(key));
        async move {
            match objects.head(&path?).await {
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                found => Ok(Some(found.map_err(Error::store("cannot be read", object))?)),
            }
        }
    }

    /// Puts an object and returns its version.
    ///
    /// # Errors
    /// [`Error::Exists`] and [`Error::Changed`] if the condition of `mode` was not met, [`Error::Conflict`]
    /// if the store reports other requests again and again, else [`Error::Store`]; the object may have been
    /// written unless [`Error::is_final`].
    pub(super) fn put(
        &self,
        key: &str,
        bytes: Bytes,
        mode: WriteMode,
    ) -> impl Future<Output = Result<UpdateVersion>> + Send + use<> {
        let (this, key, mut pause) = (self.clone(), key.to_owned(), CONFLICT_PAUSE);
        async move {
            for _ in 0..CONFLICTS_MAX {
                if let Some(version) = this.try_put(&key, bytes.clone(), &mode).await? {
                    return Ok(version);
                }
                this.clock.sleep(pause).await;
                pause *= 2;
            }
            Err(Error::Conflict { object: this.object_name(&key) })
        }
    }

    /// As [`Self::put`]; `None` after a conflict with another request (409), which `object_store` takes for
    /// an object that exists.
    async fn try_put(&self, key: &str, bytes: Bytes, mode: &WriteMode) -> Result<Option<UpdateVersion>> {
        use object_store::Error as Cause;

        let failed = Error::store("cannot be written", self.object_name(key));
        let path = self.path(key)?;
        let condition = match mode {
            WriteMode::Replace => PutMode::Overwrite,
            WriteMode::Create | WriteMode::CreateOnly => PutMode::Create,
            WriteMode::Update(version) => PutMode::Update(version.clone()),
        };
        let refused = match (self.request(&path, bytes.clone(), condition).await, mode) {
            // The store has no conditional writes: the caller's earlier check must suffice.
            (Err(Cause::NotImplemented { .. } | Cause::NotSupported { .. }), WriteMode::Create) => {
                let done = self.request(&path, bytes, PutMode::Overwrite).await;
                return done.map(|done| Some(done.into())).map_err(failed);
            }
            (Err(Cause::AlreadyExists { .. }), WriteMode::Create | WriteMode::CreateOnly) => {
                let object = self.object_name(key);
                Error::Exists { image: object.strip_suffix(Location::SUFFIX).unwrap_or(&object).to_owned() }
            }
            (Err(Cause::AlreadyExists { .. }), _) => return Ok(None),
            (Err(Cause::Precondition { .. } | Cause::NotFound { .. }), WriteMode::Update(_)) => {
                Error::Changed { object: self.object_name(key) }
            }
            (done, _) => return done.map(|done| Some(done.into())).map_err(failed),
        };
        // After an attempt that arrived but whose response was lost, the next one finds its own object.
        match self.get(key, bytes.len() as u64).await {
            Ok(Some((found, meta))) if found == bytes => Ok(Some(version_of(&meta))),
            Ok(None) if [WriteMode::Create, WriteMode::CreateOnly].contains(mode) => Ok(None),
            _ => Err(refused),
        }
    }

    async fn request(&self, path: &Path, bytes: Bytes, mode: PutMode) -> object_store::Result<PutResult> {
        let options = PutOptions { mode, ..PutOptions::default() };
        self.objects.put_opts(path, PutPayload::from_bytes(bytes), options).await
    }

    /// As [`Self::put`], if the lease is held. Check and request are one step, without a wait between them.
    pub(super) async fn put_with_lease(
        &self,
        key: &str,
        bytes: Bytes,
        mode: WriteMode,
    ) -> Result<UpdateVersion> {
        if !self.has_fault(StoreBug::IndexUnchecked) {
            self.guard.check()?;
        }
        self.put(key, bytes, mode).await
    }

    /// Removes an object if it exists.
    pub(super) async fn remove(&self, key: &str) -> Result<()> {
        match self.objects.delete(&self.path(key)?).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            done => done.map_err(Error::store("cannot be removed", self.object_name(key))),
        }
    }

    /// As [`Self::remove`], if the lease is held; in one step as [`Self::put_with_lease`].
    pub(super) async fn remove_with_lease(&self, key: &str) -> Result<()> {
        if !self.has_fault(StoreBug::RemovalUnchecked) {
            self.guard.check()?;
        }
        self.remove(key).await
    }

    /// Objects directly in the prefix.
    pub(super) async fn list_top(&self) -> object_store::Result<Vec<ObjectMeta>> {
        let mut found = self.objects.list_with_delimiter(Some(&self.prefix)).await?.objects;
        if !self.confirms_listings() {
            return Ok(found);
        }
        let last = found.iter().map(|object| object.location.clone()).max();
        let mut after = last.unwrap_or_else(|| self.prefix.clone());
        loop {
            let asked_after = after.clone();
            let mut rest = self.listed_after(&self.prefix, &asked_after);
            while let Some(object) = rest.next().await.transpose()? {
                let key = self.key(&object);
                if let Some((directory, _)) = key.split_once('/') {
                    // The character after `/`: past everything in the directory.
                    after = Path::parse(format!("{}/{directory}0", self.prefix))?;
                    break;
                }
                after = object.location.clone();
                found.push(object);
            }
            if after == asked_after {
                return Ok(found);
            }
        }
    }

    /// Objects below a directory of the prefix; only those that sort after `after`.
    pub(super) fn listing(
        &self,
        directory: &str,
        after: Option<&Path>,
    ) -> Result<futures_util::stream::BoxStream<'static, object_store::Result<ObjectMeta>>> {
        let path = self.path(directory)?;
        Ok(match after {
            None => self.objects.list(Some(&path)),
            Some(after) => self.listed_after(&path, after),
        })
    }

    /// Objects below a path that sort after `after`. A server without ListObjectsV2 ignores where to start.
    fn listed_after(
        &self,
        path: &Path,
        after: &Path,
    ) -> futures_util::stream::BoxStream<'static, object_store::Result<ObjectMeta>> {
        let first = after.clone();
        let later = move |object: &ObjectMeta| futures_util::future::ready(object.location > first);
        self.objects.list_with_offset(Some(path), after).try_filter(later).boxed()
    }

    /// Returns true if a listing is complete only when the server, asked again, has nothing after its last
    /// object: there are servers that end a listing early and report that it is complete.
    pub(super) fn confirms_listings(&self) -> bool {
        matches!(self.location.scheme(), Scheme::S3 | Scheme::Google)
    }

    /// The path of an object, as listed: `Path::from` would escape characters that other programs' names
    /// have.
    fn path(&self, key: &str) -> Result<Path> {
        Path::parse(format!("{}/{key}", self.prefix)).map_err(|error| Error::Location {
            text: format!("{}: {error}; rename the object", self.object_name(key)),
        })
    }
}
