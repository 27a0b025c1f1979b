//! Leases: objects by which uploads, readers and collectors announce themselves in the store, so no needed
//! object is removed.
//!
//! ```text
//!   upload      uploads/ID      create ─► collection alive? refuse ─► list chunks ─► … ─► check the lease · put the index ─► remove
//!   reader      readers/ID      get the index ─► create, naming the index ─► index unchanged? ─► … ─► remove
//!   collection  collections/ID  create ─► collection or upload alive? refuse ─► list ─► (check the lease · remove a chunk)… ─► remove
//! ```
//!
//! - Each process creates its own lease before it lists the others'. Stores are strongly consistent, so of
//!   two processes at least one finds the other.
//! - A lease is renewed every [`LEASE_INTERVAL`], and only while it exists: one that was removed is lost. A
//!   gap of [`LEASE_GAP_MAX`](super::LEASE_GAP_MAX), by a clock that counts suspended time, loses it for good
//!   ([`LeaseState`]).
//! - The owner of a lease that was not renewed for [`LEASE_AGE_MAX`], by the store's own times, is considered
//!   dead. That is twice the gap, so the owner itself has detected the loss; the other half is for its
//!   requests in flight.
//! - If a failed request may still arrive, the lease stays in the store ([`Lease::keep_in_store`]) until it
//!   expires, so no conflicting operation begins.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::SystemTime;

use bytes::Bytes;
use object_store::UpdateVersion;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::access::Store;
use super::fault::StoreBug;
use super::lease_state::LeaseState;
use super::objects::{Object, Objects, WriteMode, version_of};
use super::{Error, LEASE_AGE_MAX, LEASE_INTERVAL, LEASE_RETRY_INTERVAL, Result};
use crate::manifest::{Digest, Timestamp};

/// Maximum length of a lease.
const LEASE_BYTES_MAX: u64 = 4096;
/// Attempts of a renewal that finds another version of its lease than expected: each follows one whose
/// response was lost.
const RENEWAL_ATTEMPTS_MAX: usize = 4;

/// Kind of process that holds a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseKind {
    /// An upload.
    Upload,
    /// A reader.
    Reader,
    /// A garbage collection.
    Collection,
}

impl LeaseKind {
    /// All kinds.
    pub(super) const ALL: [Self; 3] = [Self::Upload, Self::Reader, Self::Collection];

    /// Directory of these leases.
    pub(super) const fn directory(self) -> &'static str {
        match self {
            Self::Upload => "uploads",
            Self::Reader => "readers",
            Self::Collection => "collections",
        }
    }

    /// Key of the lease with this number.
    fn key(self, id: u128) -> String {
        format!("{}/{id:032x}", self.directory())
    }

    /// Returns true if `key` is that of a lease of this kind.
    fn is_key(self, key: &str) -> bool {
        let id = key.rsplit_once('/').and_then(|(_, id)| u128::from_str_radix(id, 16).ok());
        id.is_some_and(|id| self.key(id) == key)
    }
}

/// Conditional writes that a store enforces, according to its leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConditionalWrites {
    /// Create and update: an object is created only if it does not exist, and replaced only if it has the
    /// expected version.
    All,
    /// Create only.
    Create,
    /// None; only a check before the write is possible.
    #[default]
    None,
}

/// Content of a lease, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseOwner {
    /// Key of the image's index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) image: Option<String>,
    /// BLAKE3 of the index that a reader needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) index: Option<Digest>,
    host: String,
    process: u32,
    began: Timestamp,
    renewals: u64,
}

impl LeaseOwner {
    /// A lease owned by this process, for an image.
    pub(super) fn new(image: Option<String>, index: Option<Digest>) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { image, index, host, process: std::process::id(), began: Timestamp::now(), renewals: 0 }
    }

    fn bytes(&self) -> Bytes {
        serde_json::to_vec(self).expect("texts and numbers").into()
    }

    fn describe(&self) -> String {
        format!("process {} of host {:?}, since {}", self.process, self.host, self.began)
    }
}

