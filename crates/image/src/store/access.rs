//! A prefix of a store, and the few things that are done with its objects.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig,
};
use towline_channel::Cancel;

use super::connector::Connector;
use super::credentials::Profile;
use super::location::{Location, Scheme};
use super::{Error, RETRIES_MAX, RETRY_TIMEOUT, Result, Runtime};

/// Names of objects that a listing gives at once to whoever takes them.
type Found<'a> = &'a mut dyn FnMut(ObjectMeta) -> Result<()>;

/// A prefix, open.
#[derive(Debug)]
pub(super) struct Store {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    shown: Location,
    runtime: Runtime,
    cancel: Option<Cancel>,
}

/// What becomes of an object of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    /// It is replaced.
    Replace,
    /// It stays, and the call fails.
    Create,
}

impl Store {
    /// Opens the prefix; nothing is asked of the store yet. `cancel` ends every wait for it.
    pub(super) fn open(prefix: &Location, cancel: Option<Cancel>) -> Result<Self> {
        let runtime = Runtime::start().map_err(|why| Error::Host { what: "the store's thread", why })?;
        let objects = objects(prefix)?;
        let path = Path::parse(prefix.prefix())
            .map_err(|error| Error::Location { text: format!("{prefix}: {error}") })?;
        Ok(Self { objects, prefix: path, shown: prefix.clone(), runtime, cancel })
    }

    /// The prefix.
    pub(super) fn location(&self) -> &Location {
        &self.shown
    }

    /// An object of the prefix, for people.
    pub(super) fn shown(&self, key: &str) -> String {
        self.shown.object(key)
    }

    /// Ends here if somebody said so.
    pub(super) fn check_cancelled(&self) -> Result<()> {
        match self.cancel.as_ref().is_some_and(Cancel::is_cancelled) {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    /// Has something done by the store's thread.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// An object's bytes, at most `limit`; `None` if it is not there.
    pub(super) fn get(&self, key: &str, limit: u64) -> Result<Option<Bytes>> {
        self.runtime.wait(self.cancel.as_ref(), self.getting(key, limit))?
    }

    /// As [`Self::get`], to be waited for elsewhere.
    pub(super) fn getting(
        &self,
        key: &str,
        limit: u64,
    ) -> impl Future<Output = Result<Option<Bytes>>> + Send + use<> {
        let (objects, path, object) = (Arc::clone(&self.objects), self.path(key), self.shown(key));
        async move {
            let found = match objects.get(&path).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(None),
                found => found.map_err(Error::store("cannot be read", &object))?,
            };
            if found.meta.size > limit {
                return Err(Error::TooLong { object, limit });
            }
            let mut bytes = BytesMut::with_capacity(found.meta.size as usize);
            let mut parts = found.into_stream();
            while let Some(part) = parts.next().await {
                bytes.extend_from_slice(&part.map_err(Error::store("cannot be read", &object))?);
                // A server may send more than it said.
                if bytes.len() as u64 > limit {
                    return Err(Error::TooLong { object, limit });
                }
            }
            Ok(Some(bytes.freeze()))
        }
    }

    /// Puts an object.
    pub(super) fn put(&self, key: &str, bytes: Bytes, mode: Put) -> Result<()> {
        self.runtime.wait(self.cancel.as_ref(), self.putting(key, bytes, mode))?
    }

    /// As [`Self::put`], though somebody wants to end: what is announced or taken back at the very end.
    pub(super) fn put_anyway(&self, key: &str, bytes: Bytes, mode: Put) -> Result<()> {
        self.runtime.wait(None, self.putting(key, bytes, mode))?
    }

    /// As [`Self::put`], to be waited for elsewhere.
    pub(super) fn putting(
        &self,
        key: &str,
        bytes: Bytes,
        mode: Put,
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let (objects, path, object) = (Arc::clone(&self.objects), self.path(key), self.shown(key));
        let image = object.strip_suffix(super::location::SUFFIX).unwrap_or(&object).to_owned();
        async move {
            let put = |mode| {
                let options = PutOptions { mode, ..PutOptions::default() };
                objects.put_opts(&path, PutPayload::from_bytes(bytes.clone()), options)
            };
            let replace = || put(PutMode::Overwrite);
            let done = match mode {
                Put::Replace => replace().await,
                Put::Create => match put(PutMode::Create).await {
                    // Stores that know no conditions: the look beforehand has to do.
                    Err(
                        object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. },
                    ) => replace().await,
                    // A try that arrived, though its answer did not, makes the next one find its own work.
                    Err(object_store::Error::AlreadyExists { .. }) => {
                        let there = objects.get(&path).await;
                        let there = match there {
                            Ok(there) => there.bytes().await.ok(),
                            Err(_) => None,
                        };
                        match there {
                            Some(there) if there == bytes => return Ok(()),
                            _ => return Err(Error::Exists { image }),
                        }
                    }
                    done => done,
                },
            };
            done.map(drop).map_err(Error::store("cannot be written", object))
        }
    }

