//! An object store that implements `object_store`'s trait: strongly consistent, with times in seconds and
//! paged listings.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::super::fault::StoreBug;
use super::super::lease_state::LeaseGuard;
use super::actor::{Actor, SlotFuture};

/// Objects per page of a listing.
const PAGE_OBJECTS: usize = 4;

/// Support of conditional writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conditions {
    /// All conditions are enforced.
    All,
    /// Only creation, as in a directory.
    Create,
    /// Conditional requests are refused.
    Refused,
    /// Conditions are ignored.
    Ignored,
}

/// A request that has arrived at the store.
#[derive(Debug, Clone)]
pub(super) enum StoreRequest {
    Put {
        key: String,
        bytes: Bytes,
        mode: PutMode,
    },
    Get {
        key: String,
    },
    Delete {
        key: String,
    },
    /// Objects below `prefix` after the key `after`.
    List {
        prefix: String,
        after: String,
    },
}

impl StoreRequest {
    fn changes(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Delete { .. })
    }
}

/// An object of the store.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) bytes: Bytes,
    pub(super) modified: Duration,
}

impl Stored {
    /// Hash of the content, as in S3.
    pub(super) fn e_tag(&self) -> String {
        blake3::hash(&self.bytes).to_hex().to_string()
    }

    pub(super) fn meta(&self, key: &str) -> ObjectMeta {
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(self.modified.as_secs());
        ObjectMeta {
            location: Path::from(key),
            last_modified: modified.into(),
            size: self.bytes.len() as u64,
            e_tag: Some(self.e_tag()),
            version: None,
        }
    }
}

/// Response of the store.
#[derive(Debug)]
pub(super) enum StoreReply {
    Put(PutResult),
    Object(Stored),
    Page(Vec<ObjectMeta>),
    Done,
}

/// Source of all simulated errors.
fn simulated() -> Box<std::io::Error> {
    Box::new(std::io::Error::other("simulated"))
}

pub(super) fn not_found(key: &str) -> Error {
    Error::NotFound { path: key.into(), source: simulated() }
}

pub(super) fn exists(key: &str) -> Error {
    Error::AlreadyExists { path: key.into(), source: simulated() }
}

pub(super) fn precondition(key: &str) -> Error {
    Error::Precondition { path: key.into(), source: simulated() }
}

pub(super) fn failed() -> Error {
    Error::Generic { store: "model", source: simulated() }
}

pub(super) fn unsupported() -> Error {
    Error::NotImplemented { operation: "conditional writes".into(), implementer: "model".into() }
}

/// The store as seen by one participant.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) actor: Actor,
    pub(super) guard: LeaseGuard,
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "model")
    }
}

impl Model {
    async fn request(&self, request: StoreRequest) -> Result<StoreReply> {
        // Requests over a network are checked at every attempt, after delays for credentials, name
        // resolution, connections and failed attempts. Requests to a directory are not retried, and not
        // checked.
        if self.actor.world.is_remote() {
            let before = self.actor.world.request_delay();
            if !before.is_zero() {
                self.actor.sleep(before).await;
            }
            // The check did not exist in the version with this bug.
            if request.changes() && self.actor.world.fault() != Some(StoreBug::GapHeals) {
                self.guard.check().map_err(|_| failed())?;
            }
        }
        SlotFuture(self.actor.world.send(self.actor.number, request)).await
    }
}

#[async_trait]
impl ObjectStore for Model {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let bytes = payload.iter().flatten().copied().collect();
        let request = StoreRequest::Put { key: location.to_string(), bytes, mode: options.mode };
        match self.request(request).await? {
            StoreReply::Put(result) => Ok(result),
            other => panic!("{other:?}"),
        }
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(unsupported())
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let key = location.to_string();
        let StoreReply::Object(stored) = self.request(StoreRequest::Get { key: key.clone() }).await? else {
            panic!("not an object");
        };
        let meta = stored.meta(&key);
        let bytes = if options.head { Bytes::new() } else { stored.bytes };
        let range = Range { start: 0, end: bytes.len() as u64 };
        let payload = GetResultPayload::Stream(futures_util::stream::once(async move { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range, attributes: Default::default(), extensions: Default::default() })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let model = self.clone();
        locations
            .then(move |location| {
                let model = model.clone();
                async move {
                    let location = location?;
                    model.request(StoreRequest::Delete { key: location.to_string() }).await?;
                    Ok(location)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.map(|prefix| format!("{prefix}/")).unwrap_or_default();
        let model = self.clone();
        let pages = futures_util::stream::unfold(Some(String::new()), move |after| {
            let (model, prefix) = (model.clone(), prefix.clone());
            async move {
                let page = match model.request(StoreRequest::List { prefix, after: after? }).await {
                    Ok(StoreReply::Page(page)) => page,
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => return Some((vec![Err(error)], None)),
                };
                let next = page.get(PAGE_OBJECTS - 1).map(|object| object.location.to_string());
                Some((page.into_iter().map(Ok).collect(), next))
            }
        });
        pages.flat_map(futures_util::stream::iter).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let objects: Vec<_> = self.list(prefix).collect().await;
        let depth = prefix.map_or(0, |prefix| prefix.parts().count()) + 1;
        let objects: Result<Vec<ObjectMeta>> = objects.into_iter().collect();
        let objects =
            objects?.into_iter().filter(|object| object.location.parts().count() == depth).collect();
        Ok(ListResult { common_prefixes: Vec::new(), objects, extensions: Default::default() })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(unsupported())
    }
}

/// One page of a listing.
pub(super) fn page<'a>(
    objects: impl Iterator<Item = (&'a String, &'a Stored)>,
    prefix: &str,
    after: &str,
) -> Vec<ObjectMeta> {
    let below = objects.filter(|(key, _)| key.starts_with(prefix) && key.as_str() > after);
    below.take(PAGE_OBJECTS).map(|(key, stored)| stored.meta(key)).collect()
}

/// The model as `object_store`'s trait.
pub(super) fn shared(model: Model) -> Arc<dyn ObjectStore> {
    Arc::new(model)
}
