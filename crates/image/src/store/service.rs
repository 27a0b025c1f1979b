//! Opens a store: selects the service and its credentials.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use super::connector::Connector;
use super::credentials::Profile;
use super::lease_state::LeaseGuard;
use super::location::{Location, Scheme};
use super::{Error, RETRIES_MAX, RETRY_TIMEOUT, Result};

/// Opens the objects of a prefix. Modifying requests are checked with `guard`.
pub(super) fn open(prefix: &Location, guard: &LeaseGuard) -> Result<Arc<dyn ObjectStore>> {
    let retry = RetryConfig {
        backoff: BackoffConfig { max_backoff: Duration::from_secs(5), ..BackoffConfig::default() },
        max_retries: RETRIES_MAX,
        retry_timeout: RETRY_TIMEOUT,
    };
    let failed = |error| Error::store("cannot be used", prefix.to_string())(error);
    let bucket = prefix.authority();
    let connector = || Connector::new(guard.clone());
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
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Google => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Azure => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
        }
        Scheme::Http | Scheme::Https => {
            let is_http = prefix.scheme() == Scheme::Http;
            let options = ClientOptions::new().with_allow_http(is_http);
            let url = format!("{}://{bucket}", if is_http { "http" } else { "https" });
            let builder = HttpBuilder::new().with_url(url).with_client_options(options);
            Arc::new(builder.with_retry(retry).with_http_connector(connector()).build().map_err(failed)?)
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