/// A lease found in the store, whose age is the time since its last renewal.
#[derive(Debug, Clone)]
pub(super) struct LeaseEntry(pub(super) Object);

impl LeaseEntry {
    /// Returns true if its owner may be alive.
    pub(super) fn is_alive(&self) -> bool {
        self.0.age < LEASE_AGE_MAX
    }

    /// Content of the lease; `None` if it has since been removed, `Some(None)` if it is invalid.
    pub(super) fn owner(&self, store: &Store) -> Result<Option<Option<LeaseOwner>>> {
        match store.get(&self.0.key, LEASE_BYTES_MAX) {
            Ok(bytes) => Ok(bytes.map(|bytes| serde_json::from_slice(&bytes).ok())),
            Err(Error::TooLong { .. }) => Ok(Some(None)),
            Err(error) => Err(error),
        }
    }

    /// Description of its owner.
    pub(super) fn describe_owner(&self, store: &Store) -> String {
        let owner = match self.owner(store) {
            Ok(Some(Some(owner))) => owner.describe(),
            _ => "an unknown process".to_owned(),
        };
        format!("{owner} ({})", store.object_name(&self.0.key))
    }
}

/// Lists the leases of a kind. Other objects in their directory are ignored: they belong to other programs.
pub(super) fn leases(store: &Store, kind: LeaseKind, now: SystemTime) -> Result<Vec<LeaseEntry>> {
    let mut found = Vec::new();
    store.list(kind.directory(), &mut |object| {
        let object = store.object(&object, now);
        if kind.is_key(&object.key) {
            found.push(LeaseEntry(object));
        }
        Ok(())
    })?;
    Ok(found)
}

/// A lease that is renewed until it is dropped, which removes it. The lease of a killed process expires.
#[derive(Debug)]
pub(super) struct Lease {
    store: Arc<Store>,
    renewal: Arc<Renewal>,
    /// Dropped to stop the renewals.
    alive: Option<Arc<()>>,
    is_kept: AtomicBool,
}

/// State that the lease shares with the task that renews it.
#[derive(Debug)]
struct Renewal {
    objects: Objects,
    lease_state: Arc<LeaseState>,
    object: tokio::sync::Mutex<LeaseObject>,
    /// Not set for readers.
    writes: OnceLock<ConditionalWrites>,
    kind: LeaseKind,
}

/// The lease's object in the store.
#[derive(Debug)]
struct LeaseObject {
    key: String,
    owner: LeaseOwner,
    version: UpdateVersion,
}

impl Lease {
    /// Creates the lease of an upload of the image with this key. Fails if a collection is active.
    pub(super) fn upload(store: &Arc<Store>, image: &str) -> Result<Self> {
        let checks_first = store.has_fault(StoreBug::UploadChecksFirst);
        if checks_first {
            refuse_others(store, LeaseKind::Collection, SystemTime::UNIX_EPOCH, "")?;
        }
        let lease = Self::create(store, LeaseKind::Upload, LeaseOwner::new(Some(image.into()), None))?;
        let now = lease.store_time()?;
        if !checks_first {
            refuse_others(store, LeaseKind::Collection, now, "")?;
        }
        Ok(lease)
    }

    /// Creates the lease of a reader of the image with this key, whose index has this BLAKE3.
    pub(super) fn reader(store: &Arc<Store>, image: &str, index: Digest) -> Result<Self> {
        Self::create(store, LeaseKind::Reader, LeaseOwner::new(Some(image.into()), Some(index)))
    }

    /// Creates the lease of a collection. Fails if another collection or an upload is active.
    pub(super) fn collection(store: &Arc<Store>) -> Result<Self> {
        let lease = Self::create(store, LeaseKind::Collection, LeaseOwner::new(None, None))?;
        let now = lease.store_time()?;
        let others = refuse_others(store, LeaseKind::Collection, now, &lease.key());
        if !store.has_fault(StoreBug::SharedCollection) {
            others?;
        }
        refuse_others(store, LeaseKind::Upload, now, "")?;
        Ok(lease)
    }

