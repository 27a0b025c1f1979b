//! A prefix of a store, opened for one operation: its objects and the runtime that executes requests.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::ObjectMeta;
use tokio::sync::Semaphore;
use towline_channel::Cancel;

use super::lease_state::LeaseGuard;
use super::objects::Objects;
use super::runtime::{Clock, FILE_THREADS, Started};
use super::{Error, Result, Runtime, service};
use crate::location::{Location, Scheme};

/// Objects processed per step of a listing.
const PAGE_OBJECTS: usize = 1000;

/// Callback for each object of a listing.
type ObjectVisitor<'a> = &'a mut dyn FnMut(ObjectMeta) -> Result<()>;

/// An open prefix.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) objects: Objects,
    /// Executor of requests.
    pub(super) runtime: Runtime,
    cancel: Option<Cancel>,
    /// From now on nothing can be cancelled.
    is_committed: AtomicBool,
}

impl Deref for Store {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

impl Store {
    /// Opens the prefix without sending a request. `cancel` ends every wait.
    pub(super) fn open(prefix: &Location, cancel: Option<Cancel>) -> Result<Arc<Self>> {
        let runtime = Runtime::start().map_err(|why| Error::Host { what: "the store's thread", why })?;
        let guard = LeaseGuard::default();
        let objects = Objects::new(service::open(prefix, &guard)?, prefix, Clock::System, guard)?;
        Ok(Arc::new(Self { objects, runtime, cancel, is_committed: AtomicBool::new(false) }))
    }

    /// As [`Self::open`]. Refuses a directory that does not exist, which opening the store would create.
    pub(super) fn open_existing(prefix: &Location, cancel: Option<Cancel>) -> Result<Arc<Self>> {
        if prefix.scheme() == Scheme::Directory && !prefix.directory().is_dir() {
            let directory = prefix.directory();
            let text = format!("{prefix}: {} is not a directory; correct the path", directory.display());
            return Err(Error::Location { text });
        }
        Self::open(prefix, cancel)
    }

    /// For a simulated participant.
    #[cfg(test)]
    pub(super) fn simulated(objects: Objects, actor: super::simulation::Actor) -> Self {
        let runtime = Runtime::Simulated(actor);
        Self { objects, runtime, cancel: None, is_committed: AtomicBool::new(false) }
    }

    /// Fails if the operation was cancelled.
    pub(super) fn check_cancelled(&self) -> Result<()> {
        #[cfg(test)]
        if let Runtime::Simulated(actor) = &self.runtime
            && actor.has_crashed()
        {
            return Err(Error::Cancelled);
        }
        if self.cancel().is_some_and(Cancel::is_cancelled) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Waits that begin from now on cannot be cancelled.
    pub(super) fn ignore_cancellation(&self) {
        self.is_committed.store(true, Ordering::Relaxed);
    }

    fn cancel(&self) -> Option<&Cancel> {
        self.cancel.as_ref().filter(|_| !self.is_committed.load(Ordering::Relaxed))
    }

    /// For a store in a directory: a slot per thread, for requests that would be queued for them and could
    /// not be cancelled there.
    pub(super) fn file_slots(&self) -> Option<Arc<Semaphore>> {
        let is_real = matches!(self.runtime, Runtime::Thread(_));
        let is_directory = self.location.scheme() == Scheme::Directory;
        (is_real && is_directory).then(|| Arc::new(Semaphore::new(FILE_THREADS)))
    }

    /// Runs `work` and waits for its result or for cancellation.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.finish(self.runtime.begin(work))
    }

    /// Waits for the result of work that was started, or for cancellation.
    pub(super) fn finish<T: Send + 'static>(&self, started: Started<Result<T>>) -> Result<T> {
        self.runtime.finish(self.cancel(), started)?
    }

    /// As [`Self::wait`], ignoring cancellation: for requests at the very end of an operation.
    pub(super) fn wait_uncancelled<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.runtime.finish(None, self.runtime.begin(work))?
    }

    /// An object's bytes, at most `limit`; `None` if it does not exist.
    pub(super) fn get(&self, key: &str, limit: u64) -> Result<Option<Bytes>> {
        Ok(self.wait(self.objects.get(key, limit))?.map(|(bytes, _)| bytes))
    }

    /// Metadata of an object; `None` if it does not exist.
    pub(super) fn find(&self, key: &str) -> Result<Option<ObjectMeta>> {
        self.wait(self.objects.head(key))
    }

    /// Removes an object if it exists. Ignores cancellation.
    pub(super) fn delete(&self, key: &str) -> Result<()> {
        let (objects, key) = (self.objects.clone(), key.to_owned());
        self.wait_uncancelled(async move { objects.remove(&key).await })
    }

    /// Calls `visit` for each object below `directory`, or, for `""`, for each object directly in the prefix.
    pub(super) fn list(&self, directory: &str, visit: ObjectVisitor<'_>) -> Result<()> {
        let failed = |name: String| move |error| Error::store("cannot be listed", name)(error);
        if directory.is_empty() {
            let (objects, name) = (self.objects.clone(), self.location.to_string());
            let listed = self.wait(async move { objects.list_top().await.map_err(failed(name)) })?;
            return listed.into_iter().try_for_each(visit);
        }
        let mut pages = self.objects.listing(directory, None)?.try_chunks(PAGE_OBJECTS);
        // The last object since the server was asked.
        let mut last = None;
        loop {
            let name = self.object_name(directory);
            let next = async move {
                let page = pages.next().await.transpose();
                Ok((page.map_err(|error| failed(name)(error.1))?, pages))
            };
            let page;
            (page, pages) = self.wait(next)?;
            match (page, last.take()) {
                (Some(page), _) => {
                    last = page.last().map(|object| object.location.clone());
                    page.into_iter().try_for_each(&mut *visit)?;
                }
                (None, Some(after)) if self.objects.confirms_listings() => {
                    pages = self.objects.listing(directory, Some(&after))?.try_chunks(PAGE_OBJECTS);
                }
                (None, _) => return Ok(()),
            }
        }
    }
}