    /// What is known of an object; `None` if it is not there.
    pub(super) fn head(&self, key: &str) -> Result<Option<ObjectMeta>> {
        let (objects, path) = (Arc::clone(&self.objects), self.path(key));
        let found = self.runtime.wait(self.cancel.as_ref(), async move { objects.head(&path).await })?;
        match found {
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            found => Ok(Some(found.map_err(Error::store("cannot be looked at", self.shown(key)))?)),
        }
    }

    /// Removes an object; one that is not there is no failure. Not ended by who wants to end.
    pub(super) fn remove(&self, key: &str) -> Result<()> {
        let (objects, path) = (Arc::clone(&self.objects), self.path(key));
        match self.runtime.wait(None, async move { objects.delete(&path).await })? {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            done => done.map_err(Error::store("cannot be removed", self.shown(key))),
        }
    }

    /// Gives each object below `directory` (`""`: right in the prefix, and none below it) to `found`, with its whole path.
    pub(super) fn list(&self, directory: &str, found: Found<'_>) -> Result<()> {
        let objects = Arc::clone(&self.objects);
        let failed = |shown: String| move |error| Error::store("cannot be listed", shown)(error);
        if directory.is_empty() {
            let prefix = self.prefix.clone();
            let listing = async move { objects.list_with_delimiter(Some(&prefix)).await };
            let listed = self.runtime.wait(self.cancel.as_ref(), listing)?;
            let listed = listed.map_err(failed(self.shown.to_string()))?;
            return listed.objects.into_iter().try_for_each(found);
        }
        let (sender, receiver) = std::sync::mpsc::sync_channel(4);
        let path = self.path(directory);
        self.runtime.spawn(async move {
            let mut pages = objects.list(Some(&path)).try_chunks(1000);
            while let Some(page) = pages.next().await {
                let (page, last) = match page {
                    Ok(page) => (Ok(page), false),
                    Err(error) => (Err(error.1), true),
                };
                // Room is made by who waits below; meanwhile nothing else of this store is asked for.
                if sender.send(page).is_err() || last {
                    return;
                }
            }
        });
        loop {
            match receiver.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(page)) => page.into_iter().try_for_each(&mut *found)?,
                Ok(Err(error)) => return Err(failed(self.shown(directory))(error)),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => self.check_cancelled()?,
            }
        }
    }

    /// An object's key within the prefix.
    pub(super) fn key(&self, object: &ObjectMeta) -> String {
        let whole = object.location.as_ref();
        let rest = whole.strip_prefix(self.prefix.as_ref()).unwrap_or(whole);
        rest.trim_start_matches('/').to_owned()
    }

    fn path(&self, key: &str) -> Path {
        Path::from(format!("{}/{key}", self.prefix))
    }
}

fn objects(prefix: &Location) -> Result<Arc<dyn ObjectStore>> {
    let retry = RetryConfig {
        backoff: BackoffConfig { max_backoff: Duration::from_secs(5), ..BackoffConfig::default() },
        max_retries: RETRIES_MAX,
        retry_timeout: RETRY_TIMEOUT,
    };
    let failed = |error| Error::store("cannot be used", prefix.to_string())(error);
    let bucket = prefix.authority();
    Ok(match prefix.scheme() {
        Scheme::S3 => {
            let profile = Profile::load()?;
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
            let is_set = |name: &str| std::env::var_os(name).is_some();
            if let (false, Some(id), Some(secret)) =
                (is_set("AWS_ACCESS_KEY_ID"), profile.key_id, profile.secret)
            {
                builder = builder.with_access_key_id(id).with_secret_access_key(secret);
                if let Some(token) = profile.token {
                    builder = builder.with_token(token);
                }
            }
            if let (false, false, Some(region)) =
                (is_set("AWS_REGION"), is_set("AWS_DEFAULT_REGION"), profile.region)
            {
                builder = builder.with_region(region);
            }
            Arc::new(builder.with_retry(retry).with_http_connector(Connector).build().map_err(failed)?)
        }
        Scheme::Google => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            Arc::new(builder.with_retry(retry).with_http_connector(Connector).build().map_err(failed)?)
        }
        Scheme::Azure => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
            Arc::new(builder.with_retry(retry).with_http_connector(Connector).build().map_err(failed)?)
        }
        Scheme::Http | Scheme::Https => {
            let is_http = prefix.scheme() == Scheme::Http;
            let options = ClientOptions::new().with_allow_http(is_http);
            let url = format!("{}://{bucket}", if is_http { "http" } else { "https" });
            let builder = HttpBuilder::new().with_url(url).with_client_options(options);
            Arc::new(builder.with_retry(retry).with_http_connector(Connector).build().map_err(failed)?)
        }
        Scheme::Directory => {
            let directory = prefix.directory();
            let store = |source: io::Error| {
                let object = directory.display().to_string();
                let source = object_store::Error::Generic { store: "directory", source: Box::new(source) };
                Error::store("cannot be used", object)(source)
            };
            std::fs::create_dir_all(&directory).map_err(store)?;
            let local = LocalFileSystem::new_with_prefix(&directory).map_err(failed)?;
            Arc::new(local.with_fsync(true))
        }
    })
}