    fn create(store: &Arc<Store>, kind: LeaseKind, owner: LeaseOwner) -> Result<Self> {
        let shared = kind == LeaseKind::Collection && store.has_fault(StoreBug::SharedCollection);
        let key = if shared { kind.key(0) } else { kind.key(fastrand::u128(..)) };
        let sent_at = store.clock.now();
        let mode = if shared { WriteMode::Replace } else { WriteMode::Create };
        let version = store.wait(store.put(&key, owner.bytes(), mode))?;
        let lease_state =
            LeaseState::new(store.location.to_string(), store.clock.clone(), sent_at, store.fault);
        let renewal = Arc::new(Renewal {
            objects: store.objects.clone(),
            lease_state: Arc::new(lease_state),
            object: tokio::sync::Mutex::new(LeaseObject { key, owner, version }),
            writes: OnceLock::new(),
            kind,
        });
        let alive = Arc::default();
        let renewing = Arc::clone(&renewal).run(Arc::downgrade(&alive));
        let lease =
            Self { store: Arc::clone(store), renewal, alive: Some(alive), is_kept: AtomicBool::new(false) };
        if kind != LeaseKind::Reader {
            // A reader modifies only its own lease.
            store.guard.require(&lease.renewal.lease_state);
            let renewal = Arc::clone(&lease.renewal);
            let writes = store.wait(async move { renewal.probe().await })?;
            lease.renewal.writes.get_or_init(|| writes);
        }
        store.runtime.spawn(renewing);
        Ok(lease)
    }

    /// The store's current time: that of the lease itself.
    pub(super) fn store_time(&self) -> Result<SystemTime> {
        let key = self.key();
        match self.store.find(&key)? {
            Some(found) => Ok(found.last_modified.into()),
            None => {
                self.state()
                    .mark_lost(format!("{} was removed by another process", self.store.object_name(&key)));
                self.state().check().map(|()| SystemTime::UNIX_EPOCH)
            }
        }
    }

    /// State of the lease.
    pub(super) fn state(&self) -> &LeaseState {
        &self.renewal.lease_state
    }

    /// Conditional writes that the store enforces; not detected for readers.
    pub(super) fn writes(&self) -> ConditionalWrites {
        self.renewal.writes()
    }

    /// Keeps the lease in the store after it is dropped, until it expires: a failed request may still arrive.
    pub(super) fn keep_in_store(&self) {
        self.is_kept.store(true, Ordering::Relaxed);
    }

    /// Key of the lease. Waits for a renewal in flight.
    pub(super) fn key(&self) -> String {
        let renewal = Arc::clone(&self.renewal);
        let key = self.store.wait_uncancelled(async move { Ok(renewal.object.lock().await.key.clone()) });
        key.unwrap_or_default()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.alive.take();
        if self.is_kept.load(Ordering::Relaxed) {
            return;
        }
        let renewal = Arc::clone(&self.renewal);
        // After a renewal in flight, which would recreate it.
        let removed = self.store.wait_uncancelled(async move {
            let object = renewal.object.lock().await;
            renewal.objects.remove(&object.key).await
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "cannot remove the lease of this process; it expires in an hour");
        }
    }
}

impl Renewal {
    fn writes(&self) -> ConditionalWrites {
        self.writes.get().copied().unwrap_or_default()
    }

    /// Detects the conditional writes of the store by an update that must fail: its expected version is
    /// wrong.
    async fn probe(&self) -> Result<ConditionalWrites> {
        let mut object = self.object.lock().await;
        object.owner.renewals += 1;
        let bytes = object.owner.bytes();
        let wrong = UpdateVersion { e_tag: Some("\"0\"".into()), version: Some("1".into()) };
        let mut put = self.objects.put(&object.key, bytes.clone(), WriteMode::Update(wrong)).await;
        if put.as_ref().is_err_and(Error::is_unsupported) {
            put = self.objects.put(&object.key, bytes, WriteMode::Create).await;
        }
        match put {
            Err(Error::Changed { .. }) => Ok(ConditionalWrites::All),
            Err(Error::Exists { .. }) => Ok(ConditionalWrites::Create),
            Err(error) => Err(error),
            // The store ignores the condition.
            Ok(version) => {
                object.version = version;
                Ok(ConditionalWrites::None)
            }
        }
    }

    /// Renews the lease in the background while `alive` exists.
    async fn run(self: Arc<Self>, alive: Weak<()>) {
        let mut interval = LEASE_INTERVAL;
        loop {
            self.objects.clock.sleep(interval).await;
            let mut object = self.object.lock().await;
            if alive.strong_count() == 0 {
                return;
            }
            let sent_at = self.objects.clock.now();
            let heals = self.objects.has_fault(StoreBug::GapHeals);
            let renewed = match self.lease_state.check() {
                Err(_) if self.kind == LeaseKind::Reader => self.replace(&mut object).await,
                Err(_) if !heals => return,
                _ => self.renew(&mut object).await,
            };
            interval = match renewed {
                Ok(()) => {
                    self.lease_state.mark_renewed(sent_at);
                    LEASE_INTERVAL
                }
                Err(error) => {
                    tracing::warn!(%error, lease = self.objects.object_name(&object.key), "cannot renew the lease");
                    LEASE_RETRY_INTERVAL
                }
            };
        }
    }

    /// Renews the lease if it exists, else marks it as lost.
    async fn renew(&self, object: &mut LeaseObject) -> Result<()> {
        object.owner.renewals += 1;
        let bytes = object.owner.bytes();
        for _ in 0..RENEWAL_ATTEMPTS_MAX {
            if self.writes() != ConditionalWrites::All {
                match self.objects.head(&object.key).await? {
                    Some(found) => object.version = version_of(&found),
                    None if self.objects.has_fault(StoreBug::GapHeals) => {}
                    None => break,
                }
            }
            // Without conditional updates the check above must suffice.
            let mode = match self.writes() {
                ConditionalWrites::All => WriteMode::Update(object.version.clone()),
                ConditionalWrites::Create | ConditionalWrites::None => WriteMode::Replace,
            };
            match self.objects.put(&object.key, bytes.clone(), mode).await {
                Ok(version) => {
                    object.version = version;
                    return Ok(());
                }
                // The lease was removed, or an earlier attempt arrived and its response was lost.
                Err(Error::Changed { .. }) => match self.objects.head(&object.key).await? {
                    Some(found) => object.version = version_of(&found),
                    None if self.objects.has_fault(StoreBug::GapHeals) => {
                        object.version = self.objects.put(&object.key, bytes, WriteMode::Replace).await?;
                        return Ok(());
                    }
                    None => break,
                },
                Err(error) => return Err(error),
            }
        }
        let shown = self.objects.object_name(&object.key);
        self.lease_state.mark_lost(format!("{shown} was removed or replaced by another process"));
        self.lease_state.check()
    }

    /// A reader whose lease was lost continues while its chunks exist, and protects them by a new lease.
    async fn replace(&self, object: &mut LeaseObject) -> Result<()> {
        let key = self.kind.key(fastrand::u128(..));
        let sent_at = self.objects.clock.now();
        object.version = self.objects.put(&key, object.owner.bytes(), WriteMode::Create).await?;
        object.key = key;
        self.lease_state.mark_replaced(sent_at);
        Ok(())
    }
}

/// Fails if uploads or collections are active, besides that with the lease `own`.
fn refuse_others(store: &Store, kind: LeaseKind, now: SystemTime, own: &str) -> Result<()> {
    let found = leases(store, kind, now)?;
    let mut alive = found.iter().filter(|found| found.is_alive() && found.0.key != own);
    let Some(first) = alive.next() else { return Ok(()) };
    let (store, owner) = (store.location.to_string(), first.describe_owner(store));
    Err(match kind {
        LeaseKind::Collection => Error::Collecting { store, owner },
        _ => Error::Uploading { store, count: 1 + alive.count(), owner },
    })
}
